"""What a backup costs: a first one, one after it with a little that is new, a check, and a restore.

A store of weights (`--mb` megabytes in `--files` objects), and an SQLite ledger of `--ledger-mb`
megabytes. Between the two backups one more object of 1 MiB is written. Each is a process of its own;
`peak_mb` is its peak memory over that of `etude --version`. Disk caches are warm.

`python -m benchmarks.run.backup`
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import report


def measured(*words: str | Path) -> dict[str, float]:
    """Wall time in seconds, and peak memory in MB, of a command of etude."""
    program = [sys.executable, "-m", "etude.cli", *map(str, words)]
    began = time.monotonic()
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - began
    if status:
        assert process.stderr is not None
        raise SystemExit(f"{words} failed: {process.stderr.read().decode()}")
    return {"wall_s": round(wall_s, 2), "peak_mb": round(used.ru_maxrss * 1024 / 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=2000)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--ledger-mb", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        store, backups = Path(scratch) / "store", Path(scratch) / "backups"
        (store / "objects").mkdir(parents=True)
        (store / "manifests").mkdir()
        size = args.mb * 1_000_000 // args.files
        for number in range(args.files):
            (store / "objects" / f"{number:06d}").write_bytes(os.urandom(size))
        ledger = Path(scratch) / "ledger.sqlite"
        with contextlib.closing(sqlite3.connect(ledger)) as database:
            database.execute("CREATE TABLE blobs (data BLOB)")
            for _ in range(args.ledger_mb):
                database.execute("INSERT INTO blobs VALUES (?)", (os.urandom(1_000_000),))
            database.commit()
        idle = measured("--version")
        steps = {"first": measured("backup", store, ledger, backups)}
        (store / "objects" / "new").write_bytes(os.urandom(1 << 20))
        steps["second"] = measured("backup", store, ledger, backups)
        steps["check"] = measured("restore", backups, "--check")
        steps["restore"] = measured("restore", backups, Path(scratch) / "again")
        for one in steps.values():
            one["peak_mb"] = round(one["peak_mb"] - idle["peak_mb"], 1)
            one["wall_s"] = round(one["wall_s"] - idle["wall_s"], 2)
    report("backup", {"mb": args.mb, "files": args.files, "ledger_mb": args.ledger_mb, **steps})


if __name__ == "__main__":
    main()
