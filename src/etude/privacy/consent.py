"""What subjects allow, with every change: off, metrics, capture or train; by organisation and by user."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from etude.errors import InputError, PrivacyError, nearest
from etude.privacy.database import connect, reported, transaction
from etude.privacy.keys import KeyStore
from etude.privacy.subjects import Subject, SubjectDigests

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS changes (
    id INTEGER PRIMARY KEY, organisation TEXT NOT NULL, subject TEXT NOT NULL, name TEXT NOT NULL,
    level INTEGER NOT NULL, at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS changes_by_subject ON changes (subject, id);
CREATE INDEX IF NOT EXISTS changes_by_organisation ON changes (organisation, subject, id);
"""


class Level(enum.IntEnum):
    """A level of consent: which data of a subject's conversations may be stored. Each level includes the lower ones.

    OFF: nothing. METRICS: numbers of tokens, model and time. CAPTURE: texts and tokens, for people to read. TRAIN:
    texts and tokens, for training."""

    OFF = 0
    METRICS = 1
    CAPTURE = 2
    TRAIN = 3

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, text: str) -> Level:
        """Return the level with this name. Raises `InputError` for an unknown name.

        >>> Level.parse("train") > Level.parse("capture")
        True
        """
        known = [str(level) for level in cls]
        if text not in known:
            raise InputError(f"unknown consent level {text[:80]!r}", hint=nearest(text, known))
        return cls[text.upper()]


class Change(NamedTuple):
    """A level that was set, and the Unix time in seconds at which it was set."""

    level: Level
    at: float


class ConsentStore:
    """The consent levels of all subjects, in a SQLite file. Every process that reads the file sees a change at once.

    The level of a user is the lower one of the organisation's level and the user's own; a user without a level of its
    own has the organisation's level. So a user can lower the level and never raise it. A request that names no user may
    come from any user: its level is the lowest of the organisation and all its users. `clock` returns Unix time in
    seconds."""

    def __init__(self, path: Path, keys: KeyStore, *, clock: Callable[[], float] = time.time) -> None:
        self._path, self._keys, self._clock = path, keys, clock
        self._db = connect(path, _TABLES)
        try:
            with reported(path):
                sql = "INSERT OR IGNORE INTO meta VALUES ('keys', ?)"
                if not self._db.execute("SELECT 1 FROM meta").fetchone():
                    self._db.execute(sql, (keys.fingerprint,))
                ((found,),) = self._db.execute("SELECT value FROM meta WHERE name = 'keys'").fetchall()
            if found != keys.fingerprint:
                hint = "use the folder of keys that belongs to it; with other keys no subject would be found"
                raise PrivacyError(f"{path} was not written with the keys in {keys.folder}", hint=hint)
        except BaseException:
            self._db.close()
            raise

    def set(self, subject: Subject, level: Level) -> Level:
        """Set the level of an organisation or a user, durably, and return the one that now holds for it.

        It first waits for the store's lock, which a training process holds while it publishes a version. So no version
        that is published later was trained against the new level. Raises `DeadlineExceeded`."""
        names = self._keys.names(subject)
        with self._keys.lock():
            self.set_named(names, level, name="" if subject.user else subject.organisation)
        return self.level_of(names)

    def set_named(self, names: SubjectDigests, level: Level, *, name: str = "") -> None:
        """Set the level of a subject that is given by its digests. `name` is an organisation's name."""
        with transaction(self._db, self._path):
            self._db.execute(
                "INSERT INTO changes (organisation, subject, name, level, at) VALUES (?, ?, ?, ?, ?)",
                (*names, name, int(level), self._clock()),
            )

    def allowed(self, subject: Subject, level: Level) -> bool:
        """Return whether a subject allows `level` now.

        Call it when a training batch is formed, and again before the batch is committed."""
        return self.level(subject) >= level

    def level(self, subject: Subject, *, at: float | None = None) -> Level:
        """Return the level that is in force for a subject now, or that was in force at the Unix time `at`."""
        return self.level_of(self._keys.names(subject), at=at)

    def level_of(self, names: SubjectDigests, *, at: float | None = None) -> Level:
        """Return the level of a subject that is given by its digests, now or at the Unix time `at`.

        For an organisation, it is the level of requests that name no user."""
        with reported(self._path):
            own = self._last(names.organisation, at)
            if own is None:
                return Level.OFF
            if not names.is_organisation:
                return min(own, own if (mine := self._last(names.subject, at)) is None else mine)
            lowest = self._db.execute(
                "SELECT min(level) FROM changes WHERE id IN"
                " (SELECT max(id) FROM changes WHERE organisation = ? AND at <= ? GROUP BY subject)",
                (names.organisation, float("inf") if at is None else at),
            ).fetchone()
        return Level(lowest[0])

    def lowest_since(self, names: SubjectDigests, at: float) -> Level:
        """Return the lowest level that a subject, given by its digests, has had since the Unix time `at`.

        Every level that was set for the subject or its organisation in this time counts, even if it was changed again.
        The result is OFF if the subject was erased in this time."""
        column, value = ("organisation", names.organisation) if names.is_organisation else ("subject", names.subject)
        with reported(self._path):
            sql = f"SELECT min(level) FROM changes WHERE ({column} = ? OR subject = ?) AND at > ?"
            ((changed,),) = self._db.execute(sql, (value, names.organisation, at)).fetchall()
        levels = [self.level_of(names, at=at), self.level_of(names)]
        return min(levels if changed is None else [*levels, Level(changed)])

    def has_levels(self, names: SubjectDigests) -> bool:
        """Return whether a level was ever set for a subject, given by its digests; for an organisation: for itself or
        one of its users."""
        column, value = ("organisation", names.organisation) if names.is_organisation else ("subject", names.subject)
        with reported(self._path):
            return (
                self._db.execute(f"SELECT 1 FROM changes WHERE {column} = ? LIMIT 1", (value,)).fetchone() is not None
            )

    def chosen(self, subject: Subject) -> Level | None:
        """Return the level that was set for this subject itself; None if no level was set."""
        with reported(self._path):
            return self._last(self._keys.names(subject).subject, None)

    def history(self, subject: Subject) -> list[Change]:
        """Return all levels that were set for this subject itself, the oldest first."""
        with reported(self._path):
            sql = "SELECT level, at FROM changes WHERE subject = ? ORDER BY id"
            rows = self._db.execute(sql, (self._keys.names(subject).subject,)).fetchall()
        return [Change(Level(level), at) for level, at in rows]

    def organisations(self) -> dict[str, tuple[Level, int]]:
        """Return a dict from each organisation with a level to (its level, the number of its users with a level of
        their own)."""
        with reported(self._path):
            rows = self._db.execute(
                "SELECT name, organisation FROM changes WHERE name != '' GROUP BY organisation ORDER BY name"
            ).fetchall()
            users = "SELECT count(DISTINCT subject) FROM changes WHERE organisation = ? AND subject != organisation"
            return {
                name: (self._last(digest, None) or Level.OFF, self._db.execute(users, (digest,)).fetchone()[0])
                for name, digest in rows
            }

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _last(self, subject: str, at: float | None) -> Level | None:
        row = self._db.execute(
            "SELECT level FROM changes WHERE subject = ? AND at <= ? ORDER BY id DESC LIMIT 1",
            (subject, float("inf") if at is None else at),
        ).fetchone()
        return None if row is None else Level(row[0])
