"""The drift alarm: raised soon where a term leaves its auditor or climbs while the grade falls, and never by chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
import pytest

from etude.errors import PluginError
from etude.records import Graded
from etude.records.reward import Term
from etude.records.task import Trust
from etude.rewards.drift import ALPHA, AuditConfig, AuditState, observe

Draw = Callable[[random.Random, int], tuple[float, float | None, float]]
BY_AUDITOR = AuditConfig(term="clear", by="auditor", tolerance=0.1)
BY_GRADE = AuditConfig(term="clear", by="grade")


def graded(term: float, auditor: float | None, grade: float) -> Graded:
    plain = Graded.of(grade, trust=Trust.DATA, reason="")
    return plain.with_terms(Term(name="clear", value=term), Term(name="auditor", value=auditor))


def alarm(config: AuditConfig, draw: Draw, *, seed: int, steps: int, groups: int = 8, size: int = 8) -> int | None:
    """The step of the alarm; None if there is none."""
    rng, state = random.Random(seed), AuditState()
    for step in range(1, steps + 1):
        made = {f"g{i}": [graded(*draw(rng, step)) for _ in range(size)] for i in range(groups)}
        if observe(config, state, step, made).alarm:
            return step
    return None


def level(rng: random.Random, error: float) -> tuple[float, float]:
    """A true value of five levels, and what a judge with this error rate says."""
    true = rng.randint(0, 4)
    said = min(4, max(0, true + rng.choice((-1, 1)))) if rng.random() < error else true
    return true / 4, said / 4


def honest(rng: random.Random, step: int) -> tuple[float, float | None, float]:
    true, said = level(rng, 0.1)
    return said, true, float(true > 0.5)


def a_tenth_random(rng: random.Random, step: int) -> tuple[float, float | None, float]:
    true, said = level(rng, 0.1)
    return (rng.randint(0, 4) / 4 if rng.random() < 0.1 else said), true, float(true > 0.5)


@pytest.mark.parametrize("seed", range(3))
def test_a_tenth_of_random_verdicts_is_found_within_ten_steps(seed: int) -> None:
    found = alarm(BY_AUDITOR, a_tenth_random, seed=seed, steps=10)
    assert found is not None


@pytest.mark.parametrize("value", [-0.25, 1.01, 40.0])
def test_a_value_that_is_not_from_0_to_1_is_refused_and_not_clipped(value: float) -> None:
    with pytest.raises(PluginError, match="'clear by auditor' needs values from 0 to 1") as refused:
        observe(BY_AUDITOR, AuditState(), 1, {"g": [graded(value, 0.5, 1.0)]})
    assert f"clear {value:g} and auditor 0.5" in refused.value.facts
    observe(BY_GRADE, AuditState(), 1, {"g": [graded(value, None, 1.0)]})


def test_an_honest_judge_raises_no_alarm_in_three_hundred_steps() -> None:
    assert alarm(BY_AUDITOR, honest, seed=1, steps=300, groups=4, size=4) is None
    assert alarm(BY_GRADE, honest, seed=1, steps=300, groups=4, size=4) is None


def test_the_probability_of_a_false_alarm_over_a_whole_run_is_at_most_alpha() -> None:
    def at_the_tolerance(rng: random.Random, step: int) -> tuple[float, float | None, float]:
        return 0.0, 0.1 * (10 if rng.random() < 0.01 else 0), rng.random()

    def without_a_trend(rng: random.Random, step: int) -> tuple[float, float | None, float]:
        return rng.random(), None, float(rng.random() < 0.4)

    for config, draw in ((BY_AUDITOR, at_the_tolerance), (BY_GRADE, without_a_trend)):
        raised = sum(alarm(config, draw, seed=seed, steps=30, groups=2, size=1) is not None for seed in range(150))
        assert raised <= 150 * ALPHA + 3


def test_a_drift_that_begins_late_is_found_as_fast() -> None:
    def late(rng: random.Random, step: int) -> tuple[float, float | None, float]:
        return a_tenth_random(rng, step) if step > 60 else honest(rng, step)

    found = alarm(BY_AUDITOR, late, seed=5, steps=80)
    assert found is not None
    assert 60 < found <= 75


def test_a_term_that_climbs_while_the_grade_falls_raises_it_and_one_that_climbs_with_it_does_not() -> None:
    def climbing(direction: float) -> Draw:
        def draw(rng: random.Random, step: int) -> tuple[float, float | None, float]:
            moved = 0.02 * max(0, step - 10)
            return 0.3 + moved + rng.gauss(0, 0.1), None, float(rng.random() < 0.6 + direction * moved)

        return draw

    found = alarm(BY_GRADE, climbing(-1.0), seed=2, steps=30)
    assert found is not None
    assert found > 10
    assert alarm(BY_GRADE, climbing(0.5), seed=2, steps=30) is None
    assert alarm(BY_GRADE, climbing(0.0), seed=2, steps=30) is None


def test_unknown_values_are_left_out_and_a_repeated_step_counts_once() -> None:
    state = AuditState()
    group = {"g0": [graded(1.0, None, 0.0)], "g1": [graded(1.0, 0.5, 0.0), graded(0.5, 0.5, 1.0)]}
    first = observe(BY_AUDITOR, state, 1, group)
    assert (first.num_groups, first.distance, first.term, first.by) == (1, pytest.approx(0.125**0.5), 0.75, 0.5)
    again = observe(BY_AUDITOR, state, 1, group)
    assert (again.num_groups, again.e_value) == (1, first.e_value)
    nothing = observe(BY_AUDITOR, state, 2, {"g0": [graded(1.0, None, 0.0)]})
    assert (nothing.distance, nothing.num_groups) == (None, 1)


def test_a_state_goes_on_after_it_was_stored() -> None:
    def steps(state: AuditState, numbers: Sequence[int]) -> float:
        found = 0.0
        for step in numbers:
            rng = random.Random(step)
            made = {f"g{i}": [graded(*honest(rng, step)) for _ in range(4)] for i in range(4)}
            found = observe(BY_GRADE, state, step, made).e_value
        return found

    whole, half = AuditState(), AuditState()
    steps(half, range(1, 6))
    stored = msgspec.json.decode(msgspec.json.encode(half), type=AuditState)
    assert steps(whole, range(1, 11)) == steps(stored, range(6, 11))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"term": "clear", "by": "clear", "tolerance": 0.1}, "cannot audit itself"),
        ({"term": "clear", "by": "auditor"}, "measure it with etude judge calibrate"),
        ({"term": "clear", "by": "grade", "tolerance": 0.1}, "has no tolerance"),
    ],
)
def test_an_audit_that_tests_nothing_is_refused(given: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        AuditConfig(**given)  # type: ignore[arg-type]
