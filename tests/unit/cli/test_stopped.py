"""The message of a stopped run: how to resume it."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.cli.run import _resume_step
from etude.run import RunFolder
from etude.telemetry import Telemetry


@pytest.mark.parametrize(("kept", "step"), [((), 0), ((40,), 40), ((40, 200), 200)])
def test_a_stop_in_mid_training_names_the_step_that_it_resume_step_from(
    tmp_path: Path, kept: tuple[int, ...], step: int
) -> None:
    run = RunFolder.create(tmp_path / "r", config_toml="", seed=0)
    telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
    assert _resume_step(run) == ""
    telemetry.event("phase", phase="mid-training", state="start")
    for one in kept:
        (run / "checkpoints" / "mid.partial" / f"step-{one:06d}").mkdir(parents=True)
    (run / "checkpoints" / "mid.partial").mkdir(parents=True, exist_ok=True)
    assert _resume_step(run).startswith(f" (mid-training will resume from step {step}: ")
    telemetry.event("phase", phase="mid-training", state="end", wall_s=1.0)
    assert _resume_step(run) == "", "it has ended"
    telemetry.close()
