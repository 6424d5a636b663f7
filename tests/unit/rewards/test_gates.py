"""Terms with gates, terms of whole groups, and what is measured again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from etude.config import build
from etude.errors import ConfigError, PluginError
from etude.records import Graded, Rollout
from etude.records.reward import Score, Term
from etude.records.task import Trust
from etude.rewards import Composition, NamedTerm, measure_group
from etude.rewards.config import RewardsConfig
from etude.testing.rewards import finished


def graded(grade: float, **values: float | None) -> Graded:
    terms = [Term(name=name, value=value, version="1") for name, value in values.items()]
    return Graded.of(grade, trust=Trust.DATA, reason="").with_terms(*terms)


def composed(how: Composition, *siblings: Graded) -> list[tuple[float, tuple[str, ...]]]:
    return [(one.value, one.missing) for one in how.rewards([one.terms for one in siblings])]


GATED = Composition(weights={"brief": 0.5}, when={"brief": "tests"})


def test_a_term_counts_only_where_its_gate_is_above_0() -> None:
    passed, failed = graded(1.0, tests=1.0, brief=1.0), graded(0.0, tests=0.0, brief=1.0)
    assert composed(GATED, passed, failed) == [(1.5, ()), (0.0, ())]


def test_a_value_is_needed_only_where_the_gate_is_open() -> None:
    passed, failed = graded(1.0, tests=1.0, brief=1.0), graded(0.0, tests=0.0)
    assert composed(GATED, passed, failed) == [(1.5, ()), (0.0, ())]
    assert composed(GATED, graded(1.0, tests=1.0), failed) == [(1.0, ("brief",)), (0.0, ("brief",))]


def test_an_unknown_gate_leaves_the_term_out_for_the_group() -> None:
    passed = graded(1.0, tests=1.0, brief=1.0)
    for other in (graded(0.0, tests=None, brief=1.0), graded(0.0, brief=1.0)):
        assert composed(GATED, passed, other) == [(1.0, ("brief",)), (0.0, ("brief",))]


def test_a_gate_whose_own_gate_is_closed_is_closed() -> None:
    how = Composition(weights={"c": 1.0}, when={"c": "b", "b": "grade"})
    assert composed(how, graded(1.0, b=1.0, c=0.25), graded(0.0, b=1.0, c=0.25)) == [(1.25, ()), (0.0, ())]


def test_gates_of_two_versions_are_not_compared() -> None:
    other = graded(0.0, brief=1.0).with_terms(Term(name="tests", value=0.0, version="2"))
    assert composed(GATED, graded(1.0, tests=1.0, brief=1.0), other) == [(1.0, ("brief",)), (0.0, ("brief",))]


@pytest.mark.parametrize(
    ("gates", "says"),
    [
        ({"a": "a"}, "form a circle: a -> a"),
        ({"a": "b", "b": "c", "c": "b"}, "form a circle: a -> b -> c -> b"),
        ({"a": "k1"}, "the gate of 'a' is 'k1'"),
        ({"a": "tets"}, "neither a term nor a measure of the graders: did you mean 'tests'?"),
        ({"a": "tests > 0.5"}, "the gate of 'a' is 'tests > 0.5'"),
    ],
)
def test_gates_that_can_never_be_known_are_refused(gates: dict[str, str], says: str) -> None:
    terms = [{"name": name, "when": gate, "kind": "my_package.rewards:Term"} for name, gate in gates.items()]
    with pytest.raises(ConfigError, match=says):
        build(RewardsConfig, {"terms": terms})


def test_parts_of_turns_are_weighted_summed_and_dropped_with_a_removed_reward() -> None:
    terms = [
        Term(name="a", value=-3.0, turns=((0, -1.0), (2, -2.0))),
        Term(name="b", value=-1.0, turns=((2, -1.0),)),
    ]
    how = Composition(weights={"a": 0.1, "b": 0.5})
    [reward] = how.rewards([graded(1.0).with_terms(*terms).terms])
    assert reward.turns == ((0, -0.1), (2, -0.7))
    assert reward.value == pytest.approx(1.0 - 0.3 - 0.5)
    assert how.of(graded(1.0, submitted=0.0).with_terms(*terms)).turns == ()


class Counted:
    """The number of turns; how often it was asked is in `calls`."""

    version = "1"

    def __init__(self) -> None:
        self.calls = list[str]()

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        self.calls.append(rollout.rollout_id)
        return Score(value=float(rollout.num_turns))


class Ranked:
    """The place of a rollout among its siblings, by turns."""

    version = "1"

    def __init__(self, lost: int = 0) -> None:
        self.groups, self.lost = list[list[str]](), lost

    async def score_group(self, rollouts: Sequence[Rollout], graded: Sequence[Graded]) -> Sequence[Score]:
        self.groups.append([one.rollout_id for one in rollouts])
        turns = [one.num_turns for one in rollouts]
        return [Score(value=float(sorted(turns).index(one))) for one in turns][self.lost :]


SIBLINGS = [finished(num_turns=3 - i, number=i) for i in range(3)]


def measured(terms: Sequence[NamedTerm], outcomes: Sequence[Graded]) -> list[Graded]:
    found = asyncio.run(measure_group(terms, SIBLINGS, outcomes))
    return [one.with_terms(*(new.term for new in some)) for one, some in zip(outcomes, found, strict=True)]


def test_a_gated_term_is_measured_after_its_gate_and_only_where_it_is_open() -> None:
    turns, asked = Counted(), Counted()
    terms = [NamedTerm("last", asked, when="first"), NamedTerm("first", turns, when="grade")]
    found = measured(terms, [graded(1.0), graded(0.0), graded(1.0)])
    assert [one.values.get("first") for one in found] == [3.0, None, 1.0]
    assert turns.calls == asked.calls == ["g000000.0", "g000000.2"]


def test_a_group_term_scores_the_siblings_whose_gate_is_open_together() -> None:
    ranked = Ranked()
    found = measured([NamedTerm("rank", ranked, when="grade")], [graded(1.0), graded(0.0), graded(1.0)])
    assert ranked.groups == [["g000000.0", "g000000.2"]]
    assert [one.values.get("rank") for one in found] == [1.0, None, 0.0]


def test_what_is_known_of_this_version_is_not_measured_again_and_siblings_get_one_version() -> None:
    turns, ranked = Counted(), Ranked()
    terms = [NamedTerm("turns", turns), NamedTerm("rank", ranked)]
    once = measured(terms, [graded(1.0)] * 3)
    again = measured(terms, once)
    assert again == once
    assert (len(turns.calls), len(ranked.groups)) == (3, 1)
    lost = [once[0], once[1].with_terms(Term(name="rank", value=None, version="1")), once[2]]
    assert measured(terms, lost) == once, "one sibling lacks it: all are ranked again"
    newer = [NamedTerm("turns", turns, code="ab"), NamedTerm("rank", ranked, code="ab")]
    versions = {term.version for one in measured(newer, once) for term in one.terms[1:]}
    assert versions == {"1+ab"}


def test_a_group_term_that_returns_too_few_scores_is_named() -> None:
    with pytest.raises(PluginError, match=r"reward term 'rank'.*one Score for each of 3 rollouts") as caught:
        measured([NamedTerm("rank", Ranked(lost=1))], [graded(1.0)] * 3)
    assert "group g000000" in caught.value.facts


class Parts:
    version = "1"

    def __init__(self, turns: tuple[tuple[int, float], ...]) -> None:
        self.turns = turns

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        return Score(value=1.0, turns=self.turns)


@pytest.mark.parametrize("turns", [((3, 1.0),), ((-1, 1.0),), ((0, float("nan")),), (0,)])
def test_parts_that_are_of_no_turn_are_an_error_that_names_the_term(turns: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(PluginError, match=r"reward term 'parts'.*parts with an invalid turn or number"):
        asyncio.run(measure_group([NamedTerm("parts", Parts(turns))], SIBLINGS[:1], [graded(1.0)]))


class Hints:
    version = "1"

    def __init__(self, hints: tuple[tuple[int, str], ...]) -> None:
        self.hints = hints

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        return Score(value=-1.0, hints=self.hints)


@pytest.mark.parametrize("hints", [((3, "no"),), ((-1, "no"),), ((0, ""),), ((0, "no"), (0, "so")), (0,)])
def test_hints_that_are_of_no_turn_or_several_of_one_are_an_error_that_names_the_term(hints: Any) -> None:
    with pytest.raises(PluginError, match=r"reward term 'hints'.*an invalid turn"):
        asyncio.run(measure_group([NamedTerm("hints", Hints(hints))], SIBLINGS[:1], [graded(1.0)]))


def test_a_hint_is_stored_with_its_term_and_a_long_one_is_cut_off() -> None:
    terms = [NamedTerm("hints", Hints(((1, "no"), (2, "n" * 5_000))))]
    [[found]] = asyncio.run(measure_group(terms, SIBLINGS[:1], [graded(1.0)]))
    assert found.term.hints == ((1, "no"), (2, "n" * 2_000))
