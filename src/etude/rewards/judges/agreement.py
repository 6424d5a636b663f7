"""Statistics of how well two raters agree, with intervals that count clusters of works that are not independent."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

RESAMPLED = 1000
_Z = 1.96


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


class Counts:
    """Counts of pairs (people's score, judge's score), over all works and over bootstrap samples of their clusters."""

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
        numbers: dict[Hashable, int] = {}
        self.cluster = np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters])

    def table(self, weights: Table | None = None) -> Table:
        """[people's scores, judge's scores] The number of works, each with its weight."""
        found = np.bincount(self.cells, weights, minlength=self.shape[0] * self.shape[1])
        return found.reshape(self.shape).astype(float)

    def estimate(self, statistic: Callable[[Table], float]) -> Estimate:
        """Return a statistic of the table, with its bootstrap interval over clusters. The draws are always the same."""
        n = int(self.cluster.max()) + 1
        drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1.0 / n), RESAMPLED)
        found = [statistic(self.table(counts[self.cluster].astype(float))) for counts in drawn]
        low, high = np.quantile(found, [0.025, 0.975])
        return Estimate(statistic(self.table()), float(low), float(high))


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
    """Return the mean of independent values and its interval by the normal distribution; unbounded for one value."""
    value = float(np.mean(values))
    half = _Z * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Estimate(value, value - half, value + half)


Places = npt.NDArray[np.intp]


def clustered(clusters: Sequence[Hashable], plain: Estimate, statistic: Callable[[Places], float | None]) -> Estimate:
    """Return an estimate; if there are clusters of several works, with the interval of its bootstrap over clusters.

    `clusters`: the cluster of each work. `plain`: the estimate for independent works. `statistic`: the value of the
    works at some places, with repetitions; None if they have none. The draws are always the same."""
    members: dict[Hashable, list[int]] = {}
    for place, cluster in enumerate(clusters):
        members.setdefault(cluster, []).append(place)
    if len(members) == len(clusters):
        return plain
    if len(members) == 1:
        return Estimate(plain.value, -math.inf, math.inf)
    places, draws = [np.array(some) for some in members.values()], np.random.default_rng(0)
    drawn = (draws.integers(len(places), size=len(places)) for _ in range(RESAMPLED))
    found = [statistic(np.concatenate([places[i] for i in some])) for some in drawn]
    low, high = np.quantile([value for value in found if value is not None], [0.025, 0.975])
    return Estimate(plain.value, float(low), float(high))


def clustered_mean(clusters: Sequence[Hashable], values: Sequence[float]) -> Estimate:
    """The mean of values of works, some of which may be in one cluster."""
    return clustered(clusters, mean(values), lambda at: float(np.mean(np.array(values)[at])))


def correlation(clusters: Sequence[Hashable], first: Sequence[float], second: Sequence[float]) -> Estimate | None:
    """Spearman's rank correlation, with Fisher's interval; None for fewer than 5 values, or constant ones."""
    both = np.array([first, second])

    def spearman(at: Places) -> float | None:
        ranks = [_ranks(values[at]) for values in both]
        return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if all(one.std() for one in ranks) else None

    value = spearman(np.arange(len(first)))
    if len(first) < 5 or value is None:
        return None
    centre, half = math.atanh(min(max(value, -0.999999), 0.999999)), _Z * 1.03 / math.sqrt(len(first) - 3)
    return clustered(clusters, Estimate(value, math.tanh(centre - half), math.tanh(centre + half)), spearman)


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
