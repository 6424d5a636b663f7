"""The version of a checkpoint, as its learner state has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.errors import CheckpointError, RunRefused
from etude.loop.checkpoints import checkpoint_of, checkpoint_version
from etude.records import Version
from etude.run import RunFolder


def test_a_checkpoint_is_of_the_version_that_its_learner_says(tmp_path: Path) -> None:
    assert checkpoint_version(tmp_path) is None
    about = {"format": 1, "step": 6, "version": [6, "0a1b2c3d", "f" * 64], "weights": "bf16"}
    (tmp_path / "learner.json").write_text(json.dumps(about))
    assert checkpoint_version(tmp_path) == Version(6, "0a1b2c3d", "f" * 64)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"version": null}', '{"version": [1, "a"]}', '{"version": "v6"}'])
def test_a_damaged_learner_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "learner.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"learner\.json is damaged"):
        checkpoint_version(tmp_path)


def test_the_version_of_a_run_without_steps_has_the_final_checkpoint(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", config_toml="", seed=1)
    final = run / "checkpoints" / "final"
    final.mkdir(parents=True)
    version = Version(0, "0a1b2c3d", "f" * 64)
    (final / "learner.json").write_text(json.dumps({"format": 1, "step": 0, "version": [0, "99999999", "f" * 64]}))
    assert checkpoint_of(run, version) == final, "another start of the learner had the same weights"
    with pytest.raises(RunRefused, match="no checkpoint of v000001"):
        checkpoint_of(run, Version(1, "0a1b2c3d", "f" * 64))
