"""The SQLite file of releases: their states, every transition, and the outcomes of subjects.

Each method is one transaction that is on the disk when it returns (`synchronous=FULL`), so a process that is killed, or
a machine that loses power, leaves the state before or after it. An index refuses a second open release in any process.
"""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from etude.errors import EtudeError, StoreError
from etude.sqlite_reading import open_readonly

_BUSY_S = 30.0
_FORMAT = 1
_OPEN = "('candidate', 'gated', 'canary', 'held')"
_TABLES = f"""
CREATE TABLE IF NOT EXISTS releases (
    number INTEGER PRIMARY KEY AUTOINCREMENT, state TEXT NOT NULL, facts BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX IF NOT EXISTS one_open ON releases ((1)) WHERE state IN {_OPEN};
CREATE TABLE IF NOT EXISTS transitions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, number INTEGER NOT NULL REFERENCES releases (number), facts BLOB NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS outcomes (
    number INTEGER NOT NULL REFERENCES releases (number), id TEXT NOT NULL, metric TEXT NOT NULL,
    share INTEGER NOT NULL, arm TEXT NOT NULL, subject BLOB NOT NULL, received REAL NOT NULL, value REAL NOT NULL,
    PRIMARY KEY (number, id, metric)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_subject ON outcomes (number, share, metric, arm, subject, received);
"""


class SecondRelease(EtudeError):
    """Raised when a release is begun while another one is open."""


class ReleaseDatabase:
    """The SQLite file with the releases at `path`. It is created if it does not exist. Use an object in one thread
    only.

    With `readonly` the file must exist, and nothing is written or created. All methods raise `StoreError` for a file
    that cannot be read or written."""

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        self._path = path
        with self._errors():
            if readonly:
                self._connection = open_readonly(path)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
        try:
            with self._errors():
                self._prepare(readonly)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, readonly: bool) -> None:
        if not readonly:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
        [found] = self._connection.execute("PRAGMA user_version").fetchone()
        if found != _FORMAT and (found or readonly):
            raise sqlite3.DatabaseError(f"it has format {found}, and this version of etude supports {_FORMAT}")
        if not found:
            self._connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {_FORMAT}; COMMIT;")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            hint = "free disk space, check its permissions, or restore the file from a copy"
            raise StoreError(
                f"the file of releases {self._path} cannot be read or written", str(error), hint=hint
            ) from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._errors(), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection

    def begin(self, state: str, facts: bytes, transition: bytes) -> int:
        """Store a new release with its first transition, and return its number, from 1.

        `state` is its first state, and `facts` and `transition` are encoded records. Raises `SecondRelease` if another
        release is open, whichever process began it."""
        with self._transaction() as database:
            try:
                cursor = database.execute("INSERT INTO releases (state, facts) VALUES (?, ?)", (state, facts))
            except sqlite3.IntegrityError:
                raise SecondRelease("another release is open", hint="promote it or roll it back first") from None
            database.execute("INSERT INTO transitions (number, facts) VALUES (?, ?)", (cursor.lastrowid, transition))
            return int(cursor.lastrowid or 0)

    def change(self, number: int, before: bytes, state: str, facts: bytes, transition: bytes | None) -> bool:
        """Replace the state and the facts of a release, and append a transition (None: no transition).

        `before`: the facts that the caller read. If the file has other facts now, another process has changed the
        release: then nothing is changed, and False is returned."""
        with self._transaction() as database:
            sql = "UPDATE releases SET state = ?, facts = ? WHERE number = ? AND facts = ?"
            if database.execute(sql, (state, facts, number, before)).rowcount != 1:
                return False
            if transition is not None:
                database.execute("INSERT INTO transitions (number, facts) VALUES (?, ?)", (number, transition))
            return True

    def releases(self) -> list[tuple[int, bytes]]:
        """Return (number, facts) of every release, the oldest first."""
        with self._errors():
            return self._connection.execute("SELECT number, facts FROM releases ORDER BY number").fetchall()

    def transitions(self, number: int) -> list[bytes]:
        """Return the transitions of a release, each as the JSON bytes that were stored, the oldest first."""
        with self._errors():
            sql = "SELECT facts FROM transitions WHERE number = ? ORDER BY id"
            return [facts for (facts,) in self._connection.execute(sql, (number,))]

    def add_outcomes(self, number: int, rows: Iterable[tuple[Any, ...]], cap: int) -> int:
        """Store outcomes of a release, and return how many of them are new.

        A row is (id, metric, share, arm, subject, received, value). It is not stored if its id is stored already, or if
        its subject has `cap` outcomes at this share already."""
        num = 0
        counted = (
            "SELECT count(*) FROM outcomes WHERE number = ? AND share = ? AND metric = ? AND arm = ? AND subject = ?"
        )
        with self._transaction() as database:
            for name, metric, share, arm, subject, received, value in rows:
                [count] = database.execute(counted, (number, share, metric, arm, subject)).fetchone()
                if count < cap:
                    row = (number, name, metric, share, arm, subject, received, value)
                    sql = "INSERT OR IGNORE INTO outcomes VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
                    num += database.execute(sql, row).rowcount
        return num

    def unlink(self, pseudonyms: Iterable[tuple[int, bytes]]) -> int:
        """Give the outcomes of subjects, each a (number of a release, pseudonym), random ids and a random pseudonym.

        Each subject still counts once, and nothing in the file or its log leads to it any more. Returns the number of
        outcomes."""
        num = 0
        with self._errors():
            self._connection.execute("PRAGMA secure_delete = ON")
        with self._transaction() as database:
            for number, subject in pseudonyms:
                sql = "UPDATE outcomes SET subject = ?, id = 'erased-' || hex(randomblob(16))"
                row = (secrets.token_bytes(len(subject)), number, subject)
                num += database.execute(f"{sql} WHERE number = ? AND subject = ?", row).rowcount
        with self._errors():
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return num

    def values(self, number: int, share: int, before: float, window_s: float) -> list[tuple[str, str, float]]:
        """Return (metric, arm, mean) of each subject at a share, in the order of the subjects' first outcomes.

        The mean is over the subject's outcomes within `window_s` seconds of its first one. Subjects whose first outcome
        came after the time `before` are left out."""
        sql = """
            SELECT o.metric, o.arm, avg(o.value) FROM outcomes o JOIN (
                SELECT metric, arm, subject, min(received) AS first FROM outcomes
                WHERE number = ?1 AND share = ?2 GROUP BY metric, arm, subject HAVING first <= ?3
            ) f ON o.metric = f.metric AND o.arm = f.arm AND o.subject = f.subject
            WHERE o.number = ?1 AND o.share = ?2 AND o.received <= f.first + ?4
            GROUP BY o.metric, o.arm, o.subject ORDER BY f.first, o.subject"""
        with self._errors():
            return self._connection.execute(sql, (number, share, before, window_s)).fetchall()

    def last(self, number: int, share: int) -> list[tuple[str, float]]:
        """Return (arm, time) for each version: the time of its last outcome at a share of the canary."""
        sql = "SELECT arm, max(received) FROM outcomes WHERE number = ? AND share = ? GROUP BY arm"
        with self._errors():
            return self._connection.execute(sql, (number, share)).fetchall()
