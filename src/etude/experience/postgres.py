"""The ledger on a PostgreSQL server: one schema per run, one writer by an advisory lock, and automatic reconnection.

Every transaction is on the server's disk when it returns (`synchronous_commit = on`, including synchronous standbys). A
broken connection is opened again until a deadline. When a COMMIT got no answer, the outcome is looked up: each
transaction stores its name in `meta`, and the name that is found there afterwards tells whether it was committed. (A
transaction id would not do: after a crash a server may assign it again.) A transaction that was not committed is
repeated from its start. A name that is neither this transaction's nor the previous one's means that the server lost
confirmed data, because a standby took over or a copy was restored: this ends the run, and `--resume` reconciles. This
module knows nothing of the meaning of states."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg

from etude.errors import EtudeError, LedgerError, StoreError
from etude.experience.database import FORMAT, INDEXES, NoLedger, check_format
from etude.experience.postgres_errors import check_version, connection_error, is_transient, one_line, redacted_url
from etude.experience.postgres_session import POLL_S, ConnectionBroken, Session

RECONNECT_S = 20.0
ATTEMPTS = 3  # of one transaction whose connection breaks
NAME = "commit"  # key in `meta`: the name of the last committed transaction
T = TypeVar("T")

_SCHEMA = (
    "CREATE TABLE meta (key text PRIMARY KEY, value text NOT NULL)",
    "CREATE TABLE rollouts (position bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, rollout_id text NOT NULL UNIQUE,"
    " group_id text NOT NULL, state text NOT NULL, attempt integer NOT NULL, reason text NOT NULL DEFAULT '',"
    " reward double precision, boundary text, batch_id text, step bigint, has_sample integer, version text)"
    " WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000)",  # not by table size
    "CREATE TABLE slots (slot bigint PRIMARY KEY, rollout_id text UNIQUE REFERENCES rollouts (rollout_id))"
    " WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000)",
    "CREATE TABLE blobs (rollout_id text NOT NULL REFERENCES rollouts (rollout_id), name text NOT NULL,"
    " data bytea NOT NULL, PRIMARY KEY (rollout_id, name))",
    "CREATE TABLE transitions (number bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, t double precision NOT NULL,"
    " rollout_id text NOT NULL REFERENCES rollouts (rollout_id), origin text, state text NOT NULL,"
    " attempt integer NOT NULL, reason text NOT NULL, facts text NOT NULL)",
    f"INSERT INTO meta VALUES ('format', '{FORMAT}'), ('{NAME}', '\"\"')",
)


class PostgresDatabase:
    """A ledger's `Database` in one schema of a PostgreSQL server, at `postgresql://host/database#run_id`.

    `check` runs before each outermost commit. `log` is called with a line when the server was unreachable for a while.
    """

    def __init__(
        self, place: str, *, readonly: bool, check: Callable[[], None] | None, log: Callable[[str], None]
    ) -> None:
        url, _, run_id = place.partition("#")
        self.where, self.schema = f"{redacted_url(url)}#{run_id}", schema_of(run_id)
        self._readonly, self._check, self._log, self._depth = readonly, check, log, 0
        self._count, self._confirmed = 0, ""
        self.session = Session(url, self.where, self.schema, readonly=readonly)
        try:
            self.session.open()
            self._prepare()
        except (ConnectionBroken, psycopg.Error) as error:
            self.close()
            raise connection_error(self.where, error.__cause__ or error) from None
        except EtudeError:
            self.close()
            raise

    def transact(self, work: Callable[[], T], *, sync: bool = False) -> T:
        return self._nested(work) if self._depth else self._retry(lambda: self._outermost(work))

    def _retry(self, work: Callable[[], T]) -> T:
        """Repeat work that had no effect because the connection broke. Raises `StoreError` after `ATTEMPTS`."""
        cut: ConnectionBroken | None = None
        for _ in range(ATTEMPTS):
            try:
                return work()
            except ConnectionBroken as error:
                cut = error
            if not self.session.is_open:
                self._reconnect()
        raise StoreError(
            f"the connection to {self.where} broke {ATTEMPTS} times in a row", str(cut), hint="see the server's log"
        )

    def _outermost(self, work: Callable[[], T]) -> T:
        self._depth, self._count, committing = 1, self._count + 1, False
        name = f'"{self.session.name}-{self._count}"'
        try:
            with self.session.pipelined():
                self.session.run("BEGIN")
                self.session.run(f"UPDATE meta SET value = '{name}' WHERE key = '{NAME}'")
                result = work()
                if self._check:
                    self._check()
                committing = True
                self.session.run("COMMIT")
        except ConnectionBroken:
            if self._reconnect() != name or not committing:
                raise
        except BaseException:
            self._undo("ROLLBACK")
            raise
        finally:
            self._depth = 0
        self._confirmed = name
        return result

    def _nested(self, work: Callable[[], T]) -> T:
        level, self._depth = self._depth, self._depth + 1
        try:
            self.session.run(f"SAVEPOINT level{level}")
            result = work()
            self.session.run(f"RELEASE level{level}")
            return result
        except ConnectionBroken:
            raise
        except BaseException:
            self._undo(f"ROLLBACK TO level{level}", f"RELEASE level{level}")
            raise
        finally:
            self._depth = level

    def _undo(self, *statements: str) -> None:
        try:
            for sql in statements:
                self.session.run(sql)
        except ConnectionBroken:
            self._reconnect()  # the server rolls back a transaction without COMMIT

    def _reconnect(self) -> str:
        """Open the connection and take the lock again.

        Returns the name of the last committed transaction. Raises `StoreError` after the deadline, and `LedgerError`
        when the server lost confirmed data."""
        began = time.monotonic()
        while True:
            try:
                self.session.open()
                last = str(self.session.query(f"SELECT value FROM meta WHERE key = '{NAME}'")[0][0])
                break
            except (ConnectionBroken, psycopg.OperationalError) as error:
                cause = error.__cause__ or error
                if time.monotonic() - began > RECONNECT_S or not is_transient(cause):
                    raise StoreError(
                        f"waited {RECONNECT_S:g} s for the ledger's server at {self.where}",
                        one_line(cause),
                        hint="check the server and its disk, then etude run --resume: confirmed data is not lost",
                    ) from None
                time.sleep(POLL_S)
        self._log(f"the ledger's server was unreachable for {time.monotonic() - began:.1f} s")
        mine = f'"{self.session.name}-{self._count}"'
        if not self._readonly and self._confirmed and last not in (self._confirmed, mine):
            raise LedgerError(
                f"{self.where} has changed since the connection broke",
                "confirmed transactions are missing, or another process has written",
                hint="etude run --resume corrects the ledger; to prevent this, make the standby synchronous",
            )
        return last

    def execute(self, sql: str, *values: Any) -> None:
        if self._depth:
            self.session.run(sql, values)
        else:
            self.transact(lambda: self.session.run(sql, values))

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.session.query(sql, values) if self._depth else self._retry(lambda: self.session.query(sql, values))

    def verify(self) -> None:
        """Read every row once. Raises `LedgerError` for damaged pages, if the server has checksums."""
        for table in ("meta", "rollouts", "slots", "blobs", "transitions"):
            self.rows(f"SELECT count(*) FROM (SELECT * FROM {table} OFFSET 0) AS every")

    def close(self) -> None:
        self.session.close()

    def _prepare(self) -> None:
        check_version(self.where, self.session.connection.info.server_version)
        there = self.session.query(
            "SELECT to_regclass(?) IS NOT NULL, to_regnamespace(?) IS NOT NULL",
            (f'"{self.schema}".meta', f'"{self.schema}"'),
        )[0]
        if not there[0]:
            if self._readonly:
                hint = "a run creates it when RL begins; check that this is the right server"
                raise NoLedger(f"{self.where} has no such ledger", f"it has no schema {self.schema}", hint=hint)
            self._create(schema=not there[1])
        found = self.session.query("SELECT value FROM meta WHERE key = 'format'")
        check_format(self.where, found[0][0] if found else None, readonly=self._readonly)
        if not self._readonly:
            self._confirmed = str(self.session.query(f"SELECT value FROM meta WHERE key = '{NAME}'")[0][0])
            for sql in INDEXES:
                self.session.run(sql)

    def _create(self, *, schema: bool) -> None:
        made = [f'CREATE SCHEMA "{self.schema}"'] if schema else []
        self.session.run("; ".join(["BEGIN", *made, *_SCHEMA, "COMMIT"]))


def schema_of(run_id: str) -> str:
    """Return the schema name of a run: at most 63 characters of a-z, 0-9 and _.

    >>> schema_of("Laptop-1a2b3c4d")
    'etude_laptop_1a2b3c4d'
    """
    clean = "etude_" + re.sub("[^a-z0-9]", "_", run_id.lower())
    return clean if len(clean) <= 63 else f"{clean[:46]}_{hashlib.sha256(run_id.encode()).hexdigest()[:16]}"
