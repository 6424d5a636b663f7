"""Runs with terms of whole groups, with terms that are unknown for a while, and with settings that change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.played_run import PlayedRun

from etude import cli
from etude.errors import DeadlineExceeded
from etude.experience import read_trace
from etude.experience.traces import trace_path
from etude.loop import group_scoring
from etude.records import Graded, Rollout
from etude.records.reward import Score
from etude.telemetry import read_events

pytestmark = pytest.mark.timeout(1800)

STEPS = 2
SETS = (
    f"rl.steps={STEPS}",
    "rl.checkpoint_every=50",
    "evals.every=50",
    "experience.max_lag=0",
    "experience.groups_per_step=2",
    "experience.group_size=4",
)


class Rank:
    """The place among the siblings, from 0, by their ids."""

    version = "1"

    async def score_group(self, rollouts: Sequence[Rollout], graded: Sequence[Graded]) -> Sequence[Score]:
        ids = sorted(one.rollout_id for one in rollouts)
        return [Score(value=float(ids.index(one.rollout_id))) for one in rollouts]


class Away:
    """A term whose service is away for its first `failures` calls; `retry`: whether it says that it may come back."""

    version = "1"
    calls: ClassVar[dict[str, int]] = {}

    def __init__(self, name: str, failures: int, retry: bool = True) -> None:
        self.name, self.failures, self.retry = name, failures, retry

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        key = f"{self.name}{rollout.rollout_id}"
        self.calls[key] = self.calls.get(key, 0) + 1
        if rollout.rollout_id == "g000001.2" and self.calls[key] <= self.failures:
            return Score(value=None, evidence="the service is away", retry=self.retry)
        return Score(value=float(rollout.rollout_id[-1]))


def trained(tmp_path: Path, game: Any, terms: str) -> PlayedRun:
    run = PlayedRun.create(tmp_path / "r", game, *SETS, f"rewards.terms=[{terms}]")

    async def main() -> None:
        async with run.conductor() as conductor:
            await conductor.reinforce()

    asyncio.run(main())
    return run


def values(run: PlayedRun, step: int, name: str) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {}
    for one in read_trace(trace_path(run.folder / "traces", step)).rollouts:
        assert isinstance(one.outcome, Graded)
        found.setdefault(one.group_id, []).append(one.outcome.values.get(name))
    return found


def unknown(run: PlayedRun) -> list[tuple[str, str, list[str]]]:
    events = [e for e in read_events(run.folder / "events") if e["kind"] == "rewards.unknown"]
    return [(e["state"], e["group_id"], e["terms"]) for e in events]


def away(name: str, failures: int, more: str = "", retry: str = "true") -> str:
    kind = f'{{kind = "tests.loop.test_group_rewards:Away", name = "{name}", failures = {failures}, retry = {retry}}}'
    return f'{{name = "away", kind = {kind}{more}}}'


def test_siblings_are_ranked_together_and_trained_on(game: Any, tmp_path: Path) -> None:
    rank = '{name = "rank", weight = 0.5, kind = "tests.loop.test_group_rewards:Rank"}'
    run = trained(tmp_path, game, rank)
    run.assert_sound(STEPS)
    assert list(values(run, 1, "rank").values()) == [[0.0, 1.0, 2.0, 3.0]] * 2
    rewards = [one.reward for one in read_trace(trace_path(run.folder / "traces", 1)).rollouts[:4]]
    assert rewards == [0.0, 1.5, 1.0, 2.5], "the grade is the number's parity"


def test_an_unknown_term_is_measured_again_until_it_is_known(
    game: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_scoring, "FIRST_S", 0.01)
    run = trained(tmp_path, game, away("again", 3, ", retry_s = 300"))
    assert values(run, 1, "away")["g000001"] == [0.0, 1.0, 2.0, 3.0]
    assert Away.calls["againg000001.2"] == 4
    assert Away.calls["againg000001.1"] == 1, "siblings that are known are not measured again"
    assert unknown(run) == [("waiting", "g000001", ["away"]), ("known", "g000001", [])]


@pytest.mark.parametrize(("retry_s", "retry", "calls"), [("0.1", "true", None), ("30", "false", 1)])
def test_a_group_goes_without_a_term_that_stays_unknown(
    game: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retry_s: str, retry: str, calls: int | None
) -> None:
    monkeypatch.setattr(group_scoring, "FIRST_S", 0.01)
    run = trained(tmp_path, game, away(retry, 10**9, f", retry_s = {retry_s}", retry))
    run.assert_sound(STEPS)
    assert values(run, 1, "away")["g000001"] == [0.0, 1.0, None, 3.0]
    assert calls in (None, Away.calls[f"{retry}g000001.2"])
    assert unknown(run)[-1] == ("without", "g000001", ["away"])
    batch = read_trace(trace_path(run.folder / "traces", 1))
    rewards = {one.rollout_id: one.reward for one in batch.rollouts}
    assert [rewards[f"g000000.{i}"] for i in range(4)] == [0.0, 2.0, 2.0, 4.0]
    assert [rewards[f"g000001.{i}"] for i in range(4)] == [0.0, 1.0, 0.0, 1.0], "it counts for no sibling"


def test_a_group_that_waits_for_a_term_ends_the_run_at_its_deadline_by_name(
    game: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_scoring, "FIRST_S", 0.01)
    monkeypatch.setattr(group_scoring, "WAIT_S", 0.5)
    with pytest.raises(DeadlineExceeded, match=r"reward term 'away' of group g000001 is unknown") as caught:
        trained(tmp_path, game, away("waits", 10**9, ', retry_s = 0.0, missing = "wait"'))
    assert "the service is away" in caught.value.facts
    assert Away.calls["waitsg000001.2"] > 2


@pytest.mark.parametrize(
    ("change", "then"),
    [("away.missing=without", [0.0, 1.0, None, 3.0]), ("away.kind.failures=0", [0.0, 1.0, 2.0, 3.0])],
)
def test_a_group_waits_whatever_the_reason_is_until_an_operator_changes_the_settings(
    game: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, then: list[float | None]
) -> None:
    """The term does not say that it may be known later, as a judge that refuses or whose budget is spent."""
    monkeypatch.setattr(group_scoring, "LOOK_S", 0.02)
    name = change.replace("=", "-")
    terms = away(name, 10**9, ', retry_s = 0.0, missing = "wait"', retry="false")
    run = PlayedRun.create(tmp_path / "r", game, *SETS, f"rewards.terms=[{terms}]")

    async def main() -> None:
        async with run.conductor() as conductor:
            training = asyncio.create_task(conductor.reinforce())
            while not unknown(run) and not training.done():  # noqa: ASYNC110  another task writes the event
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            assert not training.done(), "the group is held"
            run.folder.lock()
            assert await asyncio.to_thread(cli.main, ["rewards", "set", str(run.folder.path), change]) == 0
            run.folder.unlock()
            await asyncio.wait_for(training, 300)

    asyncio.run(main())
    run.assert_sound(STEPS)
    assert values(run, 1, "away")["g000001"] == then
    assert unknown(run) == [
        ("waiting", "g000001", ["away"]),
        ("without", "g000001", ["away"]) if None in then else ("known", "g000001", []),
    ]
    waiting = next(one for one in read_events(run.folder / "events") if one["kind"] == "rewards.unknown")
    assert waiting["held"] == ["away"]
    assert waiting["reasons"] == {"g000001.2 away": "the service is away"}
    assert Away.calls[f"{name}g000001.2"] <= 2, "what costs money is not asked again all the time"
