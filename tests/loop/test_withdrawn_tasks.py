"""Tasks that people withdraw while a run trains on them: with the real conductor, ledger and learner."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from tests.played_run import PlayedRun

from etude.experience import Ledger
from etude.experience.auditing import rollouts_of_tasks
from etude.experience.trace_reader import read_outcomes, read_trace
from etude.experience.traces import recorded_steps, trace_path
from etude.experience.transitions import State
from etude.loop.group_admission import WITHDRAWN
from etude.records.task import Split
from etude.tasks import DirectorySource

pytestmark = pytest.mark.timeout(1800)
SETS = ("experience.groups_per_step=2", "experience.group_size=2", "experience.max_lag=0", "rl.checkpoint_every=1")
WHEN = ["before the batch", "after the optimiser step"]


class Withdrawing(DirectorySource):
    """Task folders, of which some are withdrawn. `asked`: how often the run has asked."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.gone, self.asked, self.at = set[str](), 0, 0

    def withdrawn(self, task_ids: Collection[str]) -> set[str]:
        self.asked += 1
        return self.gone & set(task_ids) if self.asked >= self.at else set()


@pytest.mark.parametrize("at", [1, 2], ids=WHEN)
def test_no_version_is_trained_on_a_task_that_was_withdrawn(tmp_path: Path, game: Any, at: int) -> None:
    run = PlayedRun.create(tmp_path / "run", game, *SETS, "rl.steps=3", "evals.every=50")
    source = Withdrawing(str(run.config.tasks.source))
    source.gone, source.at = {source.task(Split.TRAIN, 0).task_id}, at

    async def main() -> None:
        async with run.conductor() as conductor, asyncio.timeout(600):
            conductor.admission.source = source
            await conductor.reinforce()

    asyncio.run(main())
    run.assert_sound(3)
    ledger = Ledger.open_readonly(run.folder / "ledger.sqlite")
    rows = [row for row in ledger.group_rows("g000000")]
    ledger.close()
    assert {(row.state, row.reason) for row in rows} == {(State.QUARANTINED, WITHDRAWN)}
    gone = {row.rollout_id for row in rows}
    traces = run.folder / "traces"
    steps = recorded_steps(traces)
    trained = {sample.rollout_id for step in steps for sample in read_trace(trace_path(traces, step)).batch.samples}
    assert len(steps) == 3
    assert trained
    assert not trained & gone
    assert not [path for path in (run.folder / "rollouts").rglob("*") if any(i in path.name for i in gone)]


def test_the_rollouts_of_a_task_are_found_in_traces_when_the_ledger_has_dropped_them(tmp_path: Path, game: Any) -> None:
    run = PlayedRun.create(tmp_path / "run", game, *SETS, "rl.steps=4", "evals.every=50")
    source = DirectorySource(str(run.config.tasks.source))
    wanted = {source.task(Split.TRAIN, 0).task_id}

    async def main() -> None:
        async with run.conductor() as conductor, asyncio.timeout(600):
            await conductor.reinforce()

    asyncio.run(main())
    traces = run.folder / "traces"
    first = {
        one.rollout_id
        for one in read_outcomes(trace_path(traces, recorded_steps(traces)[0]))[1]
        if one.task_id in wanted
    }
    ledger = Ledger.open_readonly(run.folder / "ledger.sqlite")
    assert first
    assert not first & set(ledger.rollouts_of_tasks(wanted))
    assert rollouts_of_tasks(ledger, traces, wanted) >= first
    assert not rollouts_of_tasks(ledger, traces, {"0" * 16})
    ledger.close()
