"""Read and write `learner.json`, the metadata of a learner's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from etude.errors import CheckpointError
from etude.file_checksums import verify_files
from etude.models.checkpoint import read_json
from etude.records import Version
from etude.training.config import LearnerConfig, OptimizerKind

FORMAT = 1
METADATA = "learner.json"


def metadata_text(config: LearnerConfig, step: int, version: Version | None) -> str:
    """Return the content of `learner.json`."""
    metadata = {
        "format": FORMAT,
        "step": step,
        "version": None if version is None else [version.step, version.incarnation, version.digest],
        "weights": str(config.weights),
        "optimizer": str(config.optimizer),
    }
    return json.dumps(metadata) + "\n"


def read_metadata(path: Path, config: LearnerConfig) -> tuple[int, Version | None]:
    """Read step and last published version of a learner's checkpoint.

    Raises `CheckpointError` when it is damaged or was saved with another precision or optimiser."""
    metadata = read_json(path)
    step, version = metadata.get("step"), metadata.get("version")
    is_version = isinstance(version, list) and [type(v) for v in version] == [int, str, str]
    if metadata.get("format") != FORMAT or not isinstance(step, int) or not (version is None or is_version):
        raise CheckpointError(
            f"{path} is damaged",
            f"it contains {metadata}",
            hint=f"delete {path.parent}: a resumed run continues from the checkpoint before it",
        )
    for name, expected in (("weights", config.weights), ("optimizer", config.optimizer)):
        if metadata.get(name, OptimizerKind.ADAMW) != expected:
            raise CheckpointError(
                f"{path} was saved with learner.{name} = {metadata.get(name)!r}",
                f"the setting is now {str(expected)!r}",
                hint=f"set learner.{name} to the checkpoint's value",
            )
    verify_files(path.parent, [path.name], kind=CheckpointError)
    return step, Version(*version) if isinstance(version, list) else None
