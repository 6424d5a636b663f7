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
from etude.loop.places import rollout_files
from etude.loop.played import Played
from etude.loop.redoing import redo
from etude.records.summary import summary_of
from etude.records.wire import pack
from etude.telemetry import read_events

pytestmark = pytest.mark.timeout(120)
FRAME = 24 << 10
SETS = ("evals.every=50", "rl.steps=2", "rl.checkpoint_every=2", "experience.max_lag=0")


class Wide(Players):
    """A crew whose rollouts are long."""

    sampled = 110


class Damaging(Players):
    """A crew whose disk damages the first rollout of each group of step 1, once it was graded."""

    async def grade(self, rollout: Played) -> Any:
        graded = await super().grade(rollout)
        summary = rollout.summary
        if summary.group_id == "g000000" and summary.rollout_id.endswith(".0"):
            self.damage(self.files.path(summary.rollout_id, summary.attempt))
        return graded

    def damage(self, path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1] + b"?")


class Gone(Damaging):
    """A crew whose disk is gone once step 1 is to be trained."""

    async def grade(self, rollout: Played) -> Any:
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
    stored = [path.stat().st_size for path in rollout_files(run.folder).folder.iterdir()]
    assert not stored, "the last step's checkpoint lies behind them all"
    batch = read_trace(trace_path(run.folder / "traces", 2)).batch
    assert len(pack(batch)) > 2 * FRAME
    assert redo(run.folder, 2, start=Path("mid")).equal


def test_the_files_of_a_step_stay_until_a_checkpoint_lies_behind_it(game: Any, tmp_path: Path) -> None:
    run = made(game, tmp_path / "r", Players)
    kept = list[int]()
    checkpoint = Conductor._checkpoint

    async def counted(conductor: Conductor) -> None:
        kept.append(len(conductor.crew.files.names()))
        await checkpoint(conductor)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Conductor, "_checkpoint", counted)
        reinforced(run)
    a_step = run.config.experience.groups_per_step * run.config.experience.group_size
    assert kept == [2 * a_step]
    assert rollout_files(run.folder).names() == []


def test_a_stored_rollout_that_was_damaged_is_set_aside_and_the_step_goes_on(game: Any, tmp_path: Path) -> None:
    run = made(game, tmp_path / "r", Damaging)
    reinforced(run)
    run.assert_sound(2)
    ledger = Ledger.reading(run.folder / "ledger.sqlite")
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
    ledger = Ledger.reading(run.folder / "ledger.sqlite")
    assert "quarantined" not in ledger.states()
    ledger.close()


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_bytes(b"PAR1")])
def test_a_rank_that_cannot_read_a_step_names_it(game: Any, tmp_path: Path, change: Callable[[Path], None]) -> None:
    from etude.loop.learning import Learning  # torch
    from etude.telemetry import Telemetry

    run = made(game, tmp_path / "r", Players)
    reinforced(run)
    with contextlib.closing(Telemetry(run.folder / "events" / "other.jsonl", process="other")) as telemetry:
        rank = Learning(run.folder, run.config, telemetry)
        with pytest.raises(LedgerError, match="the trace of step 2 holds another batch"):
            rank._read(2, "0" * 64)
        change(run.folder / "traces" / "batch-000002.parquet")
        with pytest.raises(LedgerError):
            rank._read(2, "0" * 64)
