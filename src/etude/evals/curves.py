"""Solve rates by the number of attempts: pass@k, best-of-k, and what training did to these curves.

pass@k is the probability that at least one of k attempts at a task solves it. Chen et al. 2021 ("Evaluating Large
Language Models Trained on Code") estimate it without bias from n attempts of which c solve: 1 - C(n-c, k) / C(n, k).
`best_of` is the same estimate for rewards between 0 and 1. Training that raises pass@1 only makes a model sure of what
it could do before; training that raises pass@k at the largest k solves tasks that it did not solve before (Yue et al.
2025, "Does Reinforcement Learning Really Incentivize Reasoning Capacity in LLMs Beyond the Base Model?").
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from etude.evals.intervals import Interval, clustered_rate, paired_difference
from etude.evals.rows import EvalRow


def pass_at_k(num_attempts: int, num_solved: int, k: int) -> float:
    """Estimate the probability that one of `k` attempts at a task solves it, from `num_attempts` of them.

    Raises `ValueError` unless 1 <= k <= `num_attempts` and 0 <= `num_solved` <= `num_attempts`.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 4), pass_at_k(4, 2, 2)
    (0.25, 1.0, 0.8333333333333334)
    """
    if not (1 <= k <= num_attempts and 0 <= num_solved <= num_attempts):
        raise ValueError(f"k = {k} of {num_attempts} attempts, {num_solved} solved")
    return 1.0 - math.comb(num_attempts - num_solved, k) / math.comb(num_attempts, k)


def best_of(rewards: Sequence[float], k: int) -> float:
    """Estimate the expected largest of `k` rewards of one task, without bias, from at least `k` of them.

    For rewards of 0 and 1 it equals `pass_at_k`. Raises `ValueError` for another `k`.

    >>> round(best_of([0.0, 0.5, 1.0], 2), 4)
    0.8333
    """
    n = len(rewards)
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} of {n} rewards")
    return math.fsum(r * math.comb(i, k - 1) for i, r in enumerate(sorted(rewards))) / math.comb(n, k)


def curve_points(num_attempts: int) -> list[int]:
    """Return the numbers of attempts at which curves are computed: powers of two, and `num_attempts` itself.

    >>> curve_points(6)
    [1, 2, 4, 6]
    """
    return [*(1 << i for i in range(num_attempts.bit_length()) if 1 << i < num_attempts), num_attempts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """pass@k of an evaluation. `points` maps each k to pass@k. `num_left_out`: tasks with fewer valid attempts than the
    largest k."""

    points: Mapping[int, Interval]
    num_left_out: int


def pass_curve(rows: Iterable[EvalRow]) -> Curve:
    """Compute pass@k over the tasks of an evaluation. Its intervals treat tasks with the same problem as correlated.

    The largest k is chosen so that nine in ten tasks have at least k valid attempts."""
    tasks = _solved_by_task(rows)
    if not tasks:
        return Curve(points={}, num_left_out=0)
    most = _most_attempts(n for n, _, _ in tasks.values())
    full = [one for one in tasks.values() if one[0] >= most]
    points = {
        k: clustered_rate([pass_at_k(n, c, k) for n, c, _ in full], [problem for *_, problem in full])
        for k in curve_points(most)
    }
    return Curve(points=points, num_left_out=len(tasks) - len(full))


def reward_curve(rows: Iterable[EvalRow]) -> dict[int, float]:
    """Compute the expected largest reward of k rollouts of a task, for each k: best-of-k with a perfect selection.

    The mean is over the tasks of `pass_curve`. The result is above pass@k if some rewards are between 0 and 1."""
    rewards: dict[str, list[float]] = {}
    for row in rows:
        if row.valid:
            rewards.setdefault(row.task_id, []).append(row.reward)
    if not rewards:
        return {}
    most = _most_attempts(map(len, rewards.values()))
    full = [one for one in rewards.values() if len(one) >= most]
    return {k: math.fsum(best_of(one, k) for one in full) / len(full) for k in curve_points(most)}


class Effect(enum.StrEnum):
    """The effect of training on the curve of pass@k. A change counts if the interval of the paired difference excludes
    0.

    EXPANDS: more tasks are solved at the largest k. SHARPENS: more at k = 1, but not at the largest k. NARROWS: fewer
    at the largest k. UNDECIDED: none of these was found, which may need more tasks or more attempts."""

    EXPANDS = "expands"
    SHARPENS = "sharpens"
    NARROWS = "narrows"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveComparison:
    """The comparison of pass@k before and after training.

    `differences`: for each k, pass@k of the trained minus the untrained model, paired by task. `num_tasks`: number of
    tasks that both evaluations have. `effect`: the conclusion."""

    differences: Mapping[int, Interval]
    num_tasks: int
    effect: Effect


def compare_curves(untrained: Iterable[EvalRow], trained: Iterable[EvalRow]) -> CurveComparison:
    """Compare pass@k of two evaluations of the same tasks, such as of a model before and after training.

    Intervals are of differences paired by task, and treat tasks with the same problem as correlated. The largest k is
    chosen so that nine in ten shared tasks have at least k valid attempts in both evaluations."""
    before, after = _solved_by_task(untrained), _solved_by_task(trained)
    shared = sorted(before.keys() & after.keys())
    if not shared:
        return CurveComparison(differences={}, num_tasks=0, effect=Effect.UNDECIDED)
    most = _most_attempts(min(before[t][0], after[t][0]) for t in shared)
    full = [t for t in shared if min(before[t][0], after[t][0]) >= most]
    problems = [before[t][2] for t in full]
    found = {}
    for k in curve_points(most):
        gains = [pass_at_k(*after[t][:2], k) - pass_at_k(*before[t][:2], k) for t in full]
        found[k] = paired_difference(gains, problems)
    first, last = found[1], found[most]
    if last.low > 0 and most > 1:
        effect = Effect.EXPANDS
    elif last.high < 0:
        effect = Effect.NARROWS
    else:
        effect = Effect.SHARPENS if first.low > 0 and most > 1 else Effect.UNDECIDED
    return CurveComparison(differences=found, num_tasks=len(full), effect=effect)


def _most_attempts(counts: Iterable[int]) -> int:
    """The largest number of attempts that nine in ten tasks have, at least."""
    ordered = sorted(counts)
    return ordered[len(ordered) // 10]


def _solved_by_task(rows: Iterable[EvalRow]) -> dict[str, tuple[int, int, str]]:
    """By task: the number of valid attempts, of those that solved it, and its problem."""
    found: dict[str, tuple[int, int, str]] = {}
    for row in rows:
        if row.valid:
            n, solved, _ = found.get(row.task_id, (0, 0, ""))
            found[row.task_id] = (n + 1, solved + row.solved, row.problem)
    return found
