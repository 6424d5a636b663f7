"""Coverage of the intervals of evaluations on simulated suites: how often an interval holds the true value.

    python -m benchmarks.evals.coverage [--draws 4000]

A suite has problems with a probability of being solved each (beta distributed around the true rate), tasks that are
variants of a problem, and rollouts of each task. The true rate is drawn anew for each suite, so that no kind of suite
owes its coverage to the lattice of one rate. A percentile bootstrap over problems, and Wilson's interval over rollouts
as if they were independent, are computed on the same suites.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.report import report
from etude.evals.curves import best_of
from etude.evals.intervals import Interval, clustered_rate, crossed_rate, paired_difference, wilson

Rng = np.random.Generator
RATES = (0.1, 0.9)
RESAMPLED = 200


@dataclass(frozen=True)
class Kind:
    """A kind of simulated suites: `problems`, `variants` (tasks of a problem, drawn from these), `tries` per task, and
    `alike`, the correlation of the results of one problem."""

    name: str
    problems: int
    variants: tuple[int, ...]
    tries: int
    alike: float


KINDS = (
    Kind("127 problems, 4 variants each", 127, (4,), 1, 0.5),
    Kind("127 problems, 1 to 8 variants", 127, (1, 1, 2, 4, 8), 1, 0.5),
    Kind("127 problems, variants nearly equal", 127, (4,), 1, 0.9),
    Kind("60 problems, 4 variants each", 60, (4,), 1, 0.5),
    Kind("60 problems, 1 to 8 variants", 60, (1, 1, 2, 4, 8), 1, 0.3),
    Kind("164 problems, 1 try", 164, (1,), 1, 0.5),
    Kind("164 problems, 8 tries", 164, (1,), 8, 0.5),
    Kind("40 problems, 4 variants, 4 tries", 40, (4,), 4, 0.5),
)


def chances(rng: Rng, kind: Kind, rate: float) -> np.ndarray:
    """The probability of each problem to be solved, [problems]."""
    odds = (1 - kind.alike) / kind.alike
    return rng.beta(rate * odds, (1 - rate) * odds, kind.problems)


def suite(rng: Rng, kind: Kind, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Solved rollouts, bool [tasks, tries], and the problem of each task, [tasks]."""
    problems = np.repeat(np.arange(kind.problems), rng.choice(kind.variants, kind.problems))
    chance = chances(rng, kind, rate)[problems]
    return rng.random((len(problems), kind.tries)) < chance[:, None], problems


def clustered(solved: np.ndarray, problems: np.ndarray) -> Interval:
    return clustered_rate(solved.ravel().astype(float).tolist(), np.repeat(problems, solved.shape[1]).tolist())


def independent(solved: np.ndarray, problems: np.ndarray) -> Interval:
    return wilson(float(solved.sum()), solved.size)


def bootstrap(rng: Rng) -> Callable[[np.ndarray, np.ndarray], Interval]:
    """The percentile bootstrap over problems."""

    def interval(solved: np.ndarray, problems: np.ndarray) -> Interval:
        count = problems.max() + 1
        sums = np.bincount(problems, solved.sum(1), count)
        sizes = np.bincount(problems, minlength=count) * solved.shape[1]
        drawn = rng.integers(0, count, (RESAMPLED, count))
        rates = sums[drawn].sum(1) / sizes[drawn].sum(1)
        low, high = np.quantile(rates, (0.025, 0.975))
        return Interval(float(solved.mean()), float(low), float(high))

    return interval


def holds(interval: Interval, truth: float) -> bool:
    return interval.low <= truth <= interval.high


def rates(draws: int, kind: Kind, *, peers: bool) -> dict[str, float]:
    """Coverage of the intervals of one rate, by method."""
    rng = np.random.default_rng(7)
    methods = {"clustered": clustered}
    if peers:
        methods |= {"bootstrap": bootstrap(np.random.default_rng(8)), "independent": independent}
    hits = dict.fromkeys(methods, 0)
    for _ in range(draws):
        rate = rng.uniform(*RATES)
        found = suite(rng, kind, rate)
        for name, method in methods.items():
            hits[name] += holds(method(*found), rate)
    return {name: count / draws for name, count in hits.items()}


