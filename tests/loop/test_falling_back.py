"""A run whose engines diverge from its learner: it takes its defences, reports them, and ends.

Every process is the real one. The run's config says exact; its engines are started with another config in its second
and third session, as on another machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import Game
from tests.played_run import PlayedRun

from etude.errors import ParityError
from etude.experience.trace_reader import read_trace
from etude.experience.traces import trace_path
from etude.harness import ChatFormat
from etude.loop.conductor import Conductor
from etude.loop.config import RunConfig, open_tasks
from etude.loop.phases import write_run_report
from etude.loop.processes import Supervisor
from etude.loop.run_processes import open_processes
from etude.numerics.config import ComputeDtype, Mode, NumericsConfig
from etude.run import RunFolder
from etude.telemetry import Telemetry, read_events

pytestmark = pytest.mark.timeout(1800)
F32, BF16 = ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16


async def session(folder: RunFolder, config: RunConfig, mode: Mode, dtype: ComputeDtype, until: int) -> None:
    """Go on with a run up to a step, over engines that compute so."""
    telemetry = Telemetry(folder / "events" / "conductor.jsonl", process="conductor")
    supervisor = Supervisor(telemetry, hung_s=config.fleet.hung_s)
    theirs = replace(config, numerics=NumericsConfig(mode), engine=replace(config.engine, dtype=dtype))
    async with open_processes(folder, theirs, telemetry, supervisor) as members:
        await asyncio.gather(members.start_learner(), members.start_sampling())
        shorter = replace(config, rl=replace(config.rl, steps=until))
        chat = ChatFormat.load(folder / "tokenizer")
        conductor = Conductor(folder, shorter, telemetry, members, source=open_tasks(config), chat=chat)
        try:
            await conductor.reinforce()
        finally:
            conductor.close()
            telemetry.close()


def played(path: Path, game: Game, sessions: Sequence[tuple[Mode, ComputeDtype, int]], *sets: str) -> PlayedRun:
    """A run in sessions, each over engines that compute so and up to a step."""
    small = ["rl.checkpoint_every=1", "evals.every=50", "experience.max_lag=0", 'fleet.engines=["reference"]']
    run = PlayedRun.create(path, game, *small, f"rl.steps={sessions[-1][-1]}", "fleet.hung_s=300", *sets)
    for mode, dtype, until in sessions:
        asyncio.run(session(run.folder, run.config, mode, dtype, until))
    return run


def test_a_run_falls_back_to_replay_then_to_truncated_weights_says_so_and_ends(game: Game, tmp_path: Path) -> None:
    sessions = [(Mode.EXACT, F32, 1), (Mode.NATIVE, F32, 3), (Mode.NATIVE, BF16, 4)]
    run = played(tmp_path / "r", game, sessions, "parity.over_budget=fall_back", "parity.patience=1")
    events = list(read_events(run.folder / "events"))
    first, second = [e for e in events if e["kind"] == "parity.alarm"]
    assert (first["defence"], second["defence"]) == ("replay", "truncated")
    assert first["step"] in (1, 2), "at the probe, or at what was sampled behind it"
    assert (second["engine"], second["step"]) == ("engine-0", 3)
    steps = [e for e in events if e["kind"] == "rl.step"]
    assert steps[0]["fresh_ratio_max"] == 0.0 < steps[1]["fresh_ratio_max"] < steps[3]["fresh_ratio_max"]
    assert [steps[i]["replayed_share"] for i in (0, 2, 3)] == [0.0, 1.0, 1.0]
    settings = [read_trace(trace_path(run.folder / "traces", step)).settings for step in (1, 3, 4)]
    assert settings == [{}, {"replay_routes": True}, {"replay_routes": True, "correction": "truncated"}]
    assert (run.folder / "checkpoints" / "final").is_dir()
    run.assert_sound(steps=4)
    write_run_report(run.folder)
    said = f"The run fell back to replay at step {first['step']}, to truncated at step 3."
    assert said in (run.folder / "report.html").read_text()


def test_a_run_that_only_reports_goes_on_and_one_that_stops_ends_by_name(game: Game, tmp_path: Path) -> None:
    run = played(tmp_path / "r", game, [(Mode.NATIVE, BF16, 1)], "parity.over_budget=report")
    alarms = [(e["engine"], e["defence"]) for e in read_events(run.folder / "events") if e["kind"] == "parity.alarm"]
    assert alarms == [("engine-0", ""), ("fresh rollouts", ""), ("engine-0", "")]
    run.assert_sound(steps=1)
    with pytest.raises(ParityError, match="engine-0 and the learner compute different probabilities with v000000"):
        played(tmp_path / "s", game, [(Mode.NATIVE, BF16, 1)])
