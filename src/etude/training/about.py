"""Reads and writes ``learner.json``, the description of a learner's checkpoint beside weights and optimiser state."""

from __future__ import annotations

import json
from pathlib import Path

from etude.errors import CheckpointError
from etude.file_checksums import verify_files
from etude.models.checkpoint import read_json
from etude.records import Version
from etude.training.config import LearnerConfig, OptimizerKind

FORMAT = 1
ABOUT = "learner.json"


def described(config: LearnerConfig, step: int, version: Version | None) -> str:
    """The file's text."""
    about = {
        "format": FORMAT,
        "step": step,
        "version": None if version is None else [version.step, version.incarnation, version.digest],
        "weights": str(config.weights),
        "optimizer": str(config.optimizer),
    }
    return json.dumps(about) + "\n"


def read_about(path: Path, config: LearnerConfig) -> tuple[int, Version | None]:
    """Step and version of a checkpoint that a learner of these settings saved. Raises `CheckpointError`."""
    about = read_json(path)
    step, version = about.get("step"), about.get("version")
    whole = isinstance(version, list) and [type(v) for v in version] == [int, str, str]
    if about.get("format") != FORMAT or not isinstance(step, int) or not (version is None or whole):
        raise CheckpointError(
            f"{path} is damaged",
            f"it holds {about}",
            hint=f"delete {path.parent}: a resumed run goes on from the checkpoint before it",
        )
    for name, wanted in (("weights", config.weights), ("optimizer", config.optimizer)):
        if about.get(name, OptimizerKind.ADAMW) != wanted:
            raise CheckpointError(
                f"{path} is of a learner with {name} = {about.get(name)!r}",
                f"this one has {str(wanted)!r}",
                hint=f"set learner.{name} to the checkpoint's",
            )
    verify_files(path.parent, [path.name], kind=CheckpointError)
    return step, Version(*version) if isinstance(version, list) else None
