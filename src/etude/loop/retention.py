"""How much of its past a run keeps on disk: whole stretches, the oldest first, until the rest fits a budget.

A stretch is a checkpoint and the traces from it to the next one: what it takes to redo one of those steps, and of no
use in parts. The newest two are kept whatever they take, since a run goes on from the newest checkpoint, or from the
one before when that one is damaged; so is the starting checkpoint. What goes is noted in the ledger before it goes, so
that nobody who misses it later takes it for lost. Knows nothing of what is in the files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from etude.experience import Ledger
from etude.experience.traces import TraceFile, TraceFolder, recorded_steps, trace_path
from etude.run import RunFolder

NOTE, GONE = "kept_from", ".gone"
STRETCHES = 2  # that no budget touches


def oldest_restart_step(run: RunFolder) -> int:
    """The oldest step that a restart may go on from: that of the checkpoint before the newest, which is taken where the
    newest is damaged. 0, the start, where there are fewer."""
    steps = sorted(step for step, _ in steps_in(run / "checkpoints", "step-*"))
    return steps[-STRETCHES] if len(steps) >= STRETCHES else 0


def replayable_after(ledger: Ledger) -> int:
    """The steps after this one can still be redone; what they need of those up to it may be deleted."""
    return int(ledger.recall(NOTE) or 0)


def delete_oldest(run: RunFolder, ledger: Ledger, traces: TraceFolder, *, disk_gb: float) -> int:
    """Delete the oldest stretches until checkpoints and traces fit; traces in a bucket take no disk, and go with the
    rest of their stretch. Returns the bytes that went. Call it when no
    checkpoint is being written; a kill at any moment leaves what the next call deletes."""
    for left in (run / "checkpoints").glob(".*"):  # half deleted, or half written when its learner was killed
        shutil.rmtree(left)
    checkpoints = dict(sorted(steps_in(run / "checkpoints", "step-*")))
    batches = {step: trace_path(traces, step) for step in recorded_steps(traces)}
    sizes = {path: _size(path) for path in (*checkpoints.values(), *batches.values()) if isinstance(path, Path)}
    excess = sum(sizes.values()) - int(disk_gb * 1e9)
    freed = 0
    for step in list(checkpoints)[: 1 - STRETCHES]:  # each ends the stretch before it
        gone: list[TraceFile] = [path for at, path in batches.items() if at <= step]
        gone += [path for at, path in checkpoints.items() if at < step]
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
    """What a folder has of a pattern, with the step that each name ends with."""
    for path in folder.glob(pattern):
        digits = path.name.partition(".")[0].rpartition("-")[2]
        if digits.isdigit():
            yield int(digits), path


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _delete(path: TraceFile) -> None:
    """A directory under another name first: half of a checkpoint is never taken for one."""
    if isinstance(path, Path) and path.is_dir():
        hidden = path.with_name(f".{path.name}{GONE}")
        path.rename(hidden)
        shutil.rmtree(hidden)
    else:
        path.unlink(missing_ok=True)
