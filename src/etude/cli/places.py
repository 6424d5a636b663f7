"""Where a command's RUN argument points: a folder, or the newest one under runs/."""

from __future__ import annotations

from pathlib import Path

from etude.errors import RunError
from etude.run import RunFolder

RUNS = Path("runs")


def open_run(path: Path | None) -> RunFolder:
    """The run that was named, by path or by its name under runs/; the newest when none was. Raises `RunError`."""
    if path is None:
        return newest_run()
    return RunFolder.open(path if path.exists() or not (RUNS / path).exists() else RUNS / path)


def newest_run() -> RunFolder:
    found = sorted(RUNS.glob("*/run.json"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise RunError(f"no run in {RUNS}/", hint="start one: etude run examples/laptop/config.toml")
    return RunFolder.open(found[-1].parent)
