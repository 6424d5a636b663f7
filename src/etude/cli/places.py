"""Where a command's RUN argument points: a folder, or the newest one under runs/."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from etude.errors import NoCheckpoint, NoRun, RunError
from etude.run import RunFolder

if TYPE_CHECKING:
    from etude.experience import Ledger

RUNS = Path("runs")


def open_run(path: Path | None) -> RunFolder:
    """Open the run at `path`, or of that name under runs/; the newest run when `path` is None. Raises `NoRun`."""
    if path is None:
        return newest_run()
    return RunFolder.open(path if path.exists() or not (RUNS / path).exists() else RUNS / path)


def open_ledger(run: RunFolder) -> Ledger:
    """Open a run's ledger for reading. Raises `RunError` where the file was deleted, `NoLedger` where the run has not
    created it yet, `LedgerError` where it is damaged."""
    from etude.experience.database import NoLedger
    from etude.loop.locations import read_ledger
    from etude.loop.preflight import check_ledger

    check_ledger(run)
    try:
        return read_ledger(run)
    except NoLedger as error:
        hint = f"ask again once it has: etude status {run.path} says where it is"
        raise NoLedger(f"{run.path} has no ledger", f"it has not begun RL ({error.facts})", hint=hint) from None


def existing(path: Path) -> Path:
    """The folder of a checkpoint or a run: `path` itself, or that name under runs/. Raises `NoCheckpoint` when neither
    exists."""
    for place in (path, RUNS / path):
        if place.exists():
            return place
    elsewhere = "" if path.is_absolute() or path.parts[:1] == RUNS.parts else f"nor at {RUNS / path}"
    raise NoCheckpoint(f"nothing at {path}", elsewhere, hint="give a checkpoint directory or a run")


def console() -> Console:
    """The console that tables are printed to: as wide as the terminal, or wide enough for any row when piped."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=200)


def newest_run() -> RunFolder:
    """Open the newest run that can be read; newer ones that cannot be read are named on stderr. Raises `NoRun` where
    there is no run, or the error of the newest run where none can be read."""
    wrong: list[RunError] = []
    for path in sorted(RUNS.glob("*/run.json"), key=_written, reverse=True):
        try:
            run = RunFolder.open(path.parent)
        except RunError as error:
            wrong.append(error)
            continue
        for one in wrong:
            print(f"passed over: {one.what}{': ' if one.facts else ''}{one.facts}; taking {run.path}", file=sys.stderr)
        return run
    if wrong:
        raise wrong[0]
    raise NoRun(f"no run in {RUNS}/", hint="start one: etude run examples/laptop/config.toml")


def _written(path: Path) -> float:
    """When a file was written; 0.0 for one that is gone meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
