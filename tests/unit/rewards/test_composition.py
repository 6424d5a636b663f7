"""A reward is a pure function of its terms and the run's settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import EtudeError
from etude.records import Graded
from etude.records.reward import K1, SIGNS, SIGNS_IF_REWARDED, SUBMITTED, Term
from etude.records.task import Trust
from etude.records.wire import pack, unpack
from etude.rewards import DEFAULT_COMPOSITION, Composition
from etude.rewards.composition import MOST_CHARGED

ALL = (SUBMITTED, SIGNS, SIGNS_IF_REWARDED, K1)


def graded(grade: float, **values: float) -> Graded:
    terms = [Term(name=name, value=value, version="1", evidence=f"the {name}") for name, value in values.items()]
    return Graded.of(grade, trust=Trust.DATA, reason="as the tests say").with_terms(*terms)


def value(grade: float, how: Composition = DEFAULT_COMPOSITION, **values: float) -> float:
    return how.of(graded(grade, **values)).value


def test_the_grade_alone_is_the_reward_where_nothing_else_was_measured() -> None:
    reward = DEFAULT_COMPOSITION.of(graded(0.25))
    assert (reward.value, reward.raw, reward.reason, reward.gates) == (0.25, 0.25, "as the tests say", ())


@pytest.mark.parametrize(
    ("submitted", "require", "expected"), [(0, True, 0), (0, False, 1), (1, True, 1), (1, False, 1)]
)
def test_a_rollout_that_did_not_submit_earns_nothing_where_that_is_required(
    submitted: float, require: bool, expected: float
) -> None:
    reward = Composition(require_submit=require).of(graded(1.0, submitted=submitted))
    assert reward.value == expected
    assert reward.gates == (() if expected else (SUBMITTED,))
    assert reward.reason == ("as the tests say" if expected else "not submitted (the submitted); as the tests say")


def test_a_sign_of_cheating_takes_the_reward_and_is_named() -> None:
    reward = DEFAULT_COMPOSITION.of(graded(1.0, submitted=1.0, signs=2.0))
    assert (reward.value, reward.gates) == (0.0, (SIGNS,))
    assert reward.reason == "quarantined: the signs; the grader said: as the tests say"
    assert value(1.0, Composition(quarantine=False), signs=2.0) == 1.0


def test_a_sign_that_counts_only_with_a_reward_counts_after_the_other_gates() -> None:
    assert value(1.0, signs_if_rewarded=1.0) == 0.0
    idle = DEFAULT_COMPOSITION.of(graded(1.0, submitted=0.0, signs_if_rewarded=1.0))
    assert (idle.value, idle.gates) == (0.0, (SUBMITTED,))
    assert DEFAULT_COMPOSITION.of(graded(0.0, signs_if_rewarded=1.0)).gates == ()


@pytest.mark.parametrize("gate", [{"submitted": 0.0}, {"signs": 1.0}])
def test_a_closed_gate_never_pays(gate: dict[str, float]) -> None:
    assert value(-1.0, **gate) == -1.0
    assert value(1.0, Composition(weights={"penalty": -3.0}), penalty=1.0, **gate) == -2.0


def test_the_penalty_takes_kl_times_k1_and_raw_is_the_reward_before_it() -> None:
    reward = Composition(kl=0.5).of(graded(1.0, k1=3.0))
    assert (reward.value, reward.raw) == (1.0 - 0.5 * 3.0, 1.0)
    assert value(1.0, k1=3.0) == 1.0
    assert value(1.0, Composition(kl=0.5)) == 1.0, "it was not measured"
    assert value(1.0, Composition(kl=0.5), k1=3.0, signs=1.0) == -1.5, "who cheats pays it too"


def rewards(how: Composition, *siblings: Sequence[Term]) -> list[tuple[float, tuple[str, ...]]]:
    return [
        (one.value, one.missing) for one in how.rewards([graded(0.0).with_terms(*terms).terms for terms in siblings])
    ]


def test_a_weighted_term_counts_where_every_sibling_has_a_known_value_of_one_version() -> None:
    how = Composition(weights={"a": 2.0, "b": -1.0})
    a, b = Term(name="a", value=1.0, version="1"), Term(name="b", value=0.5, version="1")
    other, unknown = Term(name="a", value=1.0, version="2"), Term(name="b", value=None, version="1")
    assert rewards(how, [a, b], [a, b]) == [(1.5, ()), (1.5, ())]
    assert rewards(how, [a, b], [other, b]) == [(-0.5, ("a",))] * 2
    assert rewards(how, [a, b], [a, unknown]) == [(2.0, ("b",))] * 2
    assert rewards(how, [a], [a]) == [(2.0, ("b",))] * 2
    assert how.without_weights.of(graded(0.5).with_terms(a, b)).value == 0.5


values = st.dictionaries(st.sampled_from(["effort", "reads", "calls"]), st.floats(-1e6, 0), min_size=1)
CHARGING = Composition(weights={"effort": 1.0, "reads": 0.25, "calls": 0.05}, charges=("effort", "reads", "calls"))


@given(st.floats(0.01, 1), values, values)
def test_whatever_a_solved_rollout_is_charged_it_keeps_more_than_a_failed_one(
    grade: float, solved: dict[str, float], failed: dict[str, float]
) -> None:
    bare = dict.fromkeys(CHARGING.weights, 0.0)
    kept = value(grade, CHARGING, **bare | solved)
    assert kept >= (1 - MOST_CHARGED) * grade * (1 - 1e-9) > 0.0
    assert 0.0 >= value(0.0, CHARGING, **bare | failed) >= -MOST_CHARGED * (1 + 1e-9)


def test_charges_beyond_the_bound_are_reduced_alike_and_those_within_it_to_no_bit() -> None:
    reads = Term(name="reads", value=-2.0, turns=((1, -1.0), (4, -1.0)))
    terms = graded(1.0, effort=-0.7, calls=0.0, tone=0.5).with_terms(reads)
    how = replace(CHARGING, weights={**CHARGING.weights, "tone": 0.5})
    reward = how.of(terms)
    assert reward.value == pytest.approx(0.1 + 0.25)
    assert dict(reward.turns) == pytest.approx(dict.fromkeys((1, 4), -0.25 * 0.9 / 1.2))
    within, unbounded = graded(1.0, effort=-0.3, reads=-1.0, calls=-1.0), replace(CHARGING, charges=())
    assert CHARGING.of(within) == unbounded.of(within)
    assert unbounded.of(terms).value < 0.0


@pytest.mark.parametrize(("name", "how"), [("k1", Composition(kl=0.1)), ("a", Composition(weights={"a": 1.0}))])
@pytest.mark.parametrize("found", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_an_error_with_the_terms(name: str, how: Composition, found: float) -> None:
    with pytest.raises(EtudeError, match="a reward is") as caught:
        how.of(graded(1.0, **{name: found}))
    assert f"{name} = {found}" in caught.value.facts


terms = st.dictionaries(st.sampled_from([*ALL, "a"]), st.floats(-3, 3))


@given(st.floats(-1, 1), terms, st.booleans(), st.booleans(), st.floats(0, 1))
def test_stored_terms_give_the_same_reward_to_the_bit(
    grade: float, found: dict[str, float], require_submit: bool, quarantine: bool, kl: float
) -> None:
    how = Composition(require_submit=require_submit, quarantine=quarantine, kl=kl, weights={"a": 0.3})
    outcome = graded(grade, **found)
    assert how.of(unpack(pack(outcome), Graded)) == how.of(outcome)
    reward = how.of(outcome)
    assert reward.raw <= 0.0 or not reward.gates


def test_a_verdict_without_a_grade_is_refused() -> None:
    with pytest.raises(ValueError, match="must be its grade"):
        Graded(terms=(Term(name="tests", value=1.0),), trust=Trust.DATA)
    with pytest.raises(ValueError, match="must be its grade"):
        unpack(pack({"type": "graded", "terms": [], "trust": "data-graded"}), Graded)


def test_a_measure_that_is_no_number_is_unknown_and_says_why() -> None:
    found = Graded.of(0.5, {"share": math.nan}, trust=Trust.DATA, reason="")
    assert (found.values["share"], found.terms[1].evidence) == (None, "the grader gave nan")
