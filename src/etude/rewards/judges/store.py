"""Stores verdicts of judges, what they have cost, and when a judge may be asked again, in an SQLite file.

All processes that use a judge share the file. It has about `MAX_VERDICTS` verdicts at most; those that were
used longest ago are deleted. Each verdict has a checksum. If it is wrong, the judge is asked again."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from etude.errors import StoreError

MAX_VERDICTS = 200_000
_COUNTED = 64  # verdicts are counted, and too many deleted, after so many new ones
_BUSY_S = 30.0
_FORMAT = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS verdicts (
    key BLOB PRIMARY KEY, verdict TEXT NOT NULL, reason TEXT NOT NULL, model TEXT NOT NULL, used REAL NOT NULL,
    sum BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON verdicts (used);
CREATE TABLE IF NOT EXISTS judges (
    judge TEXT PRIMARY KEY, model TEXT NOT NULL DEFAULT '', dollars REAL NOT NULL DEFAULT 0.0,
    unpriced INTEGER NOT NULL DEFAULT 0, calls INTEGER NOT NULL DEFAULT 0, cached INTEGER NOT NULL DEFAULT 0,
    unknown INTEGER NOT NULL DEFAULT 0, next_at REAL NOT NULL DEFAULT 0.0, last_unknown TEXT NOT NULL DEFAULT '',
    reserved REAL NOT NULL DEFAULT 0.0
);
CREATE TABLE IF NOT EXISTS secret (bytes BLOB NOT NULL);
"""


@dataclass(frozen=True)
class Stored:
    """A stored verdict: its JSON value as text, the reason, and the model that gave it."""

    verdict: str
    reason: str
    model: str


@dataclass(frozen=True)
class Account:
    """The calls and costs of one judge so far.

    `dollars`: spent or reserved. `reserved`: the part of them that is only reserved: for calls in flight, and for calls
    whose cost is unknown. `unpriced`: number of calls whose cost is unknown, since a price is missing, the server did
    not count the tokens, or a call that may cost money had no complete answer. `calls`, `cached`: numbers of verdicts
    from a call and from the store. `unknown`: number of questions without a verdict; `last_unknown`: the reason of the
    last one. `model`: the name that the server gave the model in its first answer."""

    judge: str
    model: str
    dollars: float
    reserved: float
    unpriced: int
    calls: int
    cached: int
    unknown: int
    last_unknown: str


