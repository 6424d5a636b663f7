"""What every reward term promises. A new one joins with one line in TERMS."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from examples.plugins.rewards import FewTurns

from etude.errors import ConfigError, EtudeError
from etude.records import Graded, Rollout
from etude.records.reward import Score, Term
from etude.records.task import Trust
from etude.rewards import Composition, check_names, measure
from etude.seams import RewardTerm
from etude.testing.rewards import RewardTermContract, finished

SOLVED = Graded.of(1.0, trust=Trust.DATA, reason="all pass")


class Away:
    """A term whose service is never there."""

    name, version = "away", "1"

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        return Score(value=None, evidence="the service\ndid not answer")


TERMS: list[RewardTerm] = [FewTurns(), FewTurns(most=2), Away()]


class TestRewardTerm(RewardTermContract):
    @pytest.fixture(autouse=True, params=TERMS, ids=lambda term: term.name)
    def _take(self, request: pytest.FixtureRequest) -> None:
        self.term: RewardTerm = request.param

    def make(self) -> RewardTerm:
        assert isinstance(self.term, RewardTerm)
        return self.term


class Bad:
    """A term that gives `value`, raises it where it is an exception, or hangs where it is None."""

    name, version = "bad", "7"

    def __init__(self, value: Any) -> None:
        self.value = value

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        if self.value is None:
            await asyncio.Event().wait()
        if isinstance(self.value, Exception):
            raise self.value
        return self.value  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("value", "facts"),
    [
        (Score(value=float("nan")), "gave nan"),
        (Score(value=float("inf")), "gave inf"),
        (Score(value="much"), "no Score of a number"),  # type: ignore[arg-type]
        (0.5, "no Score of a number"),
        (ZeroDivisionError("no tokens"), "ZeroDivisionError: no tokens"),
        (TimeoutError("its own"), "TimeoutError: its own"),
        (EtudeError("the disk is full", hint="free it"), "the disk is full"),
    ],
)
def test_a_term_that_fails_is_named_with_the_rollout(value: Any, facts: str) -> None:
    with pytest.raises(EtudeError) as caught:
        asyncio.run(measure([FewTurns(), Bad(value)], finished(num_turns=1), SOLVED))
    said = str(caught.value)
    assert "reward term 'bad'" in said
    assert "version 7" in said
    assert "g000000.0" in said
    assert facts in said
    assert "hint: " in said


def test_a_term_that_hangs_is_named_at_its_deadline() -> None:
    with pytest.raises(EtudeError, match="reward term 'bad'.*did not end"):
        asyncio.run(measure([Bad(None)], finished(num_turns=1), SOLVED, deadline_s=0.01))


def test_terms_are_stored_with_name_version_value_and_evidence_and_weighed() -> None:
    graded = asyncio.run(measure([FewTurns(most=4), Away()], finished(num_turns=1), SOLVED))
    assert graded.grade == 1.0
    assert graded.terms[1:] == (
        Term(name="few_turns", value=0.75, version="1", evidence="1 of 4 turns"),
        Term(name="away", value=None, version="1", evidence="the service did not answer"),
    )
    reward = Composition(weights={"few_turns": 0.5, "away": 2.0}).of(graded)
    assert (reward.value, reward.missing) == (1.375, ("away",))


@pytest.mark.parametrize(("names", "what"), [(["grade"], "is called 'grade'"), (["a", "a"], "2 reward terms")])
def test_two_terms_of_one_name_and_a_name_of_etudes_own_are_refused(names: list[str], what: str) -> None:
    terms = [Bad(0.0) for _ in names]
    for term, name in zip(terms, names, strict=True):
        term.name = name
    with pytest.raises(ConfigError, match=what):
        check_names(terms)
