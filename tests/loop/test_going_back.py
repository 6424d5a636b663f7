"""A run whose newest checkpoint is damaged resumes from an older one, with the rollouts stored since then.

Conductor, ledger and learner are the real ones; rollouts are made up.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.played_run import PlayedRun, Players

from etude.dashboard import RunView
from etude.dashboard.problems import recovered_failures
from etude.experience import Ledger
from etude.loop.conductor import Conductor
from etude.loop.fsck import Finding, FsckReport, checks_of
from etude.loop.rollout_result import RolloutResult
from etude.loop.rpc import ProcessLost
from etude.records import RolloutSpec
from etude.stores import DirectoryStore
from etude.telemetry import read_events
from etude.weights import lineage

pytestmark = pytest.mark.timeout(1800)

GROUPS, SIZE, EVERY = 2, 2, 2
SETS = (
    f"experience.groups_per_step={GROUPS}",
    f"experience.group_size={SIZE}",
    f"rl.checkpoint_every={EVERY}",
    "evals.every=50",
)
BEFORE = 3 * EVERY  # steps until the run is cut off


class Stops(Players):
    """Run processes whose rollouts behind those of the first steps never end."""

    async def rollout(self, spec: RolloutSpec, *, kept: bool = True) -> RolloutResult:
        if int(spec.group_id[1:]) >= BEFORE * GROUPS:
            await asyncio.Event().wait()
        return await super().rollout(spec, kept=kept)


def made(game: Any, path: Path, *sets: str, players: type[Players] = Players) -> PlayedRun:
    run = PlayedRun.create(path, game, *SETS, *sets)
    return PlayedRun(run.folder, run.config, players=players)


def reinforced(run: PlayedRun) -> None:
    async def main() -> None:
        async with run.conductor() as conductor, asyncio.timeout(600):
            await conductor.reinforce()

    asyncio.run(main())


def cut_off(run: PlayedRun) -> None:
    """Train until the checkpoint of step `BEFORE` is behind, and no further."""

    async def main() -> None:
        behind, checkpoint = asyncio.Event(), Conductor._checkpoint

        async def watched(conductor: Conductor) -> None:
            await checkpoint(conductor)
            if conductor.step == BEFORE:
                behind.set()

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Conductor, "_checkpoint", watched)
            async with run.conductor() as conductor, asyncio.timeout(600):
                training = asyncio.create_task(conductor.reinforce())
                await behind.wait()
                training.cancel()
                await asyncio.wait([training])

    asyncio.run(main())


def without(run: PlayedRun, *steps: int) -> PlayedRun:
    """The run after somebody deleted these checkpoints, as their errors advise."""
    for name in ("final", *(f"step-{step:06d}" for step in steps)):
        shutil.rmtree(run.folder / "checkpoints" / name, ignore_errors=True)
    return PlayedRun(run.folder, run.config)


def proven(run: PlayedRun) -> tuple[list[Finding], list[Finding]]:
    """Problems and notices that `etude fsck` finds in stored rollouts."""
    proof = FsckReport()
    for step in checks_of(run.folder.path):
        step(proof)
    problems, notices = ([one for one in all_ if "rollouts" in one.place] for all_ in (proof.problems, proof.notices))
    return problems, notices


def digests(run: PlayedRun) -> dict[int, str]:
    found = lineage(DirectoryStore(run.folder / "weights"), "policy")
    return {manifest.version.step: manifest.version.digest for manifest in found}


def test_from_the_checkpoint_before_the_newest_every_step_is_repeated_to_the_byte(game: Any, tmp_path: Path) -> None:
    run = made(game, tmp_path / "r", "experience.max_lag=0", "rl.steps=8", players=Stops)
    cut_off(run)
    first = digests(run)
    assert len(set(first.values())) == BEFORE + 1, "every step moved the weights"
    reinforced(without(run, BEFORE))
    assert {step: digests(run)[step] for step in first} == first
    run.assert_sound(8)


def test_what_a_restart_needs_is_proven_with_the_run(game: Any, tmp_path: Path) -> None:
    run = made(game, tmp_path / "r", "experience.max_lag=0", "rl.steps=8", players=Stops)
    cut_off(run)
    stored = sorted((run.folder / "rollouts").iterdir())
    assert proven(run) == ([], [])
    assert len(stored) == EVERY * GROUPS * SIZE
    damaged, gone, whole = stored[0], stored[1], stored[2].read_bytes()
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    gone.unlink()
    stored[2].with_name("g000009.0.7.rollout").write_bytes(whole)
    problems, notices = proven(run)
    assert [one.place for one in problems] == [f"rollouts/{damaged.name}", f"rollouts/{gone.name}"]
    assert all("copy it back" in one.hint for one in problems)
    assert [one.place for one in notices] == ["rollouts/g000009.0.7.rollout"]


def test_from_an_older_one_lost_records_are_told_of_and_no_step_takes_them(game: Any, tmp_path: Path) -> None:
    """And none waits for ever: groups that were admitted for later steps are needed for earlier ones now."""
    run = made(game, tmp_path / "r", "experience.max_lag=1", "rl.steps=8", players=Stops)
    cut_off(run)
    reinforced(without(run, BEFORE, BEFORE - EVERY))
    run.assert_sound(8)
    begun = [event for event in read_events(run.folder / "events") if event["kind"] == "lineage"][-1]
    assert (begun["step"], begun["gone"], begun["freed"]) == (EVERY, EVERY * GROUPS * SIZE, EVERY * GROUPS * SIZE)
    said = dict(recovered_failures(RunView(run.folder.path)))
    assert said["a rollout of a lost step has no record, and is not trained again"] == begun["gone"]
    ledger = Ledger.open_readonly(run.folder / "ledger.sqlite")
    gone = [row for row in ledger.rows() if row.state == "quarantined"]
    ledger.close()
    assert {row.group_id for row in gone} == {f"g{n:06d}" for n in range(EVERY * GROUPS, 2 * EVERY * GROUPS)}
    assert {row.reason for row in gone} == {"its record was deleted, and its step was lost later"}
    steps = [event for event in read_events(run.folder / "events") if event["kind"] == "rl.step"]
    assert all(event["no_signal_share"] == 0 for event in steps), "each step was made of groups with a signal"
    assert all(int(lag) <= 1 or event["masked_share"] for event in steps for lag in event["token_lag"])


def test_an_evaluation_that_was_cut_off_is_made_when_the_run_goes_on(
    game: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of its step came first, so that no step leads to it again."""
    run = made(game, tmp_path / "r", "rl.steps=4", "evals.every=2", "evals.during_tasks=2")
    evaluate, steps = Conductor.evaluate, list[int]()

    async def cut_off_once(conductor: Conductor, *what: Any) -> Any:
        steps.append(conductor.step)
        if len(steps) == 1:
            raise ProcessLost("the learner is gone", hint="another comes")
        return await evaluate(conductor, *what)

    monkeypatch.setattr(Conductor, "evaluate", cut_off_once)
    reinforced(run)
    assert steps == [2, 2]
    assert [path.name for path in (run.folder / "evals").iterdir()] == ["during-000002.parquet"]
    reinforced(without(run, 4))
    assert steps == [2, 2], "what is there is not made again"


def test_files_of_an_interrupted_checkpoint_are_deleted_with_the_next_one(game: Any, tmp_path: Path) -> None:
    run = made(game, tmp_path / "r", "rl.steps=2")
    half = run.folder / "checkpoints" / ".step-000001.0a1b2c3d"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    reinforced(run)
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["final", "mid", "step-000002"]
