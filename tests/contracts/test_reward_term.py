"""What every reward term promises. A new one joins with one line in TERMS."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from examples.plugins.rewards import FewTurns

from etude.errors import EtudeError
from etude.records import Graded, Rollout
from etude.records.reward import Score, Term
from etude.records.task import Trust
from etude.rewards import Composition, NamedTerm, measure
from etude.seams import RewardTerm
from etude.testing.rewards import RewardTermContract, finished

SOLVED = Graded.of(1.0, trust=Trust.DATA, reason="all pass")


class Away:
    """A term whose service is never there."""

    version = "1"

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        return Score(value=None, evidence="the service\ndid not answer")


TERMS: list[RewardTerm] = [FewTurns(), FewTurns(most=2), Away()]


class TestRewardTerm(RewardTermContract):
    @pytest.fixture(autouse=True, params=TERMS, ids=lambda term: type(term).__name__)
    def _take(self, request: pytest.FixtureRequest) -> None:
        self.term: RewardTerm = request.param

    def make(self) -> RewardTerm:
        assert isinstance(self.term, RewardTerm)
        return self.term


class Bad:
    """A term that gives `value`, raises it where it is an exception, or hangs where it is None."""

    version = "7"

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
        (Score(value=float("nan")), "returned nan"),
        (Score(value=float("inf")), "returned inf"),
        (Score(value="much"), "did not return a Score with a number"),  # type: ignore[arg-type]
        (0.5, "did not return a Score with a number"),
        (ZeroDivisionError("no tokens"), "ZeroDivisionError: no tokens"),
        (TimeoutError("its own"), "TimeoutError: its own"),
        (EtudeError("the disk is full", hint="free it"), "the disk is full"),
    ],
)
def test_a_term_that_fails_is_named_with_the_rollout(value: Any, facts: str) -> None:
    with pytest.raises(EtudeError) as caught:
        asyncio.run(
            measure([NamedTerm("few", FewTurns()), NamedTerm("bad", Bad(value))], finished(num_turns=1), SOLVED)
        )
    said = str(caught.value)
    assert "reward term 'bad'" in said
    assert "version 7" in said
    assert "g000000.0" in said
    assert facts in said
    assert "hint: " in said


def test_a_term_that_hangs_is_named_at_its_deadline() -> None:
    with pytest.raises(EtudeError, match=r"reward term 'bad'.*exceeded its deadline"):
        asyncio.run(measure([NamedTerm("bad", Bad(None))], finished(num_turns=1), SOLVED, deadline_s=0.01))


def test_terms_are_stored_with_name_version_value_and_evidence_and_weighed() -> None:
    terms = [NamedTerm("few_turns", FewTurns(most=4), code="ab" * 32), NamedTerm("away", Away())]
    graded = asyncio.run(measure(terms, finished(num_turns=1), SOLVED))
    assert graded.grade == 1.0
    assert graded.terms[1:] == (
        Term(name="few_turns", value=0.75, version="1+abababababab", evidence="1 of 4 turns"),
        Term(name="away", value=None, version="1", evidence="the service did not answer"),
    )
    reward = Composition(weights={"few_turns": 0.5, "away": 2.0}).of(graded)
    assert (reward.value, reward.missing) == (1.375, ("away",))
