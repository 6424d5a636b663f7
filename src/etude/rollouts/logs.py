"""The logs of agent programs: one file for each attempt at a rollout, in one folder of the run.

At most `MOST_LOGS` are kept."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from urllib.parse import quote

FOLDER = "harness"
"""The folder of the logs in a run folder."""
MOST_LOGS = 4096


def write_log(folder: Path, rollout_id: str, attempt: int, data: bytes) -> None:
    """Write the log of one attempt at a rollout.

    If the folder then has more than `MOST_LOGS` logs, the oldest ones are deleted until 3/4 of `MOST_LOGS` are left. No
    `OSError` is raised: for example, if the disk is full, the log is lost."""
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        path = folder / f"{quote(rollout_id, safe='')}.{attempt}.log"
        path.write_bytes(data)
        names = os.listdir(folder)
        if len(names) > MOST_LOGS:
            ages = sorted((path.stat().st_mtime, path) for path in map(folder.joinpath, names))
            for _, old in ages[: len(ages) - MOST_LOGS * 3 // 4]:
                old.unlink()


def read_logs(folder: Path, rollout_id: str) -> list[tuple[int, str]]:
    """Return the kept logs of a rollout as (attempt, text), the first attempt first."""
    found = []
    for path in folder.glob(f"{quote(rollout_id, safe='')}.*.log"):
        attempt = path.name.split(".")[-2]
        if attempt.isdigit() and path.name == f"{quote(rollout_id, safe='')}.{attempt}.log":
            found.append((int(attempt), path.read_text(errors="replace")))
    return sorted(found)
