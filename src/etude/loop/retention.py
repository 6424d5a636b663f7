"""Deletes a run's oldest checkpoints and traces to stay within a disk budget.

They are deleted in stretches, the oldest first. A stretch is a checkpoint with the traces (recorded batches) up to the
next checkpoint: what is needed to replay these steps. The newest two stretches are always kept, since a run continues
from the newest checkpoint, or from the previous one when it is damaged. The starting checkpoint is kept, too. Deletions
are recorded in the ledger first, so that files that are missing later are not taken for lost."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from etude.errors import RunRefused
from etude.experience import Ledger
from etude.experience.traces import TraceFile, TraceFolder, recorded_steps, trace_path
from etude.run import RunFolder

NOTE, GONE = "kept_from", ".gone"
STRETCHES = 2  # number of stretches that are always kept


def oldest_restart_step(run: RunFolder) -> int:
    """Return the oldest step from which a restart may continue: the step of the second newest checkpoint.

    A restart uses that checkpoint when the newest one is damaged. With fewer than two checkpoints the step is 0."""
    steps = sorted(step for step, _ in steps_in(run / "checkpoints", "step-*"))
    return steps[-STRETCHES] if len(steps) >= STRETCHES else 0


def replayable_after(ledger: Ledger) -> int:
    """Return the step after which all steps can be replayed. Files of earlier steps may have been deleted."""
    return int(ledger.recall(NOTE) or 0)


def delete_oldest(
    run: RunFolder, ledger: Ledger, traces: TraceFolder, *, disk_gb: float, keep: Collection[int] = ()
) -> int:
    """Delete the oldest checkpoints and traces until the rest fits into `disk_gb`. Returns the number of bytes deleted.

    `keep`: the steps of checkpoints that are not deleted. A trace is the recorded batch of a step. Traces in a bucket
    use no disk, and are deleted with the checkpoint before them. Call it when no checkpoint is being written. A kill at
    any moment leaves only files that the next call deletes."""
    for left in (run / "checkpoints").glob(".*"):  # partly deleted, or partly written by a killed learner
        shutil.rmtree(left)
    checkpoints = dict(sorted(steps_in(run / "checkpoints", "step-*")))
    batches = {step: trace_path(traces, step) for step in recorded_steps(traces)}
    sizes = {path: _size(path) for path in (*checkpoints.values(), *batches.values()) if isinstance(path, Path)}
    excess = sum(sizes.values()) - int(disk_gb * 1e9)
    freed = 0
    for step in list(checkpoints)[: 1 - STRETCHES]:  # each ends the previous stretch
        gone: list[TraceFile] = [path for at, path in batches.items() if at <= step]
        gone += [path for at, path in checkpoints.items() if at < step and at not in keep]
        if step > replayable_after(ledger):
            if freed >= excess:
                break
            ledger.transaction(lambda step=step: ledger.remember(NOTE, step))  # type: ignore[misc]
        for path in gone:
            if isinstance(path, Path):
                freed += sizes.pop(path, 0)
            _delete(path)
    return freed


def steps_in(folder: Path, pattern: str) -> Iterator[tuple[int, Path]]:
    """Yield the step number and path of each file of a folder that matches a pattern, such as "step-*"."""
    for path in folder.glob(pattern):
        digits = path.name.partition(".")[0].rpartition("-")[2]
        if digits.isdigit():
            yield int(digits), path


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def go_back(run: RunFolder, step: int, *, not_before: int) -> list[int]:
    """Delete the checkpoints of steps after `step`, so that the run continues from there. Returns their steps.

    `not_before`: the step with which RL ended. Raises `RunRefused` if a checkpoint of that step or an earlier one would
    be deleted. If the process is killed meanwhile, the run continues from one of its checkpoints; call this again."""
    later = sorted((at, path) for at, path in steps_in(run / "checkpoints", "step-*") if at > step)
    if later and later[0][0] <= not_before:
        raise RunRefused(
            f"{run.path} cannot go back to step {step}",
            f"that would delete the checkpoint of step {later[0][0]}, which is not after the end of RL ({not_before})",
            hint=f"deploy a version from the end of RL on: etude weights point {run.path} {not_before} --branch stable",
        )
    for _, path in reversed(later):
        _delete(path)
    return [at for at, _ in later]


def _delete(path: TraceFile) -> None:
    """Delete a file or directory. A directory is renamed first, so that a partly deleted checkpoint is never used."""
    if isinstance(path, Path) and path.is_dir():
        hidden = path.with_name(f".{path.name}{GONE}")
        path.rename(hidden)
        shutil.rmtree(hidden)
    else:
        path.unlink(missing_ok=True)
