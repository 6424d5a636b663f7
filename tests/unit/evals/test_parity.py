"""The numbers of two lists of log-probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.evals.parity import compare, edges, flipped, histogram


def test_equal_numbers_are_equal_and_one_bit_is_a_difference() -> None:
    said = np.linspace(-9, -0.1, 50, dtype=np.float32)
    assert compare(said, said).equal
    other = said.copy()
    other[7] = np.nextafter(other[7], np.float32(0))
    found = compare(said, other)
    assert not found.equal
    assert found.num_differing == 1


def test_the_estimators_are_those_of_their_formulas() -> None:
    sampler, trainer = np.array([-1.0, -2.0, -3.0]), np.array([-1.1, -1.7, -3.0])
    log_ratio = trainer - sampler
    found = compare(sampler, trainer)
    assert found.k1 == pytest.approx(-log_ratio.mean())
    assert found.k3 == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).mean())
    assert found.ratio_max == pytest.approx(math.exp(0.3) - 1)
    assert (found.mean, found.largest) == (pytest.approx(0.4 / 3), pytest.approx(0.3))


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_a_number_that_is_not_finite_is_an_infinite_difference(wrong: float) -> None:
    found = compare([-1.0, wrong], [-1.0, -1.0])
    assert found.k3 == found.largest == math.inf
    assert found.num_differing == 1


def test_two_sides_that_both_give_a_token_no_probability_agree() -> None:
    assert compare([-math.inf], [-math.inf]).equal


def test_an_expert_in_another_slot_is_no_flip_and_another_expert_is() -> None:
    one = np.array([[[0, 1], [2, 3]], [[4, 5], [0, 1]]])
    other = np.array([[[1, 0], [2, 3]], [[4, 6], [0, 1]]])
    assert flipped(one, other).tolist() == [[False, False], [True, False]]
    found = compare([-1.0], [-1.0], (one, other))
    assert (found.flipped_tokens, found.flipped) == (0.5, 0.25)
    assert not found.equal


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40))
def test_every_difference_is_in_one_bin(away: list[float]) -> None:
    counts = histogram(np.array(away))
    assert sum(counts) == len(away)
    assert len(counts) == len(edges()) + 2
    assert counts[0] == sum(a == 0 for a in away)


@pytest.mark.parametrize("lists", [([], []), ([-1.0], [-1.0, -2.0]), ([[-1.0]], [[-1.0]])])
def test_lists_that_do_not_belong_together_are_refused(lists: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        compare(*lists)
