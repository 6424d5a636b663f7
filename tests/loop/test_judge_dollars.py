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
from etude.errors import StoreError
from etude.rewards.judges.store import JudgeStore
from etude.telemetry import read_events

SETS = ("rl.checkpoint_every=50", "evals.every=50", "experience.max_lag=0", "experience.groups_per_step=2")


@pytest.fixture
def judge() -> Iterator[ScriptedJudge]:
    yield from judge_in_a_thread()


def trained(tmp_path: Path, game: Any, judge: ScriptedJudge) -> PlayedRun:
    """A run of two steps whose rewards have a term of a judge with prices."""
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
    return run


def spent(run: PlayedRun) -> list[float | None]:
    return [one["judge_dollars"] for one in read_events(run.folder / "events") if one["kind"] == "rl.step"]


def test_a_runs_report_tells_what_its_judges_have_cost(tmp_path: Path, game: Any, judge: ScriptedJudge) -> None:
    run = trained(tmp_path, game, judge)
    first, second = spent(run)
    assert first is not None
    assert second is not None
    assert 0.0 < first <= second
    assert summarise(run.folder.path)["rl"]["judge_dollars"] == second
    assert "all answers for reward terms of RL" in page(RunView(run.folder.path))


def test_a_run_whose_accounts_of_judges_cannot_be_read_goes_on_and_the_cost_is_unknown(
    tmp_path: Path, game: Any, judge: ScriptedJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(self: JudgeStore) -> list[Any]:
        raise StoreError("the accounts cannot be read", hint="free space on the disk")

    monkeypatch.setattr(JudgeStore, "accounts", unreadable)
    run = trained(tmp_path, game, judge)
    assert spent(run) == [None, None]
    assert summarise(run.folder.path)["rl"]["judge_dollars"] is None
    assert "all answers for reward terms of RL" not in page(RunView(run.folder.path))
