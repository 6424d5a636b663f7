"""Locations of mid-training's checkpoints, beside its output directory. Torch-free."""

from __future__ import annotations

from pathlib import Path

_STEP = "step-"


def progress_folder(out: Path) -> Path:
    """Return the directory of the checkpoints of a mid-training with the output directory `out`."""
    return out.with_name(out.name + ".partial")


def checkpoint_path(out: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return progress_folder(out) / f"{_STEP}{step:06d}"


def newest_checkpoint(out: Path) -> Path | None:
    """Return the checkpoint to resume from; None where there is no checkpoint."""
    return max(progress_folder(out).glob(f"{_STEP}*"), default=None)


def resume_step(out: Path) -> int:
    """Return the step to resume from; 0 where there is no checkpoint.

    >>> resume_step(Path("nowhere"))
    0
    """
    newest = newest_checkpoint(out)
    return 0 if newest is None else int(newest.name.removeprefix(_STEP))
