"""Batches by reference: tokens go through no call, and the learner trains on what is on the disk, or says what is not.

Conductor, ledger and learner are the real ones; rollouts are made up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.played_run import PROMPT, SAMPLED, PlayedRun, Players
from tests.small_rollouts import Kit

from etude.errors import LedgerError
from etude.experience import Ledger, read_trace
from etude.experience.traces import trace_path
from etude.loop.conductor import UNREAD, Conductor
from etude.loop.locations import rollout_files
from etude.loop.replay import replay_step
from etude.loop.rollout_result import RolloutResult
from etude.records.summary import summary_of
from etude.records.wire import pack
from etude.telemetry import read_events

pytestmark = pytest.mark.timeout(1800)
FRAME = 28 << 10
SETS = ("evals.every=50", "rl.steps=2", "rl.checkpoint_every=2", "experience.max_lag=0")


class Wide(Players):
    """Run processes whose rollouts are long."""

    sampled = 110


class Damaging(Players):
    """Run processes whose disk damages the first rollout of each group of step 1, once it was graded."""

    async def grade(self, rollout: RolloutResult) -> Any:
        graded = await super().grade(rollout)
        summary = rollout.summary
        if summary.group_id == "g000000" and summary.rollout_id.endswith(".0"):
            self.damage(self.files.path(summary.rollout_id, summary.attempt))
        return graded

    def damage(self, path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1] + b"?")


class Gone(Damaging):
    """Run processes whose disk is gone once step 1 is to be trained."""

    async def grade(self, rollout: RolloutResult) -> Any:
        graded = await super().grade(rollout)
        self.files.drop(rollout.summary)
        return graded


def reinforced(run: PlayedRun) -> None:
    async def main() -> None:
        async with run.conductor() as conductor:
            await conductor.reinforce()

    asyncio.run(main())


def made(game: Any, path: Path, players: type[Players], *sets: str, **options: Any) -> PlayedRun:
    run = PlayedRun.create(path, game, *SETS, *sets)
    return PlayedRun(run.folder, run.config, players=players, **options)


def test_a_step_larger_than_a_frame_is_trained_and_redone_to_the_bit(game: Any, tmp_path: Path) -> None:
    run = made(game, tmp_path / "r", Wide, "experience.group_size=8", max_frame_bytes=FRAME)
    reinforced(run)
    run.assert_sound(2)
    batch = read_trace(trace_path(run.folder / "traces", 2)).batch
    assert len(pack(batch)) > 2 * FRAME
    assert replay_step(run.folder, 2, start=Path("mid")).equal


def test_the_files_of_a_step_stay_until_two_checkpoints_lie_behind_it_and_after_the_end(
    game: Any, tmp_path: Path
) -> None:
    run = made(game, tmp_path / "r", Players, "rl.steps=4", "rl.checkpoint_every=1")
    groups, kept = run.config.experience.groups_per_step, list[set[int]]()
    checkpoint = Conductor._checkpoint

    async def watched(conductor: Conductor) -> None:
        await checkpoint(conductor)
        stored = {int(name[1:7]) for name in conductor.processes.files.names()}
        kept.append({group for group in stored if group < conductor.step * groups})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Conductor, "_checkpoint", watched)
        reinforced(run)
    assert kept == [set(range(step * groups, (step + 1) * groups)) for step in range(4)]
    assert {int(name[1:7]) for name in rollout_files(run.folder).names()} == kept[-1], "they stay when RL has ended"
    with contextlib.closing(Ledger.open_readonly(run.folder / "ledger.sqlite")) as ledger:
        assert len(ledger.stored_summaries()) == len(rollout_files(run.folder).names())


def test_rollouts_are_compared_with_the_reference_piece_by_piece_and_come_out_the_same(
    game: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from etude.loop import learner  # torch
    from etude.telemetry import Telemetry

    run = made(game, tmp_path / "r", Players)
    spec = Kit.spec("g000000.0")
    rollouts = [Players.made(Players, replace(spec, rollout_id=f"g.{i}", seed=i)) for i in range(6)]  # type: ignore[arg-type]
    summaries = [summary_of(rollout, rollout_files(run.folder).write(rollout)) for rollout in rollouts]
    with contextlib.closing(Telemetry(run.folder / "events" / "other.jsonl", process="other")) as telemetry:
        rank = learner.LearnerProcess(run.folder, run.config, telemetry)
        whole, pieces, compare = rank.k1(summaries), list[int](), rank.reference.k1

        def counted(samples: Any) -> dict[str, float]:
            pieces.append(len(samples))
            return compare(samples)

        monkeypatch.setattr(rank.reference, "k1", counted)
        monkeypatch.setattr(learner, "K1_TOKENS", 2 * (PROMPT + SAMPLED))
        found = rank.k1(summaries)
    assert pieces == [2] * (len(summaries) // 2)
    assert found.keys() == {summary.rollout_id for summary in summaries}
    assert found == pytest.approx(whole)


def test_a_stored_rollout_that_was_damaged_is_set_aside_and_the_step_goes_on(game: Any, tmp_path: Path) -> None:
    run = made(game, tmp_path / "r", Damaging)
    reinforced(run)
    run.assert_sound(2)
    ledger = Ledger.open_readonly(run.folder / "ledger.sqlite")
    row = ledger.row("g000000.0")
    ledger.close()
    assert (row.state, row.reason) == ("quarantined", UNREAD)
    told = [event for event in read_events(run.folder / "events") if event["kind"] == "rollout.signs"]
    assert [(event["rollout_id"], event["signs"]) for event in told] == [("g000000.0", [UNREAD])]


def test_a_run_whose_stored_rollouts_are_all_gone_ends_by_name_and_loses_none(game: Any, tmp_path: Path) -> None:
    run = made(game, tmp_path / "r", Gone)
    with pytest.raises(LedgerError, match=r"the stored rollout g00000\d\.\d cannot be read") as caught:
        reinforced(run)
    assert "copy its file back" in caught.value.hint
    ledger = Ledger.open_readonly(run.folder / "ledger.sqlite")
    assert "quarantined" not in ledger.states()
    ledger.close()


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_bytes(b"PAR1")])
def test_a_rank_that_cannot_read_a_step_names_it(game: Any, tmp_path: Path, change: Callable[[Path], None]) -> None:
    from etude.loop.learner import LearnerProcess  # torch
    from etude.telemetry import Telemetry

    run = made(game, tmp_path / "r", Players)
    reinforced(run)
    with contextlib.closing(Telemetry(run.folder / "events" / "other.jsonl", process="other")) as telemetry:
        rank = LearnerProcess(run.folder, run.config, telemetry)
        with pytest.raises(LedgerError, match="the trace of step 2 has another batch"):
            rank._read(2, "0" * 64)
        change(run.folder / "traces" / "batch-000002.parquet")
        with pytest.raises(LedgerError):
            rank._read(2, "0" * 64)