class JudgeStore:
    """The verdicts and accounts of judges in the file at `path`, which is created if it does not exist.

    Its methods may be called from any thread. They raise `StoreError` for a file that cannot be read or written."""

    def __init__(self, path: Path, *, max_verdicts: int = MAX_VERDICTS) -> None:
        self.path, self.max_verdicts = path, max_verdicts
        self._lock, self._num_put = threading.Lock(), 0
        self._database: sqlite3.Connection | None = None

    def close(self) -> None:
        """Close the file. The next call opens it again."""
        with self._lock:
            database, self._database = self._database, None
            if database is not None:
                database.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                if self._database is None:
                    self._database = self._opened()
                with self._database:
                    self._database.execute("BEGIN IMMEDIATE")
                    yield self._database
            except (sqlite3.Error, OSError) as error:
                facts = f"{type(error).__name__}: {error}"
                hint = "free disk space; or delete the file: judges are then asked again, and recorded costs are lost"
                raise StoreError(f"the verdicts in {self.path} cannot be used", facts, hint=hint) from error

    def _opened(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            [found] = database.execute("PRAGMA user_version").fetchone()
            if found not in (0, _FORMAT):
                raise sqlite3.DatabaseError(f"it has format {found}, and this version of etude supports {_FORMAT}")
            database.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {_FORMAT};")
            if "reserved" not in {row[1] for row in database.execute("PRAGMA table_info(judges)")}:  # an older file
                database.execute("ALTER TABLE judges ADD COLUMN reserved REAL NOT NULL DEFAULT 0.0")
            database.execute("COMMIT")
        except BaseException:
            database.close()
            raise
        return database

    def secret(self) -> bytes:
        """Return the 16 random bytes of this file, the same in all processes."""
        with self._transaction() as database:
            found = database.execute("SELECT bytes FROM secret").fetchone()
            if found is None:
                found = (secrets.token_bytes(16),)
                database.execute("INSERT INTO secret VALUES (?)", found)
            return bytes(found[0])

    def identity(self) -> str:
        """Return 16 hex digits that identify this file among those of all hosts: a digest of its secret."""
        return hashlib.blake2b(self.secret(), digest_size=8).hexdigest()

    # verdicts

    def get(self, judge: str, key: bytes) -> Stored | None:
        """Return a stored verdict that may be compared with the other verdicts of `judge`; None if there is none.

        The same model must have given it that answered this judge first (`served`); if nothing has, it is the model of
        the stored verdict. A verdict that is returned is counted as `cached` in the account of `judge`."""
        with self._transaction() as database:
            row = database.execute("SELECT verdict, reason, model, sum FROM verdicts WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            if row[3] != _sum(key, *row[:3]):
                database.execute("DELETE FROM verdicts WHERE key = ?", (key,))
                return None
            if row[2] and self._first(database, judge, row[2]) != row[2]:
                return None
            database.execute("UPDATE verdicts SET used = ? WHERE key = ?", (time.time(), key))
            self._account(database, judge)
            database.execute("UPDATE judges SET cached = cached + 1 WHERE judge = ?", (judge,))
            return Stored(*row[:3])

    def put(self, key: bytes, found: Stored) -> None:
        """Store a verdict under the key of its question."""
        row = (found.verdict, found.reason, found.model)
        with self._transaction() as database:
            values = (key, *row, time.time(), _sum(key, *row))
            database.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?, ?)", values)
            self._num_put += 1
            if self._num_put % _COUNTED == 0:
                [count] = database.execute("SELECT count(*) FROM verdicts").fetchone()
                oldest = "SELECT key FROM verdicts ORDER BY used LIMIT ?"
                database.execute(f"DELETE FROM verdicts WHERE key IN ({oldest})", (max(0, count - self.max_verdicts),))

    # money and pace

    def reserve(self, judge: str, dollars: float, budget: float) -> float | None:
        """Reserve `dollars` for one call, and return None.

        If that would exceed the budget, reserves nothing, and returns the dollars that are left of the budget."""
        with self._transaction() as database:
            self._account(database, judge)
            change = "UPDATE judges SET dollars = dollars + ?, reserved = reserved + ?"
            change += " WHERE judge = ? AND dollars + ? <= ?"
            if database.execute(change, (dollars, dollars, judge, dollars, budget)).rowcount == 1:
                return None
            [spent] = database.execute("SELECT dollars FROM judges WHERE judge = ?", (judge,)).fetchone()
            return max(0.0, budget - float(spent))

    def settle(self, judge: str, reserved: float, spent: float | None) -> None:
        """Replace the reservation of a call by the dollars that it cost.

        `spent` None: the cost is unknown, so the dollars stay reserved."""
        known = (0.0, 0.0, 1) if spent is None else (spent - reserved, reserved, 0)
        with self._transaction() as database:
            self._account(database, judge)
            change = "UPDATE judges SET dollars = max(0.0, dollars + ?), reserved = max(0.0, reserved - ?)"
            change += ", unpriced = unpriced + ? WHERE judge = ?"
            database.execute(change, (*known, judge))

    def turn(self, judge: str, per_minute: int, most_s: float) -> float | None:
        """Reserve the next time at which a call may start at a rate of `per_minute`, and return the seconds until then.

        Returns None, and reserves nothing, if that is more than `most_s` seconds away."""
        with self._transaction() as database:
            self._account(database, judge)
            now = time.time()
            [at] = database.execute("SELECT next_at FROM judges WHERE judge = ?", (judge,)).fetchone()
            at = max(at, now) if at <= now + 3600.0 else now  # a clock that was set back blocks nothing
            if at - now > most_s:
                return None
            database.execute("UPDATE judges SET next_at = ? WHERE judge = ?", (at + 60.0 / per_minute, judge))
            return float(at - now)

    def count(self, judge: str, unknown: str = "") -> None:
        """Add one question to the counts in the account of a judge. `unknown`: why it has no verdict; "" if it has
        one."""
        with self._transaction() as database:
            self._account(database, judge)
            if unknown:
                change = "UPDATE judges SET unknown = unknown + 1, last_unknown = ? WHERE judge = ?"
                database.execute(change, (unknown, judge))
            else:
                database.execute("UPDATE judges SET calls = calls + 1 WHERE judge = ?", (judge,))

    def served(self, judge: str, model: str) -> str:
        """Return the model name in the server's first answer to this judge. If there was no answer before, `model` is
        stored and returned."""
        with self._transaction() as database:
            return self._first(database, judge, model)

    def accounts(self) -> list[Account]:
        """Return the accounts of all judges that used the file."""
        fields = "judge, model, dollars, reserved, unpriced, calls, cached, unknown, last_unknown"
        with self._transaction() as database:
            return [Account(*row) for row in database.execute(f"SELECT {fields} FROM judges ORDER BY judge")]

    @classmethod
    def _first(cls, database: sqlite3.Connection, judge: str, model: str) -> str:
        cls._account(database, judge)
        database.execute("UPDATE judges SET model = ? WHERE judge = ? AND model = ''", (model, judge))
        return str(database.execute("SELECT model FROM judges WHERE judge = ?", (judge,)).fetchone()[0])

    @staticmethod
    def _account(database: sqlite3.Connection, judge: str) -> None:
        database.execute("INSERT OR IGNORE INTO judges (judge) VALUES (?)", (judge,))


def _sum(key: bytes, *words: str) -> bytes:
    return hashlib.blake2b(repr((key, words)).encode(), digest_size=8).digest()
