"""Opens a SQLite database that is written by several processes and leaves no deleted bytes behind."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from etude.errors import PrivacyError

BUSY_S = 10.0
"""Longest wait for another writer, in seconds."""


def connect(path: Path, tables: str) -> sqlite3.Connection:
    """Open or create a database (WAL, synchronous=FULL, secure_delete) with the tables of an SQL script.

    Raises `PrivacyError`."""
    with reported(path):
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
                db.execute(f"PRAGMA {pragma}")
            db.executescript(tables)
        except BaseException:
            db.close()
            raise
        return db


@contextlib.contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and of the disk in a `with` block into `PrivacyError`. `path` is named in the error."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        hint = "check the disk and its free space; a damaged file must be restored from a backup"
        raise PrivacyError(f"{path} cannot be used", str(error), hint=hint) from None


@contextlib.contextmanager
def transaction(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Run a `with` block in one write transaction: afterwards, either all its changes are durable or none is.

    Raises `PrivacyError` if the file cannot be written."""
    with reported(path):
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
