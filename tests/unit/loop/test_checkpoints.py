"""The version of a checkpoint, as its learner state has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.errors import CheckpointError
from etude.loop.checkpoints import checkpoint_version
from etude.records import Version


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
