"""Opens SQLite databases that other processes write, without writing or creating a file."""

from __future__ import annotations

import sqlite3
from pathlib import Path

BUSY_S = 2.0
"""Longest wait for a lock of a writer, in seconds."""


def open_readonly(path: Path) -> sqlite3.Connection:
    """Open a database file for reading. The connection may be used by any thread, one at a time.

    SQLite creates files beside a database in WAL mode that nobody has open. If there is no write-ahead log, the file is
    therefore opened as immutable, and the connection should be closed within a moment: it does not notice a writer that
    begins later. Raises `sqlite3.OperationalError` if the file does not exist."""
    alone = "" if has_log(path) else "&immutable=1"
    uri = f"{path.absolute().as_uri()}?mode=ro{alone}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)


def has_log(path: Path) -> bool:
    """Return whether a database has a write-ahead log with content: somebody has it open, or was killed."""
    try:
        return Path(f"{path}-wal").stat().st_size > 0
    except OSError:
        return False