def pairs(draws: int, kind: Kind) -> float:
    """Coverage of the paired difference of two models: the second solves each problem with a chance of its own."""
    rng, hits = np.random.default_rng(9), 0
    for _ in range(draws):
        before, after = sorted(rng.uniform(*RATES, 2))
        problems = np.repeat(np.arange(kind.problems), rng.choice(kind.variants, kind.problems))
        shared = rng.random(kind.problems)  # problems that are easy for one model are easy for the other
        solved = [
            (rng.random((len(problems), kind.tries)) < spread(shared, rate, kind)[problems][:, None]).mean(1)
            for rate in (before, after)
        ]
        found = paired_difference((solved[1] - solved[0]).tolist(), problems.tolist())
        truth = true_mean(after, kind) - true_mean(before, kind)
        hits += holds(found, truth)
    return hits / draws


def spread(shared: np.ndarray, rate: float, kind: Kind) -> np.ndarray:
    """Chances of problems between 0 and 1 that rise with what the two models share."""
    return np.clip(rate + kind.alike * (shared - 0.5), 0.0, 1.0)


def true_mean(rate: float, kind: Kind) -> float:
    """The mean of `spread` over all problems."""
    return float(spread((np.arange(500) + 0.5) / 500, rate, kind).mean())


def curve(draws: int, kind: Kind) -> dict[str, float]:
    """Coverage of pass@k for k = 1, 2 and the number of tries."""
    rng, points = np.random.default_rng(10), sorted({1, 2, kind.tries})
    hits = dict.fromkeys(points, 0)
    for _ in range(draws):
        rate = rng.uniform(*RATES)
        solved, problems = suite(rng, kind, rate)
        odds = (1 - kind.alike) / kind.alike
        for k in points:
            terms = np.arange(k)
            truth = 1 - float(np.prod(((1 - rate) * odds + terms) / (odds + terms)))  # of a beta distribution
            by_count = [best_of([1.0] * c + [0.0] * (kind.tries - c), k) for c in range(kind.tries + 1)]
            values = [by_count[c] for c in solved.sum(1)]
            hits[k] += holds(clustered_rate(values, problems.tolist()), truth)
    return {str(k): count / draws for k, count in hits.items()}


def seeds(draws: int, num_seeds: int, seed_spread: float) -> float:
    """Coverage of the rate of a training recipe over several seeds: seeds and problems both shift the log-odds."""
    rng, hits = np.random.default_rng(11), 0
    for _ in range(draws):
        centre = rng.uniform(-1.5, 1.5)
        by_seed = rng.normal(0.0, seed_spread, num_seeds)
        problems = np.repeat(np.arange(60), 2)
        by_problem = rng.normal(0.0, 1.5, 60)[problems]
        chance = 1 / (1 + np.exp(-(centre + by_seed[:, None] + by_problem)))
        solved = (rng.random(chance.shape) < chance).astype(float)
        found = crossed_rate(solved.tolist(), problems.tolist())
        hits += holds(found, _logistic_mean(centre, seed_spread**2 + 1.5**2))
    return hits / draws


_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(61)


def _logistic_mean(centre: float, variance: float) -> float:
    """The mean of the logistic function of a normal variable."""
    values = 1 / (1 + np.exp(-(centre + np.sqrt(variance) * _NODES)))
    return float((values * _WEIGHTS).sum() / _WEIGHTS.sum())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4000)
    draws = parser.parse_args(argv).draws
    by_kind = {kind.name: rates(draws, kind, peers=True) for kind in KINDS}
    paired = {kind.name: pairs(draws, kind) for kind in KINDS}
    curves = {kind.name: curve(draws, kind) for kind in KINDS if kind.tries > 1}
    recipes = {
        f"{n} seeds, {name} differences": seeds(draws, n, spread)
        for n in (3, 5)
        for name, spread in (("small", 0.1), ("large", 0.6))
    }
    ours = [one["clustered"] for one in by_kind.values()]
    report(
        "interval_coverage",
        {
            "draws": draws,
            "nominal": 0.95,
            "two_standard_errors": round(2 * (0.95 * 0.05 / draws) ** 0.5, 4),
            "rates": by_kind,
            "clustered_from": min(ours),
            "clustered_to": max(ours),
            "paired": paired,
            "pass_at_k": curves,
            "recipes": recipes,
        },
    )


if __name__ == "__main__":
    main()
