"""Coverage of the intervals of evaluations on simulated suites: how often an interval holds the true value.

    python -m benchmarks.evals.coverage [--draws 4000] [--part recipes]

A suite has problems with a probability of being solved each (beta distributed around the true rate), tasks that are
variants of a problem, and rollouts of each task. The true rate is drawn anew for each suite, because counts are
discrete: at one fixed rate the coverage may be high or low by chance. It is drawn from a band in the middle, or from
one near 0 or 1, where models are before and after training, and where the results of few problems determine the
interval. A percentile bootstrap over problems, and Wilson's interval over rollouts as if they were independent, are
computed on the same suites.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks.report import RESULTS, commit, report
from etude.evals.curves import best_of
from etude.evals.intervals import (
    Interval,
    clustered_rate,
    crossed_difference,
    crossed_rate,
    paired_difference,
    wilson,
)
from etude.rewards.judges.agreement import Counts, concordance, kappa

Rng = np.random.Generator
BANDS = {"0.1 to 0.9": (0.1, 0.9), "0.9 to 0.99": (0.9, 0.99), "0.01 to 0.1": (0.01, 0.1)}
"""The true rates of simulated suites."""
MIDDLE = BANDS["0.1 to 0.9"]
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
    Kind("128 problems, 8 tries", 128, (1,), 8, 0.5),
    Kind("60 problems, 8 tries", 60, (1,), 8, 0.5),
    Kind("22 problems, 23 tries", 22, (1,), 23, 0.3),
    Kind("20 problems, 8 tries", 20, (1,), 8, 0.5),
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


def rates(draws: int, kind: Kind, band: tuple[float, float], *, peers: bool) -> dict[str, float]:
    """Coverage of the interval of a solve rate, by method, and the mean width of that of `clustered` ("width")."""
    rng = np.random.default_rng(7)
    methods = {"clustered": clustered}
    if peers:
        methods |= {"bootstrap": bootstrap(np.random.default_rng(8)), "independent": independent}
    hits, width = dict.fromkeys(methods, 0), 0.0
    for _ in range(draws):
        rate = rng.uniform(*band)
        found = {name: method(*drawn) for drawn in [suite(rng, kind, rate)] for name, method in methods.items()}
        width += found["clustered"].high - found["clustered"].low
        for name, one in found.items():
            hits[name] += holds(one, rate)
    return {name: count / draws for name, count in hits.items()} | {"width": round(width / draws, 4)}


def pairs(draws: int, kind: Kind, band: tuple[float, float]) -> float:
    """Coverage of the paired difference of two models: the second solves each problem with a chance of its own."""
    rng, hits = np.random.default_rng(9), 0
    for _ in range(draws):
        before, after = sorted(rng.uniform(*band, 2))
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


def curve(draws: int, kind: Kind, band: tuple[float, float]) -> dict[str, float]:
    """Coverage of pass@k for k = 1, 2 and the number of tries."""
    rng, points = np.random.default_rng(10), sorted({1, 2, kind.tries})
    hits = dict.fromkeys(points, 0)
    for _ in range(draws):
        rate = rng.uniform(*band)
        solved, problems = suite(rng, kind, rate)
        odds = (1 - kind.alike) / kind.alike
        for k in points:
            terms = np.arange(k)
            truth = 1 - float(np.prod(((1 - rate) * odds + terms) / (odds + terms)))  # of a beta distribution
            by_count = [best_of([1.0] * c + [0.0] * (kind.tries - c), k) for c in range(kind.tries + 1)]
            values = [by_count[c] for c in solved.sum(1)]
            hits[k] += holds(clustered_rate(values, problems.tolist()), truth)
    return {str(k): count / draws for k, count in hits.items()}


PROBLEM_SPREAD = 1.5  # of the log-odds of problems, where seeds differ, too


def seeds(draws: int, num_seeds: int, seed_spread: float) -> float:
    """Coverage of the rate of a training recipe over several seeds: seeds and problems both shift the log-odds."""
    rng, hits = np.random.default_rng(11), 0
    for _ in range(draws):
        centre = rng.uniform(-1.5, 1.5)
        solved, problems = played(rng, [centre + one for one in rng.normal(0.0, seed_spread, num_seeds)])
        found = crossed_rate(solved.tolist(), problems.tolist())
        hits += holds(found, _logistic_mean(centre, seed_spread**2 + PROBLEM_SPREAD**2))
    return hits / draws


def gains(draws: int, num_seeds: int, seed_spread: float) -> float:
    """Coverage of the gain of a recipe over the untrained model: one untrained and one trained model of each seed."""
    rng, hits = np.random.default_rng(12), 0
    for _ in range(draws):
        before, gain = rng.uniform(-1.5, 0.0), rng.uniform(0.0, 2.0)
        by_seed = rng.normal(0.0, seed_spread, num_seeds)
        solved, problems = played(rng, [before] * num_seeds + [before + gain + one for one in by_seed])
        found = crossed_difference((solved[num_seeds:] - solved[:num_seeds]).tolist(), problems.tolist())
        after = _logistic_mean(before + gain, seed_spread**2 + PROBLEM_SPREAD**2)
        hits += holds(found, after - _logistic_mean(before, PROBLEM_SPREAD**2))
    return hits / draws


def played(rng: Rng, levels: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Results of models whose mean log-odds are `levels` on 60 problems of two tasks, [models, tasks], and the problem
    of each task, [tasks]."""
    problems = np.repeat(np.arange(60), 2)
    chance = 1 / (1 + np.exp(-(np.array(levels)[:, None] + rng.normal(0.0, PROBLEM_SPREAD, 60)[problems])))
    return (rng.random(chance.shape) < chance).astype(float), problems


