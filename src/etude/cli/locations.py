"""Finds what a path argument names: a run, its ledger, a checkpoint. Runs are folders under runs/."""

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
    """Open the run at `path`, or with that name under runs/; None opens the newest run. Raises `NoRun`."""
    if path is None:
        return newest_run()
    return RunFolder.open(path if path.exists() or not (RUNS / path).exists() else RUNS / path)


def newest_run() -> RunFolder:
    """Open the newest readable run under runs/, and print newer ones that are not readable on stderr.

    Raises `NoRun` if there is no run, or the error of the newest run if none is readable."""
    errors: list[RunError] = []
    for path in sorted(RUNS.glob("*/run.json"), key=_modified_at, reverse=True):
        try:
            run = RunFolder.open(path.parent)
        except RunError as error:
            errors.append(error)
            continue
        for skipped in errors:
            facts = f": {skipped.facts}" if skipped.facts else ""
            print(f"skipped: {skipped.what}{facts}; using {run.path}", file=sys.stderr)
        return run
    if errors:
        raise errors[0]
    raise NoRun(f"no run in {RUNS}/", hint="give the path of a run, or start one: etude run CONFIG")


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def open_ledger(run: RunFolder) -> Ledger:
    """Open a run's ledger, the database of its rollouts, for reading.

    Raises `RunError` if the file was deleted, `NoLedger` if the run has not created it yet, and `LedgerError` if it is
    damaged."""
    from etude.experience.database import NoLedger
    from etude.loop.locations import read_ledger
    from etude.loop.preflight import check_ledger

    check_ledger(run)
    try:
        return read_ledger(run)
    except NoLedger as error:
        hint = f"it is not running; resume it: etude run --resume {run.path}"
        if run.holder() is not None:
            hint = f"try again later; etude status {run.path} shows the phase of the run"
        raise NoLedger(f"{run.path} has no ledger", f"RL has not started ({error.facts})", hint=hint) from None


def existing_path(path: Path) -> Path:
    """Return the folder of a checkpoint or a run: `path` itself, or that name under runs/.

    Raises `NoCheckpoint` if neither exists."""
    for candidate in (path, RUNS / path):
        if candidate.exists():
            return candidate
    elsewhere = "" if path.is_absolute() or path.parts[:1] == RUNS.parts else f"nor at {RUNS / path}"
    raise NoCheckpoint(f"nothing at {path}", elsewhere, hint="give a checkpoint directory or a run")


def console() -> Console:
    """Return the console for tables: as wide as the terminal, or 200 columns if the output is piped."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=200)
