from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.experience import SCHEMES, Credit, advantages
from etude.experience.credit import dr_grpo, grpo, rloo, with_k1_penalty

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


@given(rewards)
def test_every_scheme_sums_to_zero_over_the_siblings(values):
    for scheme in SCHEMES.values():
        assert math.fsum(scheme(values)) == pytest.approx(0, abs=1e-6)


@given(rewards)
def test_every_scheme_keeps_the_order_of_the_rewards(values):
    order = np.argsort(values, kind="stable")
    for scheme in SCHEMES.values():
        assert (np.diff(np.array(scheme(values))[order]) >= -1e-12).all()


@given(rewards)
def test_rloo_is_dr_grpo_scaled_by_the_number_of_siblings(values):
    n = len(values)
    assert rloo(values) == pytest.approx([a * n / (n - 1) for a in dr_grpo(values)], abs=1e-9)


def test_grpo_divides_by_the_deviation_of_the_population():
    assert grpo([2.0, 0.0]) == pytest.approx([1.0, -1.0], abs=1e-5)
    assert grpo([20.0, 0.0]) == pytest.approx([1.0, -1.0], abs=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES.values())
@pytest.mark.parametrize("values", [[], [1.0], [0.0, 0.0], [0.1] * 7])
def test_a_group_without_variance_or_siblings_has_no_signal(scheme, values):
    assert advantages(values, scheme) == [0.0] * len(values)


def test_every_named_scheme_exists():
    assert set(SCHEMES) == set(Credit)


def test_the_k1_penalty_takes_beta_times_the_log_ratio():
    assert with_k1_penalty(1.0, 3.0, beta=0.5) == pytest.approx(1.0 - 0.5 * 3)


@given(rewards, st.floats(1e-6, 1e-2), st.integers(0, 2**32))
def test_a_penalty_is_never_divided_by_its_own_deviation(values, beta, seed):
    """GRPO's scale is that of the graded rewards: what a penalty changes of an advantage is the penalty over it."""
    k1 = np.random.default_rng(seed).normal(size=len(values))
    penalised = [with_k1_penalty(r, k, beta=beta) for r, k in zip(values, k1, strict=True)]
    found = advantages(penalised, grpo, raw=values)
    if min(values) == max(values):
        assert found == [0.0] * len(values), "noise of the divergence alone is no signal"
        return
    scale = float(np.std(values)) + 1e-6
    assert np.array(found) * scale == pytest.approx(np.array(dr_grpo(penalised)), abs=1e-9)


@pytest.mark.parametrize("beta", [1e-6, 1e-3])
def test_in_a_solved_group_the_penalty_stays_as_small_as_it_is(beta):
    penalised = [with_k1_penalty(1.0, k, beta=beta) for k in (0.0, 1.0, 2.0, 3.0)]
    for scheme in SCHEMES.values():
        assert max(map(abs, advantages(penalised, scheme, raw=[1.0] * 4))) <= 2.0 * beta * (1 + 1e-6)
