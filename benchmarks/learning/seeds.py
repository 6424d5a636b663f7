"""Means and ratios over training seeds, with 95 % intervals of the variance between seeds (Student's t)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from etude.evals.intervals import mean_over_seeds


def mean(values: Sequence[float]) -> dict[str, float]:
    """The mean and, from two values on, its interval."""
    if len(values) < 2:
        return {"mean": round(values[0], 4)}
    found = mean_over_seeds(values)
    return {"mean": round(found.value, 4), "low": round(found.low, 4), "high": round(found.high, 4)}


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """The mean of `above` ÷ the mean of `below` and, from two seeds on, an interval of the ratio from the pairs: values
    at one place of both are of one seed. The interval is of the logarithm's mean, since a ratio and its inverse should
    have the same one; so `paired` is the geometric mean of the seeds' ratios."""
    found = {"ratio": round(math.fsum(above) / math.fsum(below), 4)}
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    if len(logs) < 2:
        return found
    paired = mean_over_seeds(logs)
    value, low, high = (round(math.exp(log), 4) for log in (paired.value, paired.low, paired.high))
    return {**found, "paired": value, "low": low, "high": high}
