"""Intervals: how far a rate can be believed. Pure arithmetic.

Wilson (1927) for one rate, Newcombe (1998, method 10) for the difference of two independent ones, Bonett and Price
(2012) for a difference on the same tasks. All three hold near 0 and 1 and at small counts, where the textbook normal
interval is empty or leaves [0, 1]; a solve rate before training is near 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959964
"""The normal quantile of a two-sided 95 % interval."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and the interval around it."""

    value: float
    low: float
    high: float

    def disjoint(self, other: Interval) -> bool:
        """Whether the two intervals share no point."""
        return self.low > other.high or other.low > self.high


def wilson(solved: float, n: float, z: float = Z95) -> Interval:
    """The Wilson score interval of `solved` out of `n`; of nothing, everything is possible.

    >>> wilson(9, 10)  # doctest: +ELLIPSIS
    Interval(value=0.9, low=0.5958..., high=0.9821...)
    >>> wilson(0, 0)
    Interval(value=0.0, low=0.0, high=1.0)
    """
    if not 0 <= solved <= n:
        raise ValueError(f"{solved} solved of {n}")
    if n == 0:
        return Interval(0.0, 0.0, 1.0)
    rate = solved / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    low = 0.0 if solved == 0 else max(0.0, centre - half)
    high = 1.0 if solved == n else min(1.0, centre + half)
    return Interval(rate, low, high)


def difference(a: Interval, b: Interval) -> Interval:
    """b - a for independent rates, from their Wilson intervals (Newcombe's hybrid score interval)."""
    value = b.value - a.value
    below = math.hypot(b.value - b.low, a.high - a.value)
    above = math.hypot(b.high - b.value, a.value - a.low)
    return Interval(value, max(-1.0, value - below), min(1.0, value + above))


def paired_difference(differences: Sequence[float], z: float = Z95) -> Interval:
    """The mean of per-task differences in [-1, 1], with one pseudo-task each way (Bonett and Price).

    >>> paired_difference([])
    Interval(value=0.0, low=-1.0, high=1.0)
    """
    n = len(differences)
    if n == 0:
        return Interval(0.0, -1.0, 1.0)
    value = math.fsum(differences) / n
    centre = math.fsum(differences) / (n + 2)
    variance = (math.fsum(d * d for d in differences) + 2) / (n + 2) - centre * centre
    half = z * math.sqrt(variance / (n + 2))
    return Interval(value, max(-1.0, centre - half), min(1.0, centre + half))
