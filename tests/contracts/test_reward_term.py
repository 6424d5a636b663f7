"""What every reward term promises. A new one joins with one line in TERMS."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from examples.plugins.rewards import FewTurns
from tests.judge_server import ScriptedJudge, work

from etude.config import Plugin
from etude.errors import EtudeError, PluginRefused
from etude.plugins import Kind, make
from etude.records import Graded, Rollout
from etude.records.reward import Score, Term
from etude.records.task import Trust
from etude.rewards import Composition, NamedTerm, measure
from etude.rewards.config import TERMS as BUILT_IN
from etude.seams import AnyRewardTerm, GroupRewardTerm, RewardTerm
from etude.testing.contracts import results
from etude.testing.rewards import RewardTermContract, finished

SOLVED = Graded.of(1.0, trust=Trust.DATA, reason="all pass")


class Away:
    """A term whose service is never there."""

    version = "1"

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        return Score(value=None, evidence="the service\ndid not answer")


class Fewest:
    """The share of the siblings that took more turns."""

    version = "1"

    async def score_group(self, rollouts: Sequence[Rollout], graded: Sequence[Graded]) -> Sequence[Score]:
        turns = [one.num_turns for one in rollouts]
        return [Score(value=sum(other > own for other in turns) / len(turns)) for own in turns]


class First:
    """A group term that breaks the contract: its values depend on the order of the siblings."""

    version = "1"

    async def score_group(self, rollouts: Sequence[Rollout], graded: Sequence[Graded]) -> Sequence[Score]:
        return [Score(value=float(i)) for i in range(len(rollouts))]


TERMS: list[RewardTerm | GroupRewardTerm] = [FewTurns(), FewTurns(most=2), Away(), Fewest()]


class TestRewardTerm(RewardTermContract):
    @pytest.fixture(autouse=True, params=TERMS, ids=lambda term: type(term).__name__)
    def _take(self, request: pytest.FixtureRequest) -> None:
        self.term: RewardTerm | GroupRewardTerm = request.param

    def make(self) -> RewardTerm | GroupRewardTerm:
        assert isinstance(self.term, AnyRewardTerm)
        return self.term


class TestBuiltIn(RewardTermContract):
    @pytest.fixture(autouse=True, params=sorted({*BUILT_IN} - {"judge"}))  # a judge needs a rubric and a server
    def _take(self, request: pytest.FixtureRequest) -> None:
        self.kind: str = request.param

    def make(self) -> RewardTerm:
        made: RewardTerm = make(Kind.REWARD, Plugin(self.kind))
        return made

    def test_the_rollouts_of_the_contract_have_what_it_measures(self) -> None:
        value = self.measured(self.make())[0].value
        assert value is not None
        assert value < 0.0


@pytest.fixture(scope="module")
def judge_url() -> Iterator[str]:
    """The URL of a scripted judge that another thread serves."""
    server, ready, loop = ScriptedJudge(), threading.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        async with server.serve():
            ready.set()
            await ended.wait()

    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60.0)
    yield server.url
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()


class TestJudge(RewardTermContract):
    @pytest.fixture(autouse=True, params=["pointwise", "pairwise", "ranking"])
    def _take(self, request: pytest.FixtureRequest, judge_url: str, tmp_path: Path) -> Iterator[None]:
        rubric = tmp_path / "facts.toml"
        rubric.write_text('[[aspects]]\nname = "facts"\nquestion = "How many facts does it have?"\n')
        self.settings = {"rubric": str(rubric), "url": f"{judge_url}/v1", "model": "m", "mode": request.param}
        self.made: list[Any] = []
        yield
        for one in self.made:
            one.judge.store.close()

    def make(self) -> RewardTerm | GroupRewardTerm:
        cache = f"{self.settings['rubric']}-{len(self.made)}.sqlite"  # so that each object asks the server itself
        settings = self.settings | {"cache": cache, "evidence": ["files"]}
        made: RewardTerm | GroupRewardTerm = make(Kind.REWARD, Plugin("judge", settings))
        self.made.append(made)
        return made

    def rollouts(self) -> Sequence[tuple[Rollout, Graded]]:
        texts = [work(facts).encode() for facts in (5, 1, 3)]
        return [(finished(num_turns=1, exports={"own.py": text}, number=i), SOLVED) for i, text in enumerate(texts)]

    def test_its_values_are_those_of_the_judge(self) -> None:
        assert [one.value for one in self.measured(self.make())] == [1.0, 0.0, 0.5]


def test_the_contract_finds_a_group_term_whose_values_depend_on_the_order() -> None:
    failed = [promise for promise, failure in results(RewardTermContract, First) if failure]
    assert failed == ["the order of the siblings does not matter"]


def test_a_plugin_of_kind_reward_is_a_term_of_one_rollout_or_of_a_group() -> None:
    for name in ("FewTurns", "Fewest"):
        module = "examples.plugins.rewards" if name == "FewTurns" else __name__
        make(Kind.REWARD, Plugin(f"{module}:{name}"))
    with pytest.raises(PluginRefused, match="is not a reward term") as caught:
        make(Kind.REWARD, Plugin("examples.plugins.credit:ByRank"))
    assert "method score(rollout, graded)" in caught.value.facts


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
