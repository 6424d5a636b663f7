"""Confidence sequences: how often they miss the truth at any of many looks, and what they need to see a difference."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.releases.sequences import difference, mean_bounds

PATHS, LOOKS = 2000, 500


def outcomes(kind: str, mean: float, seed: int) -> np.ndarray:
    """Outcomes in [0, 1] with a mean, float64 [PATHS, LOOKS]: of 0 and 1, or between them, or nearly constant."""
    rng = np.random.default_rng(seed)
    if kind == "binary":
        return (rng.random((PATHS, LOOKS)) < mean).astype(np.float64)
    size = {"spread": 2.0, "narrow": 400.0}[kind]
    return rng.beta(size * mean, size * (1 - mean), (PATHS, LOOKS))


@pytest.mark.parametrize(("kind", "mean"), [("binary", 0.5), ("binary", 0.02), ("spread", 0.3), ("narrow", 0.9)])
def test_a_sequence_misses_the_mean_at_any_of_500_looks_in_at_most_5_of_100_paths(kind: str, mean: float) -> None:
    found = mean_bounds(outcomes(kind, mean, 1), 0.05)
    assert ((found.low > mean) | (found.high < mean)).any(1).mean() <= 0.05


def test_a_difference_is_missed_at_most_5_times_of_100_and_a_peeked_test_misses_it_over_15_times() -> None:
    a, b = outcomes("binary", 0.5, 2), outcomes("binary", 0.5, 3)
    of_a, of_b = mean_bounds(a, 0.025), mean_bounds(b, 0.025)
    assert ((of_a.low - of_b.high > 0) | (of_a.high - of_b.low < 0)).any(1).mean() <= 0.05
    n = np.arange(1, LOOKS + 1)
    means = [np.cumsum(one, 1) / n for one in (a, b)]
    spread = np.sqrt(sum(one * (1 - one) for one in means) / n)
    peeked = np.abs(means[0] - means[1])[:, 29:] > 1.96 * spread[:, 29:]  # a fixed-n test at each look from 30 on
    assert peeked.any(1).mean() > 0.15


def test_bounds_are_those_of_the_formula_computed_one_value_at_a_time() -> None:
    values, alpha = [0.3, 1.0, 0.0, 0.7, 0.7] * 40, 0.1
    found = mean_bounds(values, alpha)
    zeta = sum(k**-1.4 for k in range(1, 200_000)) + 200_000**-0.4 / 0.4  # and the integral of the rest
    k1, k2 = (2**0.25 + 2**-0.25) / math.sqrt(2), (math.sqrt(2) + 1) / 2
    total = squares = 0.0
    for t, x in enumerate(values, 1):
        squares += (x - (0.5 + total) / t) ** 2
        total += x
        v = max(squares, 10.0)
        level = 1.4 * math.log(math.log2(2 * v / 10)) + math.log(zeta / (alpha / 2))
        half = (math.sqrt(k1**2 * v * level + k2**2 * level**2) + k2 * level) / t
        assert found.low[t - 1] == pytest.approx(max(0.0, total / t - half), abs=1e-6)
        assert found.high[t - 1] == pytest.approx(min(1.0, total / t + half), abs=1e-6)


def test_a_difference_is_seen_with_enough_values() -> None:
    rng = np.random.default_rng(4)
    better, same = (rng.random(20_000) < 0.55).astype(float), (rng.random(20_000) < 0.5).astype(float)
    assert difference(better, same, 0.05).low > 0
    assert difference(same, better, 0.05).high < 0
    assert difference(better[:200], same, 0.05).low < 0 < difference(better[:200], same, 0.05).high


@given(st.lists(st.floats(0, 1), max_size=50), st.lists(st.floats(0, 1), max_size=50), st.floats(0.001, 0.5))
def test_bounds_are_ordered_and_swapping_the_sides_changes_the_sign(
    a: list[float], b: list[float], alpha: float
) -> None:
    one, other = difference(a, b, alpha), difference(b, a, alpha)
    assert -1.0 <= one.low <= one.high <= 1.0
    assert (one.value, one.low, one.high) == pytest.approx((-other.value, -other.high, -other.low))


@pytest.mark.parametrize("values", [[0.5, 1.1], [-0.1], [float("nan")]])
def test_a_value_that_is_not_between_0_and_1_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="outside"):
        mean_bounds(values, 0.05)
