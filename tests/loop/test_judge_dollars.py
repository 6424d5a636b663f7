"""What the judges of a run's reward terms cost is in its steps, its summary and its report."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.judge_server import ScriptedJudge, judge_in_a_thread
from tests.played_run import PlayedRun

from etude.dashboard import RunView, summarise
from etude.dashboard.report import page
from etude.telemetry import read_events

SETS = ("rl.checkpoint_every=50", "evals.every=50", "experience.max_lag=0", "experience.groups_per_step=2")


@pytest.fixture
def judge() -> Iterator[ScriptedJudge]:
    yield from judge_in_a_thread()


def test_a_runs_report_tells_what_its_judges_have_cost(tmp_path: Path, game: Any, judge: ScriptedJudge) -> None:
    (tmp_path / "facts.toml").write_text('[[aspects]]\nname = "facts"\nquestion = "How many facts?"\n')
    (tmp_path / "prices.toml").write_text("[models.m]\ninput = 2.0\noutput = 2.0\ncached_input = 2.0\n")
    kind = f"kind='judge', rubric='{tmp_path}/facts.toml', url='{judge.url}/v1', model='m'"
    priced = f"{kind}, cache='{tmp_path}/j.sqlite', prices='{tmp_path}/prices.toml'"
    terms = f"rewards.terms=[{{name='facts', when='grade', weight=0.1, kind={{{priced}}}}}]"
    run = PlayedRun.create(tmp_path / "r", game, *SETS, "rl.steps=2", terms)

    async def main() -> None:
        async with run.conductor() as conductor:
            await conductor.reinforce()

    asyncio.run(main())
    found = [one["judge_dollars"] for one in read_events(run.folder / "events") if one["kind"] == "rl.step"]
    assert 0.0 < found[0] <= found[1]
    assert summarise(run.folder.path)["rl"]["judge_dollars"] == found[1]
    assert "all answers for reward terms of RL" in page(RunView(run.folder.path))