_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(61)


def _logistic_mean(centre: float, variance: float) -> float:
    """The mean of the logistic function of a normal variable."""
    values = 1 / (1 + np.exp(-(centre + np.sqrt(variance) * _NODES)))
    return float((values * _WEIGHTS).sum() / _WEIGHTS.sum())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all", help="other parts are kept as measured")
    args = parser.parse_args(argv)
    path = RESULTS / "interval_coverage.json"
    found = json.loads(path.read_text())["parts"] if path.exists() and args.part != "all" else {}
    for name, part in PARTS.items():
        if args.part in (name, "all"):
            error = round(2 * (0.95 * 0.05 / args.draws) ** 0.5, 4)
            found[name] = {"commit": commit(), "draws": args.draws, "two_standard_errors": error, **part(args.draws)}
    report("interval_coverage", {"nominal": 0.95, "parts": found})


def models(draws: int) -> dict[str, Any]:
    """Coverage of the intervals of solve rates, paired differences and pass@k, by the band of true rates."""
    found = dict[str, Any]()
    for name, band in BANDS.items():
        by_kind = {kind.name: rates(draws, kind, band, peers=True) for kind in KINDS}
        ours = [one["clustered"] for one in by_kind.values()]
        found[name] = {
            "rates": by_kind,
            "clustered_from": min(ours),
            "clustered_to": max(ours),
            "paired": {kind.name: pairs(draws, kind, band) for kind in KINDS},
            "pass_at_k": {kind.name: curve(draws, kind, band) for kind in KINDS if kind.tries > 1},
        }
    return found


SEEDS = {
    f"{n} seeds, {name} differences": (n, spread)
    for n in (3, 5)
    for name, spread in {"small": 0.1, "large": 0.6, "very large": 1.0}.items()
}


def recipes(draws: int) -> dict[str, Any]:
    """Coverage of the intervals of recipes over training seeds."""
    return {"rates": {name: seeds(draws, *kind) for name, kind in SEEDS.items()}}


def gained(draws: int) -> dict[str, Any]:
    """Coverage of the intervals of gains over training seeds."""
    return {"gains": {name: gains(draws, *kind) for name, kind in SEEDS.items()}}


def agreement(
    draws: int, judges: Mapping[str, tuple[int, float]] | None = None, sizes: Sequence[int] = (10, 25, 60, 200)
) -> dict[str, Any]:
    """Coverage of the intervals of a judge's kappa and AUC, on `sizes` clusters of four labelled works each.

    `judges`: by name the scores of the scale and the noise; those of `JUDGES` by default."""
    found = dict[str, Any]()
    for name, (levels, noise) in (judges or JUDGES).items():
        truth = {s: s(labels(np.random.default_rng(12), 200_000, levels, noise).table()) for s in (kappa, concordance)}
        for clusters in sizes:
            rng, hits = np.random.default_rng(13), Counter[str]()
            for _ in range(draws):
                drawn = labels(rng, clusters, levels, noise)
                for statistic, true in truth.items():
                    one = drawn.estimate(statistic, -1.0 if statistic is kappa else 0.0)
                    hits[statistic.__name__] += one.low <= true <= one.high
            found[f"{name}, {clusters} clusters"] = {statistic: hits[statistic] / draws for statistic in sorted(hits)}
    return {"agreement": found}


JUDGES = {
    f"{quality} judge, {levels} scores": (levels, noise)
    for levels in (2, 5)
    for quality, noise in {"good": 0.2, "fair": 0.5, "poor": 1.5}.items()
}
"""The scores of a judge's scale, and the standard deviation of its error beside that of the works, which is 1."""


def labels(rng: Rng, clusters: int, levels: int, noise: float) -> Counts:
    """Scores of people and of a judge for four works in each cluster, half of whose variance they share."""
    works = np.repeat(np.arange(clusters), 4)

    def drawn() -> np.ndarray:
        return (rng.normal(size=clusters)[works] + rng.normal(size=len(works))) * np.sqrt(0.5)

    worth = drawn()
    cuts = np.array([NormalDist().inv_cdf((i + 1) / levels) for i in range(levels - 1)])
    people = np.searchsorted(cuts, worth)
    judge = np.searchsorted(cuts * np.sqrt(1 + noise**2), worth + noise * drawn())
    return Counts(people.tolist(), range(levels), judge.tolist(), range(levels), works.tolist())


PARTS = {"models": models, "recipes": recipes, "gains": gained, "agreement": agreement}


if __name__ == "__main__":
    main()
