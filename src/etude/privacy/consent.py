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
    """What a subject allows to be kept of its conversations. Each level allows what the lower ones allow.

    OFF: nothing. METRICS: numbers of tokens, model and time. CAPTURE: texts and tokens, to be looked at. TRAIN: texts
    and tokens, to be trained on."""

    OFF = 0
    METRICS = 1
    CAPTURE = 2
    TRAIN = 3

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, text: str) -> Level:
        """Return the level of a name. Raises `InputError`.

        >>> Level.parse("train") > Level.parse("capture")
        True
        """
        known = [str(level) for level in cls]
        if text not in known:
            raise InputError(f"unknown consent level {text[:80]!r}", hint=nearest(text, known))
        return cls[text.upper()]


class Change(NamedTuple):
    """A level that was set. `at`: Unix time in s."""

    level: Level
    at: float


class ConsentStore:
    """The levels of all subjects, in a SQLite file. Changes hold at once, for every process that reads it.

    The level of a user is the lower one of the organisation's and the user's own; a user without a choice has that of
    the organisation. So a user can lower the level and never raise it. A request that names no user may be of any user:
    its level is the lowest of the organisation and all its users. `clock` returns Unix time in seconds."""

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
                raise PrivacyError(f"{path} belongs to other keys than {keys.folder}", hint=hint)
        except BaseException:
            self._db.close()
            raise

    def set(self, subject: Subject, level: Level) -> Level:
        """Set the level of an organisation or a user, durably, and return the one that now holds for it.

        It waits for a process that holds the store's lock, such as one that just publishes what it trained: afterwards
        nothing is trained against the new level. Raises `DeadlineExceeded`."""
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
        """Return whether a subject allows `level` now. Ask when a batch is formed, and again before it is committed."""
        return self.level(subject) >= level

    def level(self, subject: Subject, *, at: float | None = None) -> Level:
        """Return the level that holds for a subject now, or that held at the Unix time `at`."""
        return self.level_of(self._keys.names(subject), at=at)

    def level_of(self, names: SubjectDigests, *, at: float | None = None) -> Level:
        """Return the level of a subject that is given by its digests; that of an organisation is the one for requests
        that name no user."""
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

        It is off if the subject was erased since. A change that another one outweighs counts, too."""
        column, value = ("organisation", names.organisation) if names.is_organisation else ("subject", names.subject)
        with reported(self._path):
            sql = f"SELECT min(level) FROM changes WHERE ({column} = ? OR subject = ?) AND at > ?"
            ((changed,),) = self._db.execute(sql, (value, names.organisation, at)).fetchall()
        levels = [self.level_of(names, at=at), self.level_of(names)]
        return min(levels if changed is None else [*levels, Level(changed)])

    def chosen(self, subject: Subject) -> Level | None:
        """Return the level that was set for this subject itself; None if none was."""
        with reported(self._path):
            return self._last(self._keys.names(subject).subject, None)

    def history(self, subject: Subject) -> list[Change]:
        """Return all levels that were set for this subject itself, the oldest first."""
        with reported(self._path):
            sql = "SELECT level, at FROM changes WHERE subject = ? ORDER BY id"
            rows = self._db.execute(sql, (self._keys.names(subject).subject,)).fetchall()
        return [Change(Level(level), at) for level, at in rows]

    def organisations(self) -> dict[str, tuple[Level, int]]:
        """Return the organisations that have a level, by name: the level, and how many of their users have their
        own."""
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
