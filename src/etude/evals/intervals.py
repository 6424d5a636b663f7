"""Confidence intervals of solve rates.

Wilson (1927) for one rate, Newcombe (1998, method 10) for the difference of two independent rates, Bonett and Price
(2012) for a difference on the same tasks. All three are valid near 0 and 1 and for small counts, where the usual normal
interval is empty or leaves [0, 1]; solve rates before training are near 0.

Tasks that are variants of one problem are correlated, and so are rollouts of one task. Intervals over them use the
effective number of rollouts: the number of independent rollouts with the same variance. The variance is the larger of
two estimates, that of a ratio over clusters (to which a bootstrap over problems converges) and that by Kish's design
effect. Near 0 and 1 only few problems have unequal results, and both estimates are often far too small. The interval
of a rate therefore has a prior, with the weight of a quarter of a problem: that all results of a problem are equal
(docs/decisions/0047-intervals-count-problems.md). The coverage of a percentile bootstrap is too low there.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Z95 = 1.959964
"""The normal quantile of a two-sided 95 % interval."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate `value` and its confidence interval [`low`, `high`]: 95 % unless another quantile was given."""

    value: float
    low: float
    high: float

    def disjoint(self, other: Interval) -> bool:
        """Return whether the two intervals share no point."""
        return self.low > other.high or other.low > self.high


def wilson(solved: float, n: float, z: float = Z95) -> Interval:
    """Compute the Wilson score interval for `solved` successes out of `n`; [0, 1] if `n` is 0.

    `z` is the normal quantile. Raises `ValueError` if `solved` is not from 0 to `n`.

    >>> wilson(9, 10)  # doctest: +ELLIPSIS
    Interval(value=0.9, low=0.5958..., high=0.9821...)
    >>> wilson(0, 0)
    Interval(value=0.0, low=0.0, high=1.0)
    """
    if not 0 <= solved <= n:
        raise ValueError(f"solved = {solved} is not from 0 to n = {n}")
    if n == 0:
        return Interval(0.0, 0.0, 1.0)
    rate = solved / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    low = 0.0 if solved == 0 else max(0.0, centre - half)
    high = 1.0 if solved == n else min(1.0, centre + half)
    return Interval(rate, low, high)


def clustered_rate(solved: Sequence[float], problems: Sequence[Hashable]) -> Interval:
    """Compute the mean of `solved` and its Wilson interval, for rollouts that are correlated within a problem.

    `solved` has one value in [0, 1] per rollout, or per task the mean of its rollouts. `problems[i]` identifies the
    problem of value i, of which several tasks may be variants. The interval uses the effective number of independent
    rollouts. If all values are 0, or all are 1, it is the number of problems (less if problems have unequal numbers of
    values).

    >>> clustered_rate([1, 1, 0, 0], ["a", "b", "c", "d"]).low > clustered_rate([1, 1, 0, 0], ["a", "a", "b", "b"]).low
    True
    >>> clustered_rate([], [])
    Interval(value=0.0, low=0.0, high=1.0)
    """
    n = len(solved)
    if n == 0:
        return wilson(0, 0)
    rate = math.fsum(solved) / n
    found = _variance(solved, problems, independent=(math.fsum(x * x for x in solved) / n - rate * rate) / n)
    if found is None:
        return wilson(rate, 1.0, _T95[0])
    prior = _PRIOR / found.num_equal  # of a variance of one problem
    effective = found.num_equal * (rate * (1 - rate) + prior) / (found.variance * found.num_equal + prior)
    return wilson(min(rate * effective, effective), effective)


def clustered_mean(values: Sequence[float], problems: Sequence[Hashable]) -> Interval:
    """Compute the mean of values of any size and its interval, for values that are correlated within a problem.

    Values in [0, 1] have the interval of `clustered_rate`, others that of `ratio` over problems.

    >>> clustered_mean([-2.0, 0.0, -1.0, -1.0], ["a", "b", "c", "d"]).value
    -1.0
    """
    if all(0.0 <= value <= 1.0 for value in values):
        return clustered_rate(values, problems)
    sums, sizes = defaultdict[Hashable, float](float), Counter(problems)
    for value, problem in zip(values, problems, strict=True):
        sums[problem] += value
    return ratio([sums[problem] for problem in sizes], [float(size) for size in sizes.values()])


