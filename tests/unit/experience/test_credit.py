from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.experience import SCHEMES, Credit
from etude.experience.credit import advantages, dr_grpo, grpo, rloo, with_k1_penalty

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
