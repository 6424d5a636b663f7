"""Groups that wait for a slow judge, with the default settings: an answering one is never left out, a silent one soon.

The clock jumps (`tests.clock`), so hours of the judge's answers pass in no time."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clock import run_at_once
from tests.judge_server import SlowAsker, work

from etude.config import build
from etude.loop.group_scoring import GroupScorer
from etude.records import Graded
from etude.records.reward import Measured
from etude.records.task import Trust
from etude.rewards import Composition, NamedTerm, measure_group
from etude.rewards.config import RewardsConfig, TermConfig
from etude.rewards.judges import Aspect, Judge, JudgeStore, Limits, Rubric, Section
from etude.rewards.judges.terms import GroupJudgeTerm, JudgeTerm, Mode
from etude.rewards.measuring import DEADLINE_S
from etude.testing.rewards import finished

GROUPS, SIZE = 16, 8
TERMS = build(RewardsConfig, {"terms": [{"name": "clear", "kind": "malformed-calls"}]}).terms
PLAIN = Graded.of(1.0, trust=Trust.DATA, reason="")


@dataclass
class Run:
    """What a scored run has: the values of all rollouts, (state, a reason) of each event, and seconds that passed."""

    values: list[float | None]
    events: list[tuple[str, str]]
    seconds: float


def scored(tmp_path: Path, asker: SlowAsker, mode: Mode = Mode.POINTWISE, size: int = SIZE) -> Run:
    """Score `GROUPS` groups at the same time, as a run does, with the default settings of terms and judges."""
    rollouts = {
        f"g{group:06d}": [
            finished(num_turns=1, exports={"a.md": work(1 + (group + i) % 5, more=f"{group} {i}").encode()}, number=i)
            for i in range(size)
        ]
        for group in range(GROUPS)
    }
    rubric = Rubric((Aspect("facts", "How many facts?"),))
    judge = Judge(rubric, asker, JudgeStore(tmp_path / "judges.sqlite"))
    term: Any = (JudgeTerm if mode is Mode.POINTWISE else GroupJudgeTerm)(judge, mode, (Section.FILES,))
    events, stored = list[tuple[str, str]](), list[float | None]()

    class Processes:
        async def measure(
            self, terms: Sequence[TermConfig], summaries: Sequence[Any], graded: Sequence[Graded]
        ) -> list[list[Measured]]:
            return await measure_group([NamedTerm("clear", term)], rollouts[summaries[0].group_id], graded)

    class Records:
        def group(self, group_id: str) -> Any:
            rows = [types.SimpleNamespace(rollout_id=f"{group_id}.{i}", group_id=group_id) for i in range(size)]
            return types.SimpleNamespace(valid=[(one, PLAIN) for one in rows])

        def add_terms(self, changed: dict[str, tuple[Graded, float]]) -> None:
            stored.extend(one.values["clear"] for one, _ in changed.values())

    async def at_once(call: Any, *args: Any) -> Any:
        return call(*args)

    def event(kind: str, **facts: Any) -> None:
        events.append((facts["state"], next(iter(facts["reasons"].values()), "")))

    settings: Any = types.SimpleNamespace(
        changes=(),
        refresh=lambda: False,
        measured=lambda step: TERMS,
        at=lambda step: types.SimpleNamespace(terms=TERMS),
        composition=lambda step: Composition(weights={"clear": 1.0}),
    )
    telemetry: Any = types.SimpleNamespace(event=event)
    records: Any = Records()
    processes: Any = Processes()

    async def main() -> float:
        scorer = GroupScorer(records, at_once, processes, telemetry, settings)  # type: ignore[arg-type]
        await asyncio.gather(*(scorer.measure(group_id, TERMS) for group_id in rollouts))
        judge.store.close()
        return asyncio.get_running_loop().time()

    return Run(stored, events, run_at_once(main()))


def test_a_judge_that_is_slow_but_answers_is_in_the_reward_of_all_groups(tmp_path: Path) -> None:
    """16 groups share 8 places, and an answer takes 30 s, so a question waits longer than any deadline."""
    asker = SlowAsker(30.0)
    run = scored(tmp_path, asker, Mode.PAIRWISE, size=6)
    assert run.seconds > 2 * DEADLINE_S
    assert run.events == []
    assert len(run.values) == GROUPS * 6
    assert None not in run.values
    assert asker.num_asked == 2 * 15 * GROUPS, "each question is asked once"


def test_what_timed_out_once_is_measured_again_though_the_deadline_is_longer_than_retry_s(tmp_path: Path) -> None:
    assert TERMS[0].retry_s < Limits().deadline_s
    run = scored(tmp_path, SlowAsker(30.0, hangs=lambda number: number in (3, 40)))
    assert {state for state, _ in run.events} == {"waiting", "known"}
    assert all("no verdict within 120 s" in reason for state, reason in run.events if state == "waiting")
    assert len(run.values) == GROUPS * SIZE
    assert None not in run.values


def test_a_judge_that_is_silent_is_not_waited_for_by_each_question_in_turn(tmp_path: Path) -> None:
    run = scored(tmp_path, SlowAsker(30.0, hangs=lambda _: True))
    assert run.seconds < 2 * Limits().deadline_s + 5, "twice a deadline, and not one for each of 16 rounds of places"
    assert set(run.values) == {None}
    assert [state for state, _ in run.events].count("without") == GROUPS
    assert any("this one waited for a free place" in reason for _, reason in run.events)
