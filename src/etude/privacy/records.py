"""Captured answers in a SQLite file. Their content is encrypted with the key of their subject (AES-256-GCM).

The cipher also authenticates the columns beside the content: a record whose level, subject or time was changed is
damaged."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from etude.errors import PrivacyError
from etude.privacy.consent import Level
from etude.privacy.database import connect, reported, transaction
from etude.privacy.keys import Key, KeyStore
from etude.privacy.subjects import SubjectDigests
from etude.records.completion import Sampling, VersionSpan
from etude.records.wire import F32, I32, pack, unpack

_AT_ONCE = 500  # values of one statement
_TABLES = """
CREATE TABLE IF NOT EXISTS records (
    record_id TEXT PRIMARY KEY, response_id TEXT NOT NULL, answer INTEGER NOT NULL, organisation TEXT NOT NULL,
    subject TEXT NOT NULL, level INTEGER NOT NULL, at REAL NOT NULL, expires REAL NOT NULL, model TEXT NOT NULL,
    version TEXT NOT NULL, key_id TEXT NOT NULL, data BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS records_by_subject ON records (subject);
CREATE INDEX IF NOT EXISTS records_by_organisation ON records (organisation);
CREATE INDEX IF NOT EXISTS records_by_response ON records (response_id);
CREATE INDEX IF NOT EXISTS records_by_time ON records (at, record_id);
CREATE INDEX IF NOT EXISTS records_by_expiry ON records (expires);
CREATE TABLE IF NOT EXISTS uses (
    rollout_id TEXT NOT NULL, record_id TEXT NOT NULL, organisation TEXT NOT NULL, subject TEXT NOT NULL,
    PRIMARY KEY (rollout_id, record_id));
CREATE INDEX IF NOT EXISTS uses_by_record ON uses (record_id);
CREATE INDEX IF NOT EXISTS uses_by_subject ON uses (subject);
CREATE INDEX IF NOT EXISTS uses_by_organisation ON uses (organisation);
CREATE TABLE IF NOT EXISTS erasures (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, organisation TEXT NOT NULL, subject TEXT NOT NULL,
    num_records INTEGER NOT NULL, num_keys INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS attached (path TEXT NOT NULL, name TEXT NOT NULL, PRIMARY KEY (path, name));
CREATE TABLE IF NOT EXISTS counts (name TEXT PRIMARY KEY, number INTEGER NOT NULL);
"""
_COLUMNS = "record_id, response_id, answer, organisation, subject, level, at, expires, model, version, key_id"


class RecordDamaged(PrivacyError):
    """A captured record was changed, or its bytes are not what was written."""


class SubjectErased(PrivacyError):
    """The key of a captured record was destroyed, so it cannot be read any more."""


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """A captured answer, without its content.

    - `record_id`: 32 hex characters. `response_id`, `answer`: the response, and the number of the answer in it.
    - `organisation`, `subject`: digests of the names (`SubjectDigests`).
    - `level`: the consent level that was in force when it was captured.
    - `at`, `expires`: when it was served, and when it is deleted; Unix time in s.
    - `model`: the model's name. `version`: the version of the weights that sampled the last token, or "".
    - `key_id`: the key that it is encrypted with."""

    record_id: str
    response_id: str
    answer: int
    organisation: str
    subject: str
    level: Level
    at: float
    expires: float
    model: str
    version: str
    key_id: str

    @property
    def names(self) -> SubjectDigests:
        """The digests of the record's subject."""
        return SubjectDigests(self.organisation, self.subject)


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a captured record: an answer and its conversation.

    - `dialect`, `finish`: the API, and how the answer ended. `num_prompt`, `num_sampled`: numbers of tokens.
      `num_cached`: prompt tokens whose KV was reused; None in records of earlier versions of etude. `summary_tokens`:
      as in `ServedAnswer`. At the level METRICS all other fields are empty.
    - `messages`, `reply`: the conversation and the answer, each as JSON.
    - `prompt_ids` [P], `token_ids` [T], `logprobs` [T]: as in `Completion`.
    - `spans`: which version of the weights sampled which tokens. `sampling`: how they were sampled; None in records of
      earlier versions of etude, which are not trained on."""

    dialect: str
    finish: str
    num_prompt: int
    num_sampled: int
    num_cached: int | None = None
    summary_tokens: tuple[int, int] = (0, 0)
    messages: bytes = b""
    reply: bytes = b""
    prompt_ids: I32 | None = None
    token_ids: I32 | None = None
    logprobs: F32 | None = None
    spans: tuple[VersionSpan, ...] = ()
    sampling: Sampling | None = None


def seal(captured: Captured, content: Content, key: Key) -> bytes:
    """Encrypt the content of a record, bound to its columns (`Key.encrypt`)."""
    return key.encrypt(pack(content), pack(captured))


def unseal(captured: Captured, data: bytes, key: Key | None) -> Content:
    """Decrypt the bytes that `seal` returned. Raises `SubjectErased` if `key` is None, and `RecordDamaged` if the bytes
    or the record were changed."""
    if key is None or key.id != captured.key_id:
        what = f"the record {captured.record_id} cannot be read"
        hint = "the subject was erased, and the record cannot be recovered; erase the subject again to delete it"
        raise SubjectErased(what, "the key of its subject was destroyed", hint=hint)
    hint = "delete it by erasing the subject, or restore the file from a backup"
    what = f"the record {captured.record_id} is damaged"
    try:
        return unpack(key.decrypt(data, pack(captured)), Content)
    except ValueError as error:
        raise RecordDamaged(what, str(error), hint=hint) from None


class RecordStore:
    """The captured records of a service, in a SQLite file. Expired records are never returned, even if `expire` has not
    deleted them yet."""

    def __init__(self, path: Path, keys: KeyStore) -> None:
        self._path, self._keys = path, keys
        self._db = connect(path, _TABLES)

    def add(self, new: Sequence[tuple[Captured, bytes]], counts: Mapping[str, int] | None = None) -> None:
        """Store records with their encrypted contents, and add `counts` to the counters, in one transaction."""
        with transaction(self._db, self._path):
            rows = [(*msgspec.structs.astuple(one), data) for one, data in new]
            self._db.executemany(f"INSERT INTO records ({_COLUMNS}, data) VALUES ({'?, ' * 11}?)", rows)
            self._db.executemany(
                "INSERT INTO counts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET number = number + excluded.number",
                [(name, number) for name, number in (counts or {}).items() if number],
            )

    def counts(self) -> dict[str, int]:
        """Return the counters: for each possible outcome ("captured", "no_consent", ...) the number of served
        answers."""
        with reported(self._path):
            return dict(self._db.execute("SELECT name, number FROM counts ORDER BY name").fetchall())

    def of(self, names: SubjectDigests) -> list[Captured]:
        """Return the records of a subject, the oldest first; for an organisation those of all its users too."""
        return self._select(f"{_column(names)} = ?", names.subject)

    def of_response(self, response_id: str) -> list[Captured]:
        """Return the records of a response, one for each answer."""
        return self._select("response_id = ?", response_id)

    def served(
        self,
        *,
        after: tuple[float, str] = (0.0, ""),
        until: float = math.inf,
        level: Level = Level.OFF,
        limit: int,
    ) -> list[Captured]:
        """Return at most `limit` records that were captured under at least `level` and served by the Unix time `until`.

        The oldest come first. `after`: only those that come after this time and record id."""
        where = "(at, record_id) > (?, ?) AND at <= ? AND level >= ?"
        return self._select(where, *after, until, int(level), limit=limit)

    def find(self, record_ids: Collection[str]) -> list[Captured]:
        """Return the records with these ids. Ids without a record are left out."""
        return [one for record_id in record_ids for one in self._select("record_id = ?", record_id)]

    def read(self, captured: Captured) -> Content:
        """Read and decrypt a record. Raises `SubjectErased` if it or its key was destroyed, and `RecordDamaged` if it
        was changed."""
        with reported(self._path):
            sql = "SELECT data FROM records WHERE record_id = ?"
            row = self._db.execute(sql, (captured.record_id,)).fetchone()
        if row is None:
            raise SubjectErased(f"the record {captured.record_id} does not exist", hint="it was erased, or has expired")
        if not isinstance(row[0], bytes):
            raise RecordDamaged(
                f"the record {captured.record_id} is damaged",
                "its content is not bytes",
                hint="restore the file from a backup",
            )
        return unseal(captured, row[0], self._keys.find(captured.names))

    def link(self, record_id: str, rollout_id: str) -> None:
        """Record that a rollout contains the data of a record. Repeated calls change nothing.

        Raises `SubjectErased` if the record does not exist."""
        found = self.find([record_id])
        if not found:
            raise SubjectErased(f"the record {record_id} does not exist", hint="it was erased, or has expired")
        with transaction(self._db, self._path):
            row = (rollout_id, record_id, *found[0].names)
            self._db.execute("INSERT OR IGNORE INTO uses VALUES (?, ?, ?, ?)", row)

    def records_of(self, rollout_ids: Collection[str]) -> dict[str, set[str]]:
        """Return the ids of the records that each of these rollouts holds, by rollout id, also of deleted records."""
        return self._uses("rollout_id", rollout_ids)

    def uses(self, record_ids: Collection[str]) -> dict[str, set[str]]:
        """Return the ids of the rollouts that hold each of these records, by record id. Unused records are left out."""
        return self._uses("record_id", record_ids)

    def rollouts_of(self, names: SubjectDigests) -> list[str]:
        """Return the sorted ids of all rollouts that contain data of a subject, including data of records that were
        erased or have expired."""
        with reported(self._path):
            sql = f"SELECT DISTINCT rollout_id FROM uses WHERE {_column(names)} = ? ORDER BY rollout_id"
            return [row[0] for row in self._db.execute(sql, (names.subject,))]

    def subjects_of(self, names: SubjectDigests) -> set[str]:
        """Return the digests of all subjects of an organisation with records, also with deleted ones that a rollout
        holds."""
        with reported(self._path):
            of = "SELECT subject FROM {} WHERE organisation = ?1"
            sql = f"{of.format('records')} UNION {of.format('uses')}"
            return {subject for (subject,) in self._db.execute(sql, (names.organisation,))}

    def delete(self, names: SubjectDigests, *, num_keys: int) -> None:
        """Delete the records of a subject, so that the file and its log no longer contain their bytes, and record the
        erasure.

        `num_keys` is the number of destroyed keys, for the record of the erasure."""
        with transaction(self._db, self._path):
            where = f"WHERE {_column(names)} = ?"
            number = self._db.execute(f"DELETE FROM records {where}", (names.subject,)).rowcount
            self._db.execute(
                "INSERT INTO erasures (at, organisation, subject, num_records, num_keys) VALUES (?, ?, ?, ?, ?)",
                (time.time(), *names, number, num_keys),
            )
        with reported(self._path):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def attach(self, path: Path, table: str) -> None:
        """Register a table of another SQLite file, from which an erasure also deletes the subject's rows. Idempotent.

        The table must have the columns `organisation` and `subject`."""
        with transaction(self._db, self._path):
            self._db.execute("INSERT OR IGNORE INTO attached VALUES (?, ?)", (str(path.resolve()), table))

    def attached(self) -> list[tuple[Path, str]]:
        """Return the (file, table) pairs that `attach` has registered, sorted."""
        with reported(self._path):
            rows = self._db.execute("SELECT path, name FROM attached ORDER BY path, name").fetchall()
        return [(Path(path), name) for path, name in rows]

    def expire(self, now: float | None = None) -> int:
        """Delete the records that have expired at the Unix time `now` (None: the present time). Returns their
        number."""
        with transaction(self._db, self._path):
            sql = "DELETE FROM records WHERE expires <= ?"
            return self._db.execute(sql, (time.time() if now is None else now,)).rowcount

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _uses(self, key: str, ids: Collection[str]) -> dict[str, set[str]]:
        """Read the table of uses by one of its two columns: for each of these ids the values of the other column."""
        other, wanted = {"record_id": "rollout_id", "rollout_id": "record_id"}[key], sorted(ids)
        found = dict[str, set[str]]()
        with reported(self._path):
            for start in range(0, len(wanted), _AT_ONCE):
                some = wanted[start : start + _AT_ONCE]
                sql = f"SELECT {key}, {other} FROM uses WHERE {key} IN ({', '.join('?' * len(some))})"
                for one, value in self._db.execute(sql, some):
                    found.setdefault(one, set()).add(value)
        return found

    def _select(self, where: str, *values: str | float, limit: int = -1) -> list[Captured]:
        sql = f"SELECT {_COLUMNS} FROM records WHERE {where} AND expires > ? ORDER BY at, record_id LIMIT ?"
        with reported(self._path):
            rows = self._db.execute(sql, (*values, time.time(), limit)).fetchall()
        return list(_captured(rows))


def _column(names: SubjectDigests) -> str:
    return "organisation" if names.is_organisation else "subject"


def _captured(rows: Sequence[tuple[object, ...]]) -> Iterator[Captured]:
    fields = Captured.__struct_fields__
    for row in rows:
        try:
            yield msgspec.convert(dict(zip(fields, row, strict=True)), Captured)
        except msgspec.ValidationError as error:
            what = f"the record {str(row[0])[:80]} is damaged"
            raise RecordDamaged(what, str(error), hint="restore the file from a backup") from None
