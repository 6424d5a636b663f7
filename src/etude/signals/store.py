"""Signals in a SQLite file, each of which is stored once. Names of organisations and users are in it as keyed digests.

Every change is one transaction, on the disk when its method returns."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from etude.errors import PrivacyError
from etude.privacy import Level
from etude.privacy.database import BUSY_S, connect, delete_subject, reported, transaction
from etude.privacy.subjects import SubjectDigests
from etude.signals.versions import KEPT, Observation
from etude.sqlite_reading import open_readonly

FORMAT = 1
TABLE = "signals"
DAY_S = 86_400.0
_PAGE = 1000
_TABLES = f"""
CREATE TABLE IF NOT EXISTS {TABLE} (
    number INTEGER PRIMARY KEY AUTOINCREMENT, subject TEXT NOT NULL, id TEXT NOT NULL, organisation TEXT NOT NULL,
    response_id TEXT NOT NULL, answer INTEGER NOT NULL, name TEXT NOT NULL, value REAL NOT NULL, at REAL NOT NULL,
    clamped INTEGER NOT NULL, received REAL NOT NULL, began REAL NOT NULL, model TEXT NOT NULL, level INTEGER,
    content BLOB NOT NULL, UNIQUE (subject, id)) STRICT;
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS signals_by_response ON {TABLE} (response_id);
CREATE INDEX IF NOT EXISTS signals_by_day ON {TABLE} (subject, name, began);
CREATE INDEX IF NOT EXISTS signals_by_time ON {TABLE} (began);
CREATE INDEX IF NOT EXISTS signals_by_organisation ON {TABLE} (organisation);
CREATE TABLE IF NOT EXISTS versions (
    model TEXT NOT NULL, began REAL NOT NULL, name TEXT NOT NULL, version TEXT NOT NULL,
    PRIMARY KEY (model, began)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS erasures (organisation TEXT NOT NULL, subject TEXT NOT NULL, at REAL NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS erasures_by_subject ON erasures (subject, at);
"""
_STORED = "subject, id, organisation, response_id, answer, name, value, at, clamped, received, began, model, level"
_VERSION = """(SELECT {column} FROM versions v WHERE v.model = s.model AND v.began <= s.began
    ORDER BY v.began DESC LIMIT 1)"""
_SUMMARIES = f"""
    WITH told AS (SELECT s.*, coalesce({_VERSION.format(column="version")}, '') AS version FROM {TABLE} s),
    by_subject AS (SELECT name, version, subject, avg(value) AS mean FROM told GROUP BY 1, 2, 3)
    SELECT t.name, t.version, count(*), count(DISTINCT t.response_id || ' ' || t.answer),
        count(DISTINCT t.subject), (SELECT avg(b.mean) FROM by_subject b
            WHERE b.name = t.name AND b.version = t.version)
    FROM told t GROUP BY 1, 2 ORDER BY 1, 2"""


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """A stored signal.

    - `id`: a keyed digest of subject and sent id, 32 hex characters. `organisation`, `subject`: as `SubjectDigests`.
    - `response_id`, `answer`: which answer it is about, as those of `Captured`.
    - `name`, `value`: what happened and how much, in [0, 1].
    - `at`: when it happened by its sender, but not before its answer was begun and not after it was received.
      `clamped`: whether the sender's time was outside of that. `received`: when it was received. Unix times in s.
    - `began`: when its answer was begun. `model`: the name of the served model; "" if it is not known.
    - `version`: of the weights that answered; "" if it is not known. See `Observations`.
    - `level`: the consent level that it was stored under; None without a privacy folder."""

    subject: str
    id: str
    organisation: str
    response_id: str
    answer: int
    name: str
    value: float
    at: float
    clamped: bool
    received: float
    began: float
    model: str
    level: Level | None
    version: str = ""


class Summary(NamedTuple):
    """The signals of one name about answers of one version: numbers of signals, answers and subjects, and the mean
    value over subjects, each of which counts by its own mean."""

    name: str
    version: str
    signals: int
    answers: int
    subjects: int
    mean: float


class SignalStore:
    """The signals of use, stored in the SQLite file at `path`, which is created if it does not exist.

    All methods raise `PrivacyError` if the file cannot be used, or if it is not a file of signals."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _refuse_other(path)
        self._db = connect(path, _TABLES)
        try:
            found = self.set_once("format", str(FORMAT))
            if found != str(FORMAT):
                hint = "use the version of etude that wrote it"
                raise PrivacyError(f"{path} has format {found}", f"this version supports {FORMAT}", hint=hint)
        except BaseException:
            self._db.close()
            raise

    def set_once(self, name: str, value: str) -> str:
        """Store `value` as the metadata `name` of the file, unless there is such a value. Return the stored value."""
        found = self.get(name)
        if found is None:
            with reported(self.path):
                self._db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (name, value))
            found = self.get(name)
        assert found is not None, "it was just stored"
        return found

    def set(self, name: str, value: str) -> None:
        """Store `value` as the metadata `name` of the file. It replaces the earlier value, if there is one."""
        with reported(self.path):
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def get(self, name: str) -> str | None:
        """Return the metadata `name` of the file; None if there is no such value."""
        with reported(self.path):
            row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def content(self, subject: str, signal_id: str) -> bytes | None:
        """Return the digest of a stored signal's content; None if there is no such signal."""
        with reported(self.path):
            sql = f"SELECT content FROM {TABLE} WHERE subject = ? AND id = ?"
            row = self._db.execute(sql, (subject, signal_id)).fetchone()
        return None if row is None else row[0]

    def num_of_day(self, subject: str, name: str, day: int) -> int:
        """Return how many signals of a name a subject has about answers that were begun on a day since 1970 (UTC)."""
        with reported(self.path):
            sql = f"SELECT count(*) FROM {TABLE} WHERE subject = ? AND name = ? AND began >= ? AND began < ?"
            row = self._db.execute(sql, (subject, name, day * DAY_S, (day + 1) * DAY_S)).fetchone()
        return int(row[0])

    def erased_since(self, names: SubjectDigests, at: float) -> bool:
        """Return whether `erase` erased a subject, or its organisation, at or after a Unix time."""
        with reported(self.path):
            sql = "SELECT 1 FROM erasures WHERE subject IN (?, ?) AND at >= ?"
            return self._db.execute(sql, (*names, at)).fetchone() is not None

    def transaction(self) -> AbstractContextManager[None]:
        """Return a context in which all that is read and added is one transaction."""
        return transaction(self._db, self.path)

    def add(self, rows: Iterable[tuple[Signal, bytes]]) -> None:
        """Add signals with the digests of their contents. Call it within `transaction`."""
        marks = ", ".join("?" * 14)
        self._db.executemany(
            f"INSERT INTO {TABLE} ({_STORED}, content) VALUES ({marks})",
            [(*(getattr(one, name) for name in _STORED.split(", ")), content) for one, content in rows],
        )

    def add_observations(self, digests: Mapping[str, str], new: Iterable[Observation]) -> None:
        """Add observations of versions. `digests`: those of the names of models. Call it within `transaction`."""
        rows = [(digests[one.model], one.began, one.model, one.version) for one in new]
        self._db.executemany("INSERT OR IGNORE INTO versions VALUES (?, ?, ?, ?)", rows)

    def observations(self) -> list[Observation]:
        """Return the last observations of each model."""
        with reported(self.path):
            sql = """SELECT name, began, version FROM (SELECT *, row_number() OVER
                (PARTITION BY model ORDER BY began DESC) AS place FROM versions) WHERE place <= ? ORDER BY began"""
            return [Observation(*row) for row in self._db.execute(sql, (KEPT,))]

    def signals(self, where: str = "1", values: Sequence[object] = ()) -> Iterator[Signal]:
        """Yield the signals that fulfil an SQL condition over the columns of the table `s`, in the order in which they
        were received."""
        columns = ", ".join(f"s.{name}" for name in _STORED.split(", "))
        model, version = (_VERSION.format(column=name) for name in ("name", "version"))
        sql = f"SELECT {columns}, {model}, {version} FROM {TABLE} s WHERE {where} ORDER BY s.number"
        for *stored, name, found in self._rows(sql, values):
            facts = dict(zip(_STORED.split(", "), stored, strict=True))
            facts |= {"model": name or "", "version": found or "", "clamped": bool(facts["clamped"])}
            try:
                yield msgspec.convert(facts, Signal)
            except msgspec.ValidationError as error:
                what = f"the signal {str(facts['id'])[:80]} is damaged"
                raise PrivacyError(what, str(error), hint="restore the file from a backup") from None

    def _rows(self, sql: str, values: Sequence[object]) -> Iterator[tuple[Any, ...]]:
        with reported(self.path):
            cursor = self._db.execute(sql, tuple(values))
        while True:
            with reported(self.path):
                rows = cursor.fetchmany(_PAGE)
            if not rows:
                return
            yield from rows

    def summaries(self) -> list[Summary]:
        """Return a summary for each name and version, sorted."""
        with reported(self.path):
            return [Summary(*row) for row in self._db.execute(_SUMMARIES)]

    def erase(self, names: SubjectDigests, now: float) -> int:
        """Delete the signals of a subject, for an organisation those of all its users too, and note the erasure.
        Returns how many were deleted."""
        with transaction(self._db, self.path):
            self._db.execute("INSERT INTO erasures VALUES (?, ?, ?)", (*names, now))
        return delete_subject(self.path, TABLE, names)

    def expire(self, before: float) -> int:
        """Delete the signals about answers that were begun before a Unix time, and return how many they were."""
        with transaction(self._db, self.path):
            number = self._db.execute(f"DELETE FROM {TABLE} WHERE began < ?", (before,)).rowcount
            self._db.execute("DELETE FROM erasures WHERE at < ?", (before,))
            self._db.execute(
                "DELETE FROM versions WHERE began < (SELECT max(v.began) FROM versions v"
                " WHERE v.model = versions.model AND v.began <= ?)",
                (before,),
            )
        return number

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def read_summaries(path: Path) -> list[Summary]:
    """Return a summary for each name and version of a file of signals, sorted. Writes nothing, and creates no file.

    Raises `PrivacyError` if it is not a file of signals, or cannot be read."""
    with reported(path), contextlib.closing(open_readonly(path)) as database:
        return [Summary(*row) for row in database.execute(_SUMMARIES)]


def _refuse_other(path: Path) -> None:
    """Raise `PrivacyError` if a file is a database of something else. Changes nothing in it."""
    if not path.is_file() or not path.stat().st_size:
        return
    with reported(path):
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)
        try:
            found = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        finally:
            db.close()
    if found and TABLE not in found:
        facts = f"it has the tables {', '.join(sorted(found)[:8])}"
        raise PrivacyError(f"{path} is not a file of signals", facts, hint="give another file")
