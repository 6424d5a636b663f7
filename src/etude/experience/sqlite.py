"""The ledger's SQLite file: schema, transactions, and mapping of errors.

It is in WAL mode, so that `status` and `audit` can read while the conductor writes. With `synchronous=NORMAL` a killed
process loses nothing, but a power failure may lose the last transactions; where that would matter (before a batch is
trained) the caller requests `sync`. There is one writer at a time: the process that has locked the run folder. Each row
has a CRC (`sqlite_integrity`). This module knows nothing of the meaning of states."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from etude.errors import EtudeError, LedgerError, StoreError
from etude.experience.database import FORMAT, INDEXES, NoLedger, check_format
from etude.experience.sqlite_integrity import has_sums, keep_sums, lost_frames, wrong_rows
from etude.sqlite_reading import has_log

BUSY_TIMEOUT_S = 10.0
_HINT_COPY = "restore the run folder from a copy"
T = TypeVar("T")

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE rollouts (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout_id TEXT NOT NULL UNIQUE,
    group_id TEXT NOT NULL,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    reward REAL,
    boundary TEXT,
    batch_id TEXT,
    step INTEGER,
    has_sample INTEGER,
    version TEXT
) STRICT;
CREATE TABLE slots (slot INTEGER PRIMARY KEY, rollout_id TEXT UNIQUE REFERENCES rollouts (rollout_id)) STRICT;
CREATE TABLE blobs (
    rollout_id TEXT NOT NULL REFERENCES rollouts (rollout_id),
    name TEXT NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (rollout_id, name)
) STRICT;
CREATE TABLE transitions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    t REAL NOT NULL,
    rollout_id TEXT NOT NULL REFERENCES rollouts (rollout_id),
    origin TEXT,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    reason TEXT NOT NULL,
    facts TEXT NOT NULL
) STRICT;
"""


class SqliteDatabase:
    """A ledger's `Database` in one SQLite file. `check` runs before each outermost commit.

    `immutable`: promises that nothing writes the file meanwhile, so that no files are created beside it."""

    def __init__(
        self, path: Path, *, readonly: bool = False, immutable: bool = False, check: Callable[[], None] | None = None
    ) -> None:
        self.path, self._check, self._depth, self._sync_due = path, check, 0, False
        if readonly and not path.exists():
            raise NoLedger(
                f"{path} cannot be opened", "the file does not exist", hint="a run creates it when RL begins"
            )
        try:
            mode = "ro" if readonly else "rwc"
            alone = "&immutable=1" if readonly and immutable and not has_log(path) else ""
            where = f"{path.absolute().as_uri()}?mode={mode}{alone}"
            self._connection = sqlite3.connect(
                where, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except (sqlite3.DatabaseError, OSError) as error:
            raise _map_error(path, error) from error
        try:
            self._prepare(readonly)
        except EtudeError:
            self._connection.close()
            raise

    def _prepare(self, readonly: bool) -> None:
        self.execute("PRAGMA foreign_keys=ON")
        if not readonly:
            self.execute("PRAGMA journal_mode=WAL")
            self.execute("PRAGMA synchronous=NORMAL")
            if not self.rows("SELECT 1 FROM sqlite_master WHERE name = 'meta'"):
                self._script(f"BEGIN IMMEDIATE; {_SCHEMA} INSERT INTO meta VALUES ('format', '{FORMAT}'); COMMIT;")
        found = self.rows("SELECT value FROM meta WHERE key = 'format'")
        check_format(self.path, found[0][0] if found else None, readonly=readonly)
        if not readonly:
            for sql in INDEXES:
                self.execute(sql)
            try:
                keep_sums(self._connection)
            except sqlite3.DatabaseError as error:
                raise _map_error(self.path, error) from error

    def _script(self, sql: str) -> None:
        try:
            self._connection.executescript(sql)
        except sqlite3.DatabaseError as error:
            raise _map_error(self.path, error) from error

    def execute(self, sql: str, *values: Any) -> None:
        try:
            self._connection.execute(sql, values)
        except sqlite3.DatabaseError as error:
            raise _map_error(self.path, error) from error

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise _map_error(self.path, error) from error

    def transact(self, work: Callable[[], T], *, sync: bool = False) -> T:
        level, self._depth = self._depth, self._depth + 1
        self._sync_due = self._sync_due or sync
        try:
            self.execute(f"SAVEPOINT level{level}" if level else "BEGIN IMMEDIATE")
            try:
                result = work()
                if not level and self._check:
                    self._check()
                self.execute(f"RELEASE level{level}" if level else "COMMIT")
            except BaseException:
                self._undo(level)
                raise
            if not level and self._sync_due:
                self._sync()
            return result
        finally:
            self._depth = level
            self._sync_due = self._sync_due and level > 0

    def _undo(self, level: int) -> None:
        if self._connection.in_transaction:  # a full disk may already have rolled it back
            self._connection.execute(f"ROLLBACK TO level{level}" if level else "ROLLBACK")
            if level:
                self._connection.execute(f"RELEASE level{level}")

    def _sync(self) -> None:
        try:
            file = os.open(f"{self.path}-wal", os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise _map_error(self.path, error) from error

    def verify(self) -> None:
        """Read the whole file once; takes about a second for a few hundred MB.

        Raises `LedgerError` for a damaged page, index, constraint or value, or a damaged part of the write-ahead log.
        """
        damaged = lost_frames(self.path)
        found = [damaged] if damaged else []
        try:
            self.execute("BEGIN")
            found += [line for (line,) in self.rows("PRAGMA integrity_check(1)") if line != "ok"]
            if not found and has_sums(self._connection):
                found += islice(wrong_rows(self._connection), 3)
        except sqlite3.DatabaseError as error:
            raise _map_error(self.path, error) from error
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        if found:
            raise LedgerError(f"{self.path} is not a valid ledger", "; ".join(map(str, found)), hint=_HINT_COPY)

    def close(self) -> None:
        self._connection.close()


def _map_error(path: Path, error: sqlite3.DatabaseError | OSError) -> EtudeError:
    text = str(error)
    if isinstance(error, OSError):
        return StoreError(f"{path} cannot be accessed", text, hint="check the disk")
    if not isinstance(error, sqlite3.OperationalError):
        return LedgerError(f"{path} is not a valid ledger", text, hint=_HINT_COPY)
    if "full" in text or "I/O" in text:
        return StoreError(f"{path} cannot be written", text, hint="free disk space, then etude run --resume")
    if "locked" in text:
        return LedgerError(
            f"waited {BUSY_TIMEOUT_S:g} s for the write lock of {path}",
            text,
            hint="another process writes this run: stop it, or wait",
        )
    return LedgerError(f"{path} cannot be used", text, hint="check that the run folder exists and may be written")
