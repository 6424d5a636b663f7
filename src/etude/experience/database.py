"""The ledger's SQLite file: its schema, its transactions, and its failures in words.

WAL, so that `status` and `audit` read while the conductor writes. `synchronous=NORMAL`: a killed process loses
nothing, a power cut may lose the last transactions; where that would hurt (before a batch is trained) the caller
asks for `sync`. Transactions nest: an inner one that fails undoes only itself. Knows nothing of what a state means.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.errors import EtudeError, LedgerError, StoreError

FORMAT = 1
BUSY_TIMEOUT_S = 10.0
_HINT_COPY = "restore the run folder from a copy"

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
CREATE INDEX rollouts_by_state ON rollouts (state);
CREATE INDEX rollouts_by_group ON rollouts (group_id);
CREATE INDEX rollouts_by_batch ON rollouts (batch_id);
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
CREATE INDEX transitions_by_rollout ON transitions (rollout_id);
"""


class Database:
    """One connection. `check` runs before each outermost commit and may refuse it by raising."""

    def __init__(self, path: Path, *, readonly: bool = False, check: Callable[[], None] | None = None) -> None:
        self.path, self._check, self._depth, self._sync_due = path, check, 0, False
        try:
            where = f"{path.absolute().as_uri()}?mode={'ro' if readonly else 'rwc'}"
            self._connection = sqlite3.connect(
                where, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except (sqlite3.DatabaseError, OSError) as error:
            raise _in_words(path, error) from error
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
                self._create()
        found = self.value("SELECT value FROM meta WHERE key = 'format'")
        if found != str(FORMAT):
            raise LedgerError(
                f"{self.path} has ledger format {found}",
                f"this etude reads {FORMAT}",
                hint="use the etude version that wrote the run",
            )

    def _create(self) -> None:
        script = f"BEGIN IMMEDIATE; {_SCHEMA} INSERT INTO meta VALUES ('format', '{FORMAT}'); COMMIT;"
        try:
            self._connection.executescript(script)
        except sqlite3.DatabaseError as error:
            raise _in_words(self.path, error) from error

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        """Run one statement. Outside `atomic` it commits by itself."""
        try:
            return self._connection.execute(sql, values)
        except sqlite3.DatabaseError as error:
            raise _in_words(self.path, error) from error

    def each(self, sql: str, values: Iterable[Sequence[Any]]) -> None:
        """Run one statement for every row of values."""
        try:
            self._connection.executemany(sql, values)
        except sqlite3.DatabaseError as error:
            raise _in_words(self.path, error) from error

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise _in_words(self.path, error) from error

    def value(self, sql: str, *values: Any) -> Any:
        """The first column of the first row; None when there is none."""
        rows = self.rows(sql, *values)
        return rows[0][0] if rows else None

    @contextmanager
    def atomic(self, *, sync: bool = False) -> Iterator[None]:
        """All of the block's statements, or none. `sync`: on the disk, not only in the kernel, when it returns."""
        level, self._depth = self._depth, self._depth + 1
        self._sync_due = self._sync_due or sync
        try:
            self.execute(f"SAVEPOINT level{level}" if level else "BEGIN IMMEDIATE")
            try:
                yield
                if not level and self._check:
                    self._check()
                self.execute(f"RELEASE level{level}" if level else "COMMIT")
            except BaseException:
                self._undo(level)
                raise
            if not level and self._sync_due:
                self._sync()
        finally:
            self._depth = level
            self._sync_due = self._sync_due and level > 0

    def _undo(self, level: int) -> None:
        if self._connection.in_transaction:  # a full disk may have rolled back already
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
            raise _in_words(self.path, error) from error

    def prove(self) -> None:
        """Walk the whole file once. Raises `LedgerError` where a page, a row or a constraint is damaged."""
        found = [said for (said,) in self.rows("PRAGMA quick_check(1)")]
        if found != ["ok"]:
            raise LedgerError(f"{self.path} is not a sound ledger", "; ".join(map(str, found)), hint=_HINT_COPY)

    def close(self) -> None:
        """Idempotent. An open transaction is undone."""
        self._connection.close()


def _in_words(path: Path, error: sqlite3.DatabaseError | OSError) -> EtudeError:
    text = str(error)
    if isinstance(error, OSError):
        return StoreError(f"{path} refused", text, hint="look at the disk")
    if not isinstance(error, sqlite3.OperationalError):
        return LedgerError(f"{path} is not a sound ledger", text, hint=_HINT_COPY)
    if "full" in text or "I/O" in text:
        return StoreError(f"{path} cannot be written", text, hint="free disk space, then etude run --resume")
    if "locked" in text:
        return LedgerError(
            f"waited {BUSY_TIMEOUT_S:g} s for the write lock of {path}",
            text,
            hint="another process writes this run: stop it, or wait",
        )
    return LedgerError(f"{path} cannot be used", text, hint="check that the run folder exists and may be written")
