from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import EtudeError
from etude.experience import SCHEMES, Credit
from etude.experience.credit import DrGrpo, Grpo, Rloo, advantages
from etude.records.reward import Reward

values_of_a_group = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def rewards(values: Sequence[float], raw: Sequence[float] | None = None) -> list[Reward]:
    pairs = zip(values, values if raw is None else raw, strict=True)
    return [Reward(value=value, raw=before, reason="") for value, before in pairs]


@given(values_of_a_group)
def test_every_scheme_sums_to_zero_over_the_siblings(values):
    for scheme in SCHEMES.values():
        assert math.fsum(scheme.advantages(rewards(values))) == pytest.approx(0, abs=1e-6)


@given(values_of_a_group)
def test_every_scheme_keeps_the_order_of_the_rewards(values):
    order = np.argsort(values, kind="stable")
    for scheme in SCHEMES.values():
        assert (np.diff(np.array(scheme.advantages(rewards(values)))[order]) >= -1e-12).all()


@given(values_of_a_group)
def test_rloo_is_dr_grpo_scaled_by_the_number_of_siblings(values):
    n = len(values)
    scaled = [a * n / (n - 1) for a in DrGrpo().advantages(rewards(values))]
    assert Rloo().advantages(rewards(values)) == pytest.approx(scaled, abs=1e-9)


def test_grpo_divides_by_the_deviation_of_the_population():
    assert Grpo().advantages(rewards([2.0, 0.0])) == pytest.approx([1.0, -1.0], abs=1e-5)
    assert Grpo().advantages(rewards([20.0, 0.0])) == pytest.approx([1.0, -1.0], abs=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("values", [[], [1.0], [0.0, 0.0], [0.1] * 7])
def test_a_group_without_variance_or_siblings_has_no_signal(scheme, values):
    assert advantages(rewards(values), scheme) == [0.0] * len(values)


def test_every_named_scheme_exists():
    assert {name: scheme.name for name, scheme in SCHEMES.items()} == {name: str(name) for name in Credit}


@given(values_of_a_group, st.floats(1e-6, 1e-2), st.integers(0, 2**32))
def test_a_penalty_is_never_divided_by_its_own_deviation(values, beta, seed):
    """GRPO's scale is that of the graded rewards: what a penalty changes of an advantage is the penalty over it."""
    k1 = np.random.default_rng(seed).normal(size=len(values))
    penalised = [r - beta * k for r, k in zip(values, k1, strict=True)]
    found = advantages(rewards(penalised, raw=values), Grpo())
    if min(values) == max(values):
        assert found == [0.0] * len(values), "noise of the divergence alone is no signal"
        return
    scale = float(np.std(values)) + 1e-6
    centred = np.array(penalised) - math.fsum(penalised) / len(penalised)
    assert np.array(found) * scale == pytest.approx(centred, abs=1e-9)


@pytest.mark.parametrize("beta", [1e-6, 1e-3])
def test_in_a_solved_group_the_penalty_stays_as_small_as_it_is(beta):
    penalised = rewards([1.0 - beta * k for k in (0.0, 1.0, 2.0, 3.0)], raw=[1.0] * 4)
    for scheme in SCHEMES.values():
        assert max(map(abs, advantages(penalised, scheme))) <= 2.0 * beta * (1 + 1e-6)


class Broken:
    name, version = "broken", "1"

    def __init__(self, found: Any) -> None:
        self.found = found

    def advantages(self, rewards: Sequence[Reward]) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize("found", [[0.5], [0.5, math.nan], [0.5, "much"], None, ZeroDivisionError("no deviation")])
def test_a_scheme_that_fails_or_gives_no_finite_number_per_reward_is_named_with_the_rewards(found):
    with pytest.raises(EtudeError, match="credit scheme 'broken'") as caught:
        advantages(rewards([1.0, 0.0]), Broken(found))
    assert "[1.0, 0.0]" in caught.value.facts
