"""Opens a SQLite database that is written by several processes and leaves no deleted bytes behind."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from etude.errors import PrivacyError
from etude.privacy.subjects import SubjectDigests

FORMAT = 1
"""`PRAGMA user_version` of the databases. 0: written by a version of etude before the number was stored; the same."""
BUSY_S = 10.0
"""Longest wait for another writer, in seconds."""


def connect(path: Path, tables: str) -> sqlite3.Connection:
    """Open or create a database (WAL, synchronous=FULL, secure_delete) with the tables of an SQL script.

    Raises `PrivacyError`, also for a database of another format."""
    with reported(path):
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
                db.execute(f"PRAGMA {pragma}")
            [found] = db.execute("PRAGMA user_version").fetchone()
            if found not in (0, FORMAT):
                facts = f"this version of etude supports format {FORMAT}"
                raise PrivacyError(f"{path} has format {found}", facts, hint="use the etude version that wrote it")
            db.executescript(f"{tables}; PRAGMA user_version = {FORMAT}")
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


def subjects_in(path: Path, table: str, names: SubjectDigests) -> set[str]:
    """Return the digests of an organisation's subjects in a table with the columns `organisation` and `subject`. Raises
    `PrivacyError`."""
    db = connect(path, "")
    try:
        with reported(path):
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
                return set()
            sql = f'SELECT DISTINCT subject FROM "{table}" WHERE organisation = ?'
            return {subject for (subject,) in db.execute(sql, (names.organisation,))}
    finally:
        db.close()


def delete_subject(path: Path, table: str, names: SubjectDigests) -> int:
    """Delete the rows of a subject from a table of another SQLite file, also from its free pages and log, and return
    how many they were; for an organisation those of all its users too.

    The table has the columns `organisation` and `subject`; one that does not exist has no rows. Raises
    `PrivacyError`."""
    db = connect(path, "")
    try:
        with reported(path):
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
                return 0
        column = "organisation" if names.is_organisation else "subject"
        with transaction(db, path):
            number = db.execute(f'DELETE FROM "{table}" WHERE {column} = ?', (names.subject,)).rowcount
        with reported(path):
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return number
    finally:
        db.close()
