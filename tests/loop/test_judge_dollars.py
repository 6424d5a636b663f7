"""What the judges of a run's reward terms cost is in its steps, its summary and its report."""

from __future__ import annotations

import asyncio
import os
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.judge_server import ScriptedJudge, judge_in_a_thread
from tests.played_run import PlayedRun, Players

from etude.config import build
from etude.dashboard import RunView, summarise
from etude.dashboard.report import page
from etude.errors import DeadlineExceeded, StoreError
from etude.loop.config import RunConfig
from etude.loop.evaluation import judge_dollars
from etude.loop.run_processes import RunProcesses
from etude.records import Graded
from etude.records.reward import Measured
from etude.records.summary import RolloutSummary
from etude.rewards.config import TermConfig
from etude.rewards.judges.store import JudgeStore
from etude.telemetry import read_events

SETS = ("rl.checkpoint_every=50", "evals.every=50", "experience.max_lag=0", "experience.groups_per_step=2")


@pytest.fixture
def judge() -> Iterator[ScriptedJudge]:
    yield from judge_in_a_thread()


def trained(
    tmp_path: Path, game: Any, judge: ScriptedJudge, *, cache: str = "", players: type[Players] = Players
) -> PlayedRun:
    """A run of two steps whose rewards have a term of a judge with prices."""
    (tmp_path / "facts.toml").write_text('[[aspects]]\nname = "facts"\nquestion = "How many facts?"\n')
    (tmp_path / "prices.toml").write_text("[models.m]\ninput = 2.0\noutput = 2.0\ncached_input = 2.0\n")
    kind = f"kind='judge', rubric='{tmp_path}/facts.toml', url='{judge.url}/v1', model='m'"
    priced = f"{kind}, cache='{cache or tmp_path / 'j.sqlite'}', prices='{tmp_path}/prices.toml'"
    terms = f"rewards.terms=[{{name='facts', when='grade', weight=0.1, kind={{{priced}}}}}]"
    made = PlayedRun.create(tmp_path / "r", game, *SETS, "rl.steps=2", terms)
    run = PlayedRun(made.folder, made.config, players=players)

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


class Elsewhere(Players):
    """Its grader is on another host: it works in another folder, where the judge's file is."""

    async def measure(
        self, terms: Sequence[TermConfig], summaries: Sequence[RolloutSummary], graded: Sequence[Graded]
    ) -> list[list[Measured]]:
        here, there = Path.cwd(), self.run.path.parent / "there"
        there.mkdir(exist_ok=True)
        os.chdir(there)
        try:
            await super().judge_accounts(terms)  # opens the file
        finally:
            os.chdir(here)
        return await super().measure(terms, summaries, graded)


class Moving(Players):
    """The host of its grader is another one in each step."""

    number = 0

    async def judge_accounts(self, terms: Sequence[TermConfig]) -> dict[str, float | None] | None:
        found = await super().judge_accounts(terms)
        self.number += 1
        return found and {f"{self.number}{key}": dollars for key, dollars in found.items()}


def test_judges_that_another_host_has_asked_cost_what_its_account_says(
    tmp_path: Path, game: Any, judge: ScriptedJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run = trained(tmp_path, game, judge, cache="j.sqlite", players=Elsewhere)
    first, second = spent(run)
    assert first is not None
    assert second is not None
    assert 0.0 < first <= second
    assert not (tmp_path / "here" / "j.sqlite").exists(), "the file of this host has no account, which is not $0"


def test_the_cost_is_unknown_once_the_account_of_a_host_is_gone(
    tmp_path: Path, game: Any, judge: ScriptedJudge
) -> None:
    first, second = spent(trained(tmp_path, game, judge, players=Moving))
    assert first is not None
    assert second is None


def test_accounts_of_all_graders_are_put_together_and_one_that_does_not_tell_makes_the_sum_unknown(
    tmp_path: Path,
) -> None:
    class Grader:
        def __init__(self, name: str, told: Any) -> None:
            self.name, self.told, self.lost = name, told, asyncio.Event()

        async def call(self, method: str, *given: Any, deadline_s: float) -> Any:
            assert method == "judge_accounts"
            if isinstance(self.told, Exception):
                raise self.told
            return self.told

    def asked(*told: Any, up: int | None = None) -> float | None:
        async def main() -> float | None:
            config = build(RunConfig, {"fleet": {"num_graders": len(told)}})
            processes = RunProcesses(types.SimpleNamespace(path=tmp_path), config, None, None)  # type: ignore[arg-type]
            for number, one in enumerate(told[:up]):
                processes.graders.join(Grader(f"grader-{number}", one))  # type: ignore[arg-type]
            return judge_dollars(await processes.judge_accounts([]))

        return asyncio.run(main())

    assert asked({"a tone": 1.0}, {"a tone": 1.0}, {"b tone": 0.25}) == 1.25, "two of them share a file"
    assert asked({"a tone": 1.0}, {"b tone": None}) is None
    assert asked({"a tone": 1.0}, DeadlineExceeded("no answer", "for 20 s", hint="see its log")) is None
    assert asked({"a tone": 1.0}, {"b tone": 1.0}, up=1) is None
    assert asked({}, {}) is None, "no judge"


def test_a_judge_that_was_removed_still_counts_with_what_it_had_cost() -> None:
    earlier = {"b tone": 0.5, "a style": 2.0}
    assert judge_dollars({"b tone": 1.0}, earlier) == 3.0
    assert judge_dollars({}, earlier) == 2.5
    assert judge_dollars({"b tone": 1.0}, {"a style": None}) is None
    assert judge_dollars({"c tone": 1.0}, earlier) is None, "a file of the judge is gone"
