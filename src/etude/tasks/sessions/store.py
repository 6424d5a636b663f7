"""Session tasks in a SQLite file of a privacy folder, encrypted with the key of their subject.

The file is attached to the folder, so that an erasure deletes the subject's tasks. Which tasks were of which subject is
kept after that, without any content, to find the rollouts that were made from them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from etude.errors import NoSource, PrivacyError
from etude.privacy import Captured, Level, PrivacyFolder
from etude.privacy.database import connect, reported, transaction
from etude.privacy.subjects import SubjectDigests
from etude.records.task import Answer, Split, Task
from etude.records.wire import pack, unpack

FILE = "sessions.sqlite"
TABLE = "sessions"
_TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY AUTOINCREMENT, record_id TEXT UNIQUE NOT NULL, organisation TEXT NOT NULL,
    subject TEXT NOT NULL, expires REAL NOT NULL, split TEXT NOT NULL, task_id TEXT NOT NULL, digest TEXT NOT NULL,
    data BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS sessions_by_task ON sessions (task_id);
CREATE TABLE IF NOT EXISTS origins (
    task_id TEXT NOT NULL, organisation TEXT NOT NULL, subject TEXT NOT NULL, PRIMARY KEY (task_id, subject));
"""
_AT_ONCE = 500  # values of one statement


class StoredSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session as it is stored. `reason`: why it is no task, then it has no `task` and `answer`; "" for a task."""

    name: str
    reason: str = ""
    task: Task | None = None
    answer: Answer | None = None


class SessionStore:
    """The sessions of a privacy folder. Close it, or use it in a `with` block.

    Raises `NoSource` if there is no privacy folder at `path`, and `PrivacyError` for a file that cannot be used."""

    def __init__(self, path: Path) -> None:
        if not (path / "consent.sqlite").is_file():
            hint = "give the folder of etude serve --capture"
            raise NoSource(f"{path} is not a folder of consent and captured records", hint=hint)
        self.privacy = PrivacyFolder(path)
        self._path = path / FILE
        try:
            self._db = connect(self._path, _TABLES)
            self.privacy.records.attach(self._path, TABLE)
        except BaseException:
            self.privacy.close()
            raise

    def digest_of(self, record_id: str) -> str:
        """Return the digest under which a session was stored (`add`); "" if it was not."""
        with reported(self._path):
            row = self._db.execute("SELECT digest FROM sessions WHERE record_id = ?", (record_id,)).fetchone()
        return "" if row is None else str(row[0])

    def add(self, captured: Captured, session: StoredSession, digest: str) -> bool:
        """Encrypt and store a session, in the place of an earlier one about the same record. Returns False, and stores
        nothing, if the record may not be used for training now.

        `captured`: the record of the session's last response. `digest`: identifies what the product wrote."""
        task = session.task
        with self.privacy.keys.lock():  # from the look at consent to the commit no erasure comes between
            key = self.privacy.keys.find(captured.names)
            if key is None or not self.privacy.usable([captured.record_id], Level.TRAIN):
                return False
            data = key.encrypt(pack(session), captured.record_id.encode())
            task_id, split = ("", "") if task is None else (task.task_id, str(task.split))
            row = (captured.record_id, *captured.names, captured.expires, split, task_id, digest, data)
            with transaction(self._db, self._path):
                self._db.execute("DELETE FROM sessions WHERE record_id = ?", (captured.record_id,))
                self._db.execute(
                    "INSERT INTO sessions (record_id, organisation, subject, expires, split, task_id, digest, data)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    row,
                )
                if task is not None:
                    self._db.execute("INSERT OR IGNORE INTO origins VALUES (?, ?, ?)", (task_id, *captured.names))
        return True

    def records(self, split: Split | None = None) -> list[str]:
        """Return the ids of the records whose sessions may be used now, in the order in which they were stored.

        With `split`, only those that are tasks of the split."""
        sql = "SELECT record_id FROM sessions WHERE expires > ?"
        values: tuple[float | str, ...] = (time.time(),)
        if split is not None:
            sql, values = f"{sql} AND split = ?", (*values, str(split))
        with reported(self._path):
            found = [str(row[0]) for row in self._db.execute(f"{sql} ORDER BY number", values)]
        usable = self.privacy.usable(found, Level.TRAIN)
        return [record_id for record_id in found if record_id in usable]

    def read(self, record_id: str) -> StoredSession | None:
        """Read and decrypt the session about a record; None if there is none that may be used now.

        Raises `PrivacyError` if its bytes were changed."""
        return self._read("record_id = ?", record_id)

    def read_task(self, task_id: str) -> StoredSession | None:
        """Read and decrypt the session of a task; None if there is none that may be used now.

        Raises `PrivacyError` if its bytes were changed."""
        return self._read("task_id = ?", task_id)

    def _read(self, where: str, value: str) -> StoredSession | None:
        with reported(self._path):
            sql = f"SELECT record_id, organisation, subject, data FROM sessions WHERE {where} AND expires > ?"
            rows = self._db.execute(sql, (value, time.time())).fetchall()
        usable = self.privacy.usable([row[0] for row in rows], Level.TRAIN)
        row = next((row for row in rows if row[0] in usable), None)
        return None if row is None else self._decrypted(*row)

    def sessions_of(self, names: SubjectDigests) -> Iterator[tuple[str, StoredSession]]:
        """Yield (id of its record, session) for each session of a subject, at any consent level.

        For an organisation, also those of its users. Sessions that expired, or whose key was destroyed, are left out.
        Raises `PrivacyError` if the bytes of a session were changed."""
        column = "organisation" if names.is_organisation else "subject"
        with reported(self._path):
            sql = f"SELECT record_id, organisation, subject, data FROM sessions WHERE {column} = ? AND expires > ?"
            rows = self._db.execute(f"{sql} ORDER BY number", (names.subject, time.time())).fetchall()
        for row in rows:
            if (found := self._decrypted(*row)) is not None:
                yield row[0], found

    def _decrypted(self, record_id: str, organisation: str, subject: str, data: bytes) -> StoredSession | None:
        """Return a session; None if the key of its subject was destroyed."""
        key = self.privacy.keys.find(SubjectDigests(organisation, subject))
        if key is None:
            return None
        try:
            return unpack(key.decrypt(data, record_id.encode()), StoredSession)
        except ValueError as error:
            hint = "restore the file from a backup, or import the session again"
            raise PrivacyError(f"a session in {self._path} is damaged", str(error), hint=hint) from None

    def withdrawn(self, task_ids: Collection[str]) -> set[str]:
        """Return the ids of those tasks that may not be trained on now, or are not in the store.

        Equal sessions of several subjects are one task; it may be used as long as one of them allows it."""
        records = dict[str, set[str]]()
        ids = sorted(set(task_ids))
        with reported(self._path):
            for some in (ids[at : at + _AT_ONCE] for at in range(0, len(ids), _AT_ONCE)):
                sql = f"SELECT task_id, record_id FROM sessions WHERE task_id IN ({', '.join('?' * len(some))})"
                for task_id, record_id in self._db.execute(f"{sql} AND expires > ?", (*some, time.time())):
                    records.setdefault(task_id, set()).add(record_id)
        usable = self.privacy.usable([one for found in records.values() for one in found], Level.TRAIN)
        return {task_id for task_id in ids if not records.get(task_id, set()) & usable}

    def tasks_of(self, names: SubjectDigests) -> set[str]:
        """Return the ids of all tasks that were made from sessions of a subject, also of those that were erased; for an
        organisation those of all its users too."""
        column = "organisation" if names.is_organisation else "subject"
        with reported(self._path):
            rows = self._db.execute(f"SELECT task_id FROM origins WHERE {column} = ?", (names.subject,))
            return {str(row[0]) for row in rows}

    def close(self) -> None:
        """Close the files."""
        self._db.close()
        self.privacy.close()

    def __enter__(self) -> SessionStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