def difference(a: Interval, b: Interval) -> Interval:
    """Compute the difference b - a of two independent rates and its interval, from their Wilson intervals.

    It is Newcombe's hybrid score interval."""
    value = b.value - a.value
    below = math.hypot(b.value - b.low, a.high - a.value)
    above = math.hypot(b.high - b.value, a.value - a.low)
    return Interval(value, max(-1.0, value - below), min(1.0, value + above))


def paired_difference(differences: Sequence[float], problems: Sequence[Hashable]) -> Interval:
    """Compute the mean of per-task differences in [-1, 1] and its interval by Bonett and Price.

    The method adds two pseudo-tasks, one with a positive and one with a negative difference. Their size is the root
    mean square of the differences that are not 0. The interval uses the effective number of independent tasks;
    `problems[i]` is the problem of task i.

    >>> paired_difference([], [])
    Interval(value=0.0, low=-1.0, high=1.0)
    """
    n = len(differences)
    if n == 0:
        return Interval(0.0, -1.0, 1.0)
    value, square = math.fsum(differences) / n, math.fsum(d * d for d in differences) / n
    independent = max(0.0, square - value * value) / n
    found = _variance(differences, problems, independent=independent)
    if found is None:
        effective, quantile = 1.0, _T95[0]
    else:
        effective = max(1.0, n * independent / found.variance) if found.variance > 0.0 else found.num_equal
        quantile = Z95 if found.num_clusters == n else t95(found.num_clusters - 1)
    num_apart = sum(d != 0.0 for d in differences)
    pseudo = square * n / num_apart if num_apart else 1.0  # squared; 1 for differences of single rollouts
    centre = value * effective / (effective + 2)
    variance = (square * effective + 2 * pseudo) / (effective + 2) - centre * centre
    half = quantile * math.sqrt(variance / (effective + 2))
    return Interval(value, max(-1.0, centre - half), min(1.0, centre + half))


def ratio(values: Sequence[float], sizes: Sequence[float]) -> Interval:
    """Compute the sum of `values` over the sum of `sizes`, and its interval over independent clusters.

    Value and size i are those of cluster i, such as the loss and the bytes of a document. The variance is that of a
    ratio estimator, by linearisation (Cochran 1977, section 6.3), with Student's t quantile. Without a second cluster
    the interval has no bounds. Raises `ValueError` if the sizes sum to 0.

    >>> ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    Interval(value=2.0, low=2.0, high=2.0)
    """
    count, total = len(values), math.fsum(sizes)
    if total <= 0.0:
        raise ValueError("the sizes sum to 0")
    value = math.fsum(values) / total
    if count == 1:
        return Interval(value, -math.inf, math.inf)
    squares = math.fsum((v - value * size) ** 2 for v, size in zip(values, sizes, strict=True))
    half = t95(count - 1) * math.sqrt(count / (count - 1) * squares) / total
    return Interval(value, value - half, value + half)


