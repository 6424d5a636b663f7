"""Checkpoints of a run: copying a starting checkpoint into it, and finding the newest one. Loads no torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from etude.errors import CheckpointError, RunRefused
from etude.file_checksums import SUMS, files_in, verify_files, write_sums
from etude.harness import ChatFormat
from etude.models.headers import read_model_config, unused_layers
from etude.records import Version
from etude.run import RunFolder
from etude.telemetry import Telemetry

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def copy_start_checkpoint(
    checkpoint: Path, run: RunFolder, telemetry: Telemetry | None = None, *, name: str = "mid"
) -> None:
    """Copy a Hugging Face directory into a run as its starting checkpoint and tokeniser. Raises `CheckpointError`.

    `name`: the name of the copy in the run's folder `checkpoints`: "mid", from which RL starts, or "start", from which
    mid-training starts.

    Optimiser state from another run is not copied, since this run begins at step 0. If the checkpoint has layers that
    etude does not compute, an event names them."""
    learners, copy = shutil.ignore_patterns("learner.*", SUMS), run / "checkpoints" / name
    for folder in (copy, run / "tokenizer"):
        (folder / SUMS).unlink(missing_ok=True)
    verify_files(checkpoint, [n for n in files_in(checkpoint) if not n.startswith("learner.")], kind=CheckpointError)
    shutil.copytree(checkpoint, copy, dirs_exist_ok=True, ignore=learners)
    write_sums(copy)
    (run / "tokenizer").mkdir(exist_ok=True)
    for file in TOKENIZER_FILES:
        if (checkpoint / file).is_file():
            shutil.copy(checkpoint / file, run / "tokenizer" / file)
    write_sums(run / "tokenizer")
    ChatFormat.load(run / "tokenizer")  # raises when there is no usable chat format
    layers = unused_layers(checkpoint, read_model_config(checkpoint))
    if layers and telemetry is not None:
        telemetry.event("start.left_out", checkpoint=str(checkpoint), layers=layers)


def checkpoint_version(checkpoint: Path) -> Version | None:
    """Read which version of the weights a learner saved as this checkpoint. Raises `CheckpointError`.

    Returns None for a checkpoint that no learner wrote, which counts as step 0."""
    path = checkpoint / "learner.json"
    if not path.is_file():
        return None
    verify_files(checkpoint, [path.name], kind=CheckpointError)
    try:
        step, incarnation, digest = json.loads(path.read_bytes())["version"]
        return Version(int(step), str(incarnation), str(digest))
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "evaluate another checkpoint of the run"
        raise CheckpointError(f"{path} is damaged", f"it has no version ({error!r})", hint=hint) from None


def newest_checkpoint(run: RunFolder) -> Path:
    """Return the path of the run's final checkpoint, or of the newest one if the run has not ended."""
    final = run / "checkpoints" / "final"
    steps = sorted((run / "checkpoints").glob("step-*"))
    return final if final.is_dir() else steps[-1] if steps else run / "checkpoints" / "mid"


def checkpoint_of(run: RunFolder, version: Version) -> Path:
    """Return the checkpoint with the weights of a version, and the state of the optimiser after it.

    It may be from another start of the learner, if that had the same weights at this step. Raises `RunRefused` if
    the run has no such checkpoint any more, and `CheckpointError` if it is damaged."""
    paths = [run / "checkpoints" / name for name in (f"step-{version.step:06d}", "final")]  # final: also of no step
    found = {path: checkpoint_version(path) for path in paths}
    for path, one in found.items():
        if one is not None and (one.step, one.digest) == (version.step, version.digest):
            return path
    raise RunRefused(
        f"{run.path} has no checkpoint of {version}",
        "; ".join(f"{path} is of {one}" if one else f"{path} does not exist" for path, one in found.items()),
        hint=f"deploy a version whose step has a checkpoint: etude weights point {run.path} STEP --branch stable",
    )
