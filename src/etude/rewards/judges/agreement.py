"""Statistics of how well two raters agree, with intervals that count clusters of works that are not independent."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from etude.evals.intervals import t95, wilson

LEFT_OUT = 1000
"""The maximum number of groups of a jackknife. With more clusters, some groups consist of several clusters."""


class Estimate(msgspec.Struct, frozen=True):
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0.0 or self.high < 0.0


Table = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]


class Counts:
    """How often each pair (people's score, judge's score) occurs, over all works or with some works left out.

    - `people`, `judge`: the two scores of each work.
    - `rows`, `columns`: all scores that people, and the judge, can give, ascending. They are the axes of the table.
    - `clusters`: the cluster of each work. Works of one cluster are not independent."""

    def __init__(
        self,
        people: Sequence[int],
        rows: Sequence[int],
        judge: Sequence[float],
        columns: Sequence[float],
        clusters: Sequence[Hashable],
    ) -> None:
        places = [{score: i for i, score in enumerate(scores)} for scores in (rows, columns)]
        self.shape = len(rows), len(columns)
        pairs = zip(people, judge, strict=True)
        self.cells = np.array([places[0][p] * self.shape[1] + places[1][j] for p, j in pairs])
        self.members = _members(clusters)

    def table(self, left_out: Places | None = None) -> Table:
        """Return the number of works by score, [people's scores, judge's scores] float64.

        `left_out`: indices of works that are not counted; None: all are counted."""
        cells = self.cells if left_out is None else np.delete(self.cells, left_out)
        return np.bincount(cells, minlength=self.shape[0] * self.shape[1]).reshape(self.shape).astype(float)

    def estimate(self, statistic: Callable[[Table], float], lowest: float = 0.0) -> Estimate:
        """Compute a statistic of the table and its 95 % interval, in which works of one cluster count as dependent.

        `statistic`: a function of the table, with values from `lowest` to 1. The interval is Wilson's with Student's t
        quantile. Its number of works is the effective one: so many independent works would have the variance of a
        jackknife over clusters. It is at least 1. If that variance is 0, as where all agree, it is the number of
        clusters, at most `LEFT_OUT`. With one cluster the interval is [`lowest`, 1]."""
        value, n = statistic(self.table()), len(self.members)
        if n == 1:
            return Estimate(value, lowest, 1.0)
        width = 1.0 - lowest
        share = min(max((value - lowest) / width, 0.0), 1.0)
        variance = _variance([statistic(self.table(some)) for some in self.members]) / width**2
        effective = max(1.0, share * (1.0 - share) / variance) if variance > 0.0 else float(n)
        found = wilson(share * effective, effective, t95(n - 1))
        return Estimate(value, lowest + width * found.low, lowest + width * found.high)


def kappa(table: Table) -> float:
    """Compute Cohen's kappa with squared weights (Cohen 1968) from a table of counts [people's class, judge's class].

    It is 0.0 if both have one class only.

    >>> float(kappa(np.array([[20.0, 5.0], [10.0, 15.0]])))
    0.4
    """
    levels = np.arange(len(table))
    weights = (levels[:, None] - levels) ** 2
    chance = np.outer(table.sum(1), table.sum(0)) / table.sum()
    expected = (weights * chance).sum()
    return float(1.0 - (weights * table).sum() / expected) if expected else 0.0


def concordance(table: Table) -> float:
    """Compute the probability that the judge orders two works as people do, if people score them differently.

    `table`: counts [people's class, judge's class]. Works that the judge scores equally count half.

    >>> float(concordance(np.array([[3.0, 1.0], [1.0, 3.0]])))
    0.75
    """
    right = total = 0.0
    for low in range(len(table)):
        for high in range(low + 1, len(table)):
            below = np.concatenate([[0.0], np.cumsum(table[low])[:-1]])
            right += float((table[high] * (below + table[low] / 2)).sum())
            total += float(table[high].sum() * table[low].sum())
    return right / total if total else 0.5


def in_order(table: Table) -> float:
    """Compute the share of pairs that the judge orders as people do, over the pairs with a better work.

    `table`: counts [people's choice, judge's choice] of the choices -1, 0 (a tie) and 1. Ties of the judge count half.

    >>> float(in_order(np.array([[3.0, 1.0, 0.0], [9.0, 9.0, 9.0], [1.0, 0.0, 3.0]])))
    0.8125
    """
    decided = table[[0, 2]].sum()
    right = table[0, 0] + table[2, 2] + (table[0, 1] + table[2, 1]) / 2
    return float(right / decided) if decided else 0.5


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values and its interval by Student's t; unbounded for one value."""
    value, n = float(np.mean(values)), len(values)
    half = t95(n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return Estimate(value, value - half, value + half)


def clustered(clusters: Sequence[Hashable], plain: Estimate, statistic: Callable[[Places], float | None]) -> Estimate:
    """Return `plain`, with the interval of a jackknife over clusters if works are dependent.

    `clusters`: the cluster of each work. `plain`: the estimate for independent works; it is returned unchanged if each
    work is a cluster of its own. `statistic`: the value for the works with these indices; None if it is undefined. The
    jackknife's interval has Student's t quantile, and no bounds if fewer than two values are defined."""
    if len(set(clusters)) == len(clusters):
        return plain
    everyone = np.arange(len(clusters))
    found = [statistic(np.delete(everyone, some)) for some in _members(clusters)]
    values = [value for value in found if value is not None]
    if len(values) < 2:
        return Estimate(plain.value, -math.inf, math.inf)
    half = t95(len(values) - 1) * math.sqrt(_variance(values))
    return Estimate(plain.value, plain.value - half, plain.value + half)


def _members(clusters: Sequence[Hashable]) -> list[Places]:
    """Return the indices of the works of each jackknife group: of one cluster, or of several if there are more than
    `LEFT_OUT` clusters."""
    numbers: dict[Hashable, int] = {}
    found: dict[int, list[int]] = {}
    for place, cluster in enumerate(clusters):
        number = numbers.setdefault(cluster, len(numbers)) % LEFT_OUT
        found.setdefault(number, []).append(place)
    return [np.array(some) for some in found.values()]


def _variance(left_out: Sequence[float]) -> float:
    """The variance of a statistic, from its values without each cluster: the jackknife (Efron and Stein 1981)."""
    n = len(left_out)
    return (n - 1) * float(np.var(left_out))


def clustered_mean(clusters: Sequence[Hashable], values: Sequence[float]) -> Estimate:
    """The mean of values of works, some of which may be in one cluster."""
    return clustered(clusters, mean(values), lambda at: float(np.mean(np.array(values)[at])))


def correlation(clusters: Sequence[Hashable], first: Sequence[float], second: Sequence[float]) -> Estimate | None:
    """Compute Spearman's rank correlation of two values of each work. Its interval is computed with Fisher's z.

    `clusters`: the cluster of each work. None for fewer than 5 works, or if all values of one list are equal."""
    both = np.array([first, second])

    def fisher(at: Places) -> float | None:
        ranks = [_ranks(values[at]) for values in both]
        if not all(one.std() for one in ranks):
            return None
        return math.atanh(min(max(float(np.corrcoef(ranks[0], ranks[1])[0, 1]), -0.999999), 0.999999))

    n = len(first)
    if n < 5 or (centre := fisher(np.arange(n))) is None:
        return None
    half = t95(n - 3) * 1.03 / math.sqrt(n - 3)
    found = clustered(clusters, Estimate(centre, centre - half, centre + half), fisher)
    return Estimate(*map(math.tanh, (found.value, found.low, found.high)))


def _ranks(values: Table) -> Table:
    """The ranks of values; equal ones share their mean rank."""
    ordered = np.sort(values)
    return (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / 2.0


def by_author(clusters: Sequence[Hashable], authors: Sequence[str], more: Sequence[float]) -> dict[str, Estimate]:
    """For each author, return the mean of `more` (judge − people) over their works minus the mean over all others.

    Left out are unknown authors (""), and authors with fewer than two works or fewer than two works of others."""
    found, values = dict[str, Estimate](), np.array(more)
    for author in sorted({*authors} - {""}):
        own = np.array([one == author for one in authors])

        def difference(at: Places, own: npt.NDArray[np.bool_] = own) -> float | None:
            mine, others = values[at][own[at]], values[at][~own[at]]
            return float(mine.mean() - others.mean()) if len(mine) and len(others) else None

        if own.sum() > 1 and (~own).sum() > 1:
            a, b = mean(values[own].tolist()), mean(values[~own].tolist())
            half = math.hypot(a.high - a.value, b.high - b.value)
            plain = Estimate(a.value - b.value, a.value - b.value - half, a.value - b.value + half)
            found[author] = clustered(clusters, plain, difference)
    return found