def mean_over_seeds(values: Sequence[float]) -> Interval:
    """Compute the mean of one value per training seed, and Student's t interval from the variance between seeds.

    The values have no bounds, such as seconds or logarithms. Raises `ValueError` for fewer than two values.

    >>> mean_over_seeds([30.0, 36.0, 33.0])  # doctest: +ELLIPSIS
    Interval(value=33.0, low=25.54..., high=40.45...)
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"the variance between seeds needs at least 2 values, got {n}")
    mean = math.fsum(values) / n
    half = t95(n - 1) * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return Interval(mean, mean - half, mean + half)


def over_seeds(rates: Sequence[float]) -> Interval:
    """Compute the mean of one rate per training seed, and Student's t interval from the variance between seeds.

    Rates are in [0, 1]. It is the interval of the expected rate of a training recipe. Raises `ValueError` for fewer
    than two rates.

    >>> over_seeds([0.92, 0.95, 0.95])  # doctest: +ELLIPSIS
    Interval(value=0.94, low=0.896..., high=0.983...)
    """
    found = mean_over_seeds(rates)
    return Interval(found.value, max(0.0, found.low), min(1.0, found.high))


def crossed_rate(solved: Sequence[Sequence[float]], problems: Sequence[Hashable]) -> Interval:
    """Compute the solve rate of a training recipe and its interval, from the same tasks solved by several seeds.

    `solved[s][i]` in [0, 1] is the result of training seed s on task i, and `problems[i]` the problem of task i. The
    interval is for new seeds and new problems. Its variance is the variance between problems plus the variance that
    seeds add. Each of the two parts has the Student's t quantile of its own degrees of freedom (Zou and Donner 2008,
    "Construction of confidence limits about effect measures"). Raises `ValueError` for fewer than two seeds or without
    tasks.

    >>> crossed_rate([[1, 1, 0, 1], [1, 1, 1, 0]], ["a", "b", "c", "d"]).value
    0.75
    """
    found = _crossed(solved, problems)
    if found.num_problems == 1:
        return wilson(found.mean, 1.0, _T95[0])
    added = max(0.0, found.by_seed - found.both)  # what seeds add to the variance between problems
    variance, t_problem = found.by_problem + added, t95(found.num_problems - 1)
    if variance <= 0.0:
        return wilson(found.mean * found.num_problems, found.num_problems, t_problem)
    quantile = math.sqrt((found.by_problem * t_problem**2 + added * t95(len(solved) - 1) ** 2) / variance)
    effective = min(max(found.mean * (1 - found.mean) / variance, 1.0), float(len(solved) * len(problems)))
    return wilson(min(found.mean * effective, effective), effective, quantile)


def crossed_difference(differences: Sequence[Sequence[float]], problems: Sequence[Hashable]) -> Interval:
    """Compute the mean difference of two recipes and its interval, from the same tasks solved by several seeds of both.

    `differences[s][i]` in [-1, 1] is the difference on task i in pair s. A pair is two models of one training seed,
    such as the trained and the untrained one. The interval is for new pairs and new problems. Raises `ValueError`
    for fewer than two pairs or without tasks.

    It is computed as in `crossed_rate`, with one change. Both the variance between pairs and the variance between
    problems contain the interaction of pair and problem, which must be counted once. `crossed_rate` removes it from the
    pairs. This function removes it from the problems, which vary less: how hard a problem is cancels out in a
    difference.

    >>> crossed_difference([[1, 0, 1, 0], [1, 0, 0, 1]], ["a", "b", "c", "d"]).value
    0.5
    """
    found = _crossed(differences, problems)
    if found.num_problems == 1:
        return Interval(found.mean, -1.0, 1.0)
    added, t_problem = max(0.0, found.by_problem - found.both), t95(found.num_problems - 1)
    half = math.sqrt(found.by_seed * t95(len(differences) - 1) ** 2 + added * t_problem**2)
    if half == 0.0:  # one pseudo-problem in each direction, as in `paired_difference`
        half = t_problem * math.sqrt(2.0) / (found.num_problems + 2)
    return Interval(found.mean, max(-1.0, found.mean - half), min(1.0, found.mean + half))


class _Crossed(NamedTuple):
    """A mean over seeds and tasks, and its variance: between seeds, between problems, and the overlap of these two."""

    mean: float
    by_seed: float
    by_problem: float
    both: float
    num_problems: int


def _crossed(values: Sequence[Sequence[float]], problems: Sequence[Hashable]) -> _Crossed:
    num_seeds, tasks = len(values), len(problems)
    if num_seeds < 2 or not tasks:
        raise ValueError(f"the variance needs at least 2 seeds and 1 task, got {num_seeds} seeds and {tasks} tasks")
    n = num_seeds * tasks
    mean = math.fsum(math.fsum(row) for row in values) / n
    order = {problem: i for i, problem in enumerate(dict.fromkeys(problems))}
    count = len(order)
    totals = [[0.0] * count for _ in range(num_seeds)]  # sums of what exceeds the mean, by seed and problem
    for sums, row in zip(totals, values, strict=True):
        for value, problem in zip(row, problems, strict=True):
            sums[order[problem]] += value - mean
    if count == 1:
        return _Crossed(mean, 0.0, 0.0, 0.0, count)
    by_seed = math.fsum(math.fsum(row) ** 2 for row in totals) * num_seeds / (num_seeds - 1) / n**2
    by_problem = math.fsum(math.fsum(c) ** 2 for c in zip(*totals, strict=True)) * count / (count - 1) / n**2
    cells = num_seeds * count
    shared = math.fsum(x * x for row in totals for x in row) * cells / ((num_seeds - 1) * (count - 1)) / n**2
    # of the interaction: what is left of the cells when the parts of seeds and of problems are taken out
    both = max(0.0, shared - by_seed / (count - 1) - by_problem / (num_seeds - 1))
    return _Crossed(mean, by_seed, by_problem, both, count)


class _Spread(NamedTuple):
    """The variance of a mean, and the number of equally large clusters that would weigh as much as the actual ones."""

    variance: float
    num_equal: float
    num_clusters: int


def _variance(values: Sequence[float], problems: Sequence[Hashable], *, independent: float) -> _Spread | None:
    """The variance of the mean of values that are correlated within a problem; None for several values of one problem.

    `independent`: the variance of the mean if the values were independent."""
    n, mean = len(values), math.fsum(values) / len(values)
    clusters: defaultdict[Hashable, list[float]] = defaultdict(list)
    for value, problem in zip(values, problems, strict=True):
        clusters[problem].append(value)
    num = len(clusters)
    if num == n:
        return _Spread(independent, float(n), n)
    if num == 1:
        return None
    squares = math.fsum((math.fsum(c) - len(c) * mean) ** 2 for c in clusters.values())
    by_ratio = num / (num - 1) * squares / (n * n)
    by_design = independent * _design_effect(clusters.values(), mean)
    return _Spread(max(by_ratio, by_design), n * n / sum(len(c) ** 2 for c in clusters.values()), num)


def _design_effect(clusters: Collection[Sequence[float]], mean: float) -> float:
    """How many times larger the variance of the mean is than that of independent values: Kish's design effect, with
    the intraclass correlation of a one-way analysis of variance. Needs two clusters, and one of two values."""
    n, count = sum(map(len, clusters)), len(clusters)
    means = [math.fsum(c) / len(c) for c in clusters]
    between = math.fsum(len(c) * (m - mean) ** 2 for c, m in zip(clusters, means, strict=True)) / (count - 1)
    within = math.fsum((x - m) ** 2 for c, m in zip(clusters, means, strict=True) for x in c) / (n - count)
    size = sum(len(c) ** 2 for c in clusters) / n
    spread = between + ((n - size) / (count - 1) - 1) * within
    correlation = min(max((between - within) / spread, 0.0), 1.0) if spread > 0.0 else 1.0
    return 1 + (size - 1) * correlation


_PRIOR = 0.25
"""The weight, in problems, of the assumption of `clustered_rate` that the results of a problem are all equal."""

_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t of a two-sided 95 % interval, for 1 to 10 degrees of freedom."""


def t95(freedom: float) -> float:
    """Return Student's t quantile of a two-sided 95 % interval, for 1 or more degrees of freedom.

    Up to 10 it is from a table, where 1 / freedom is interpolated, and from there by Cornish and Fisher's series."""
    if freedom <= len(_T95):
        below = int(freedom)
        if below == freedom:
            return _T95[below - 1]
        share = (1 / below - 1 / freedom) / (1 / below - 1 / (below + 1))
        return _T95[below - 1] + share * (_T95[min(below, len(_T95) - 1)] - _T95[below - 1])
    z = Z95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
