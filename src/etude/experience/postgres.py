"""The ledger on a PostgreSQL server: a schema for each run, one writer by an advisory lock, and a server's bad days.

Every transaction is on the server's disk when it returns (`synchronous_commit = on`, and the standbys that the server
was told to wait for): what the conductor was told is what a restarted server knows. When the connection breaks it is
opened again until a deadline. A transaction whose COMMIT got no answer is not guessed about: each one leaves its name
in `meta`, and the name that is found there afterwards says whether it was the last one (a transaction id would not:
after a crash a server may give the same one to somebody else). One that is not there is done again from its beginning.
A name that is neither this one's nor the one's before means that the server lost what it had confirmed (a standby took
over, a copy was restored): that ends the run, and `--resume` reconciles. Knows nothing of what a state means.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from etude.errors import EtudeError, LedgerError, StoreError
from etude.experience.database import FORMAT, INDEXES, NoLedger, check_format

try:
    import psycopg
except ImportError as error:
    raise LedgerError(
        "experience.ledger names a PostgreSQL server", str(error), hint="pip install 'etude[postgres]'"
    ) from None

CONNECT_S, RECONNECT_S, ANSWER_S, LOCK_S, POLL_S = 10, 20.0, 60.0, 10, 0.2
GRACE_S = 3.0  # in which a server may notice that the conductor before is gone
ATTEMPTS = 3  # of one transaction that the connection breaks under
PATIENCE_S = 5.0  # beyond ANSWER_S, at which a server in order ends a statement by itself
OLDEST = 13
NAME = "commit"  # in `meta`: the transaction that was committed last
T = TypeVar("T")

_SCHEMA = (
    "CREATE TABLE meta (key text PRIMARY KEY, value text NOT NULL)",
    "CREATE TABLE rollouts (position bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, rollout_id text NOT NULL UNIQUE,"
    " group_id text NOT NULL, state text NOT NULL, attempt integer NOT NULL, reason text NOT NULL DEFAULT '',"
    " reward double precision, boundary text, batch_id text, step bigint, has_sample integer, version text)"
    " WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000)",
    "CREATE TABLE slots (slot bigint PRIMARY KEY, rollout_id text UNIQUE REFERENCES rollouts (rollout_id))"
    " WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000)",
    "CREATE TABLE blobs (rollout_id text NOT NULL REFERENCES rollouts (rollout_id), name text NOT NULL,"
    " data bytea NOT NULL, PRIMARY KEY (rollout_id, name))",
    "CREATE TABLE transitions (number bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, t double precision NOT NULL,"
    " rollout_id text NOT NULL REFERENCES rollouts (rollout_id), origin text, state text NOT NULL,"
    " attempt integer NOT NULL, reason text NOT NULL, facts text NOT NULL)",
    f"INSERT INTO meta VALUES ('format', '{FORMAT}'), ('{NAME}', '\"\"')",
)
_HOLDER = (
    "SELECT a.pid, coalesce(a.application_name, 'another user''s'), coalesce(host(a.client_addr), 'the server''s host')"
    " FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' AND l.granted"
    " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND (l.classid::bigint << 32) | l.objid::bigint = ?"
)


class _Cut(Exception):
    """The connection broke. Met by `transact` and `rows` alone."""


class PostgresDatabase:
    """A `Database` in one schema of a server, at `postgresql://host/database#run_id`."""

    def __init__(
        self, place: str, *, readonly: bool, check: Callable[[], None] | None, said: Callable[[str], None]
    ) -> None:
        self._url, _, run_id = place.partition("#")
        self.where, self.schema = f"{shown(self._url)}#{run_id}", schema_of(run_id)
        self._readonly, self._check, self._said, self._depth = readonly, check, said, 0
        self._key = int.from_bytes(hashlib.sha256(self.schema.encode()).digest()[:8], "big") >> 1
        self._session = secrets.token_hex(6)
        self._count, self._confirmed = 0, ""
        self._watch = _Watch()
        self._connections: list[psycopg.Connection[Any]] = []  # one, or none
        try:
            self._open()
            self._prepare()
        except (_Cut, psycopg.Error) as error:
            self._watch.close()
            raise _no_entry(self.where, error.__cause__ or error) from None
        except EtudeError:
            self.close()
            raise

    def transact(self, work: Callable[[], T], *, sync: bool = False) -> T:
        return self._nested(work) if self._depth else self._again(lambda: self._outermost(work))

    def _again(self, work: Callable[[], T]) -> T:
        """What nothing came of, because the connection broke, is done again."""
        cut: _Cut | None = None
        for _ in range(ATTEMPTS):
            try:
                return work()
            except _Cut as error:
                cut = error
            if not self._connections or self._connection.closed:
                self._returned()
        raise StoreError(f"{self.where} went away {ATTEMPTS} times in a row", str(cut), hint="look at the server's log")

    def _outermost(self, work: Callable[[], T]) -> T:
        self._depth, self._count, committing = 1, self._count + 1, False
        name = f'"{self._session}-{self._count}"'
        try:
            with self._piped():
                self._run("BEGIN")
                self._run(f"UPDATE meta SET value = '{name}' WHERE key = '{NAME}'")
                result = work()
                if self._check:
                    self._check()
                committing = True
                self._run("COMMIT")
        except _Cut:
            if self._returned() != name or not committing:
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
            self._run(f"SAVEPOINT level{level}")
            result = work()
            self._run(f"RELEASE level{level}")
            return result
        except _Cut:
            raise
        except BaseException:
            self._undo(f"ROLLBACK TO level{level}", f"RELEASE level{level}")
            raise
        finally:
            self._depth = level

    def _undo(self, *statements: str) -> None:
        try:
            for sql in statements:
                self._run(sql)
        except _Cut:
            self._returned()  # the server undoes what it got no COMMIT for

    def _returned(self) -> str:
        """Have a connection again, and the lock; the name of the transaction that was committed last. Raises
        `StoreError` after the deadline."""
        began = time.monotonic()
        while True:
            try:
                self._open()
                last = str(self._ask(f"SELECT value FROM meta WHERE key = '{NAME}'")[0][0])
                break
            except (_Cut, psycopg.OperationalError) as error:
                cause = error.__cause__ or error
                if time.monotonic() - began > RECONNECT_S or not _passes(cause):
                    raise StoreError(
                        f"waited {RECONNECT_S:g} s for the ledger's server at {self.where}",
                        _line(cause),
                        hint="see to the server, then etude run --resume: what was confirmed is there",
                    ) from None
                time.sleep(POLL_S)
        self._said(f"the ledger's server was away for {time.monotonic() - began:.1f} s")
        mine = f'"{self._session}-{self._count}"'
        if not self._readonly and self._confirmed and last not in (self._confirmed, mine):
            raise LedgerError(
                f"{self.where} is not what it was before the connection broke",
                "transactions that it had confirmed are gone, or somebody else wrote",
                hint="etude run --resume reconciles with the weights; a standby that takes over must be synchronous",
            )
        return last

    def execute(self, sql: str, *values: Any) -> None:
        if self._depth:
            self._run(sql, values)
        else:
            self.transact(lambda: self._run(sql, values))

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._ask(sql, values) if self._depth else self._again(lambda: self._ask(sql, values))

    def prove(self) -> None:
        """Read every row's page once: a server with checksums refuses damaged ones. Raises `LedgerError`."""
        for table in ("meta", "rollouts", "slots", "blobs", "transitions"):
            self.rows(f"SELECT count(*) FROM (SELECT * FROM {table} OFFSET 0) AS every")

    def close(self) -> None:
        self._watch.close()
        self._hang_up()

    # The connection

    def _open(self) -> None:
        self._hang_up()
        name = f"etude {self._session} {socket.gethostname()[:24]}:{os.getpid()}"
        connection = psycopg.connect(
            self._url,
            autocommit=True,
            connect_timeout=CONNECT_S,
            application_name=name,
            keepalives_idle=5,
            keepalives_interval=5,
            keepalives_count=3,
            tcp_user_timeout=20_000,
        )
        self._connections.append(connection)
        self._watch.over(connection)
        settings = {
            "search_path": self.schema,
            "synchronous_commit": "on",
            "statement_timeout": f"{ANSWER_S:.0f}s",
            "lock_timeout": f"{LOCK_S}s",
            "enable_seqscan": "off",
            "plan_cache_mode": "force_custom_plan",  # a plan for any state reads history: nearly all rows are in one
            "tcp_keepalives_idle": "10",
            "tcp_keepalives_interval": "5",
            "tcp_keepalives_count": "3",
            "default_transaction_read_only": "on" if self._readonly else "off",
        }
        self._run("; ".join(f"SET {name} = '{value}'" for name, value in settings.items()))
        if not self._readonly:
            self._lock()

    @property
    def _connection(self) -> psycopg.Connection[Any]:
        return self._connections[0]

    def _hang_up(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def _lock(self) -> None:
        """Be the schema's only writer. A session of this very process that the server has not missed yet is ended."""
        until = time.monotonic() + GRACE_S
        while not self._ask("SELECT pg_try_advisory_lock(?)", (self._key,))[0][0]:
            held = self._ask(_HOLDER, (self._key,))
            mine = bool(held) and self._session in held[0][1]
            if mine:
                self._run("SELECT pg_terminate_backend(?)", (held[0][0],))
            if mine and time.monotonic() > until:
                raise _Cut("the session before still holds the lock")
            if held and time.monotonic() > until:
                raise LedgerError(
                    f"{self.where} is written by another conductor",
                    f"{held[0][1]}, from {held[0][2]}",
                    hint="one run has one conductor: stop that one, or give this run a folder of its own",
                )
            time.sleep(POLL_S)

    def _prepare(self) -> None:
        _check_version(self.where, self._connection.info.server_version)
        there = self._ask(
            "SELECT to_regclass(?) IS NOT NULL, to_regnamespace(?) IS NOT NULL",
            (f'"{self.schema}".meta', f'"{self.schema}"'),
        )[0]
        if not there[0]:
            if self._readonly:
                hint = "a run makes it as its RL begins; was it dropped, or is this another server?"
                raise NoLedger(f"{self.where} has no such ledger", f"no schema {self.schema}", hint=hint)
            self._create(schema=not there[1])
        found = self._ask("SELECT value FROM meta WHERE key = 'format'")
        check_format(self.where, found[0][0] if found else None)
        if not self._readonly:
            self._confirmed = str(self._ask(f"SELECT value FROM meta WHERE key = '{NAME}'")[0][0])
            for sql in INDEXES:
                self._run(sql)

    def _create(self, *, schema: bool) -> None:
        made = [f'CREATE SCHEMA "{self.schema}"'] if schema else []
        self._run("; ".join(["BEGIN", *made, *_SCHEMA, "COMMIT"]))

    def _ask(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        cursor, rows = self._run(sql, values), list[tuple[Any, ...]]()
        self._asked(lambda: rows.extend(cursor.fetchall()))
        return rows

    def _run(self, sql: str, values: Sequence[Any] = ()) -> psycopg.Cursor[Any]:
        """One statement, or several without values. Raises `_Cut`, and what the server refuses in words."""
        if not self._connections:
            raise _Cut("the last try to connect failed")
        cursor = self._connection.cursor(binary=bool(values))
        given = tuple(map(_plain, values)) if values else None
        self._asked(lambda: cursor.execute(sql.replace("?", "%s").encode(), given))
        return cursor

    @contextmanager
    def _piped(self) -> Iterator[None]:
        """Statements that answer nothing are sent with the next one that does: some four round trips a transaction."""
        if not self._connections:
            raise _Cut("the last try to connect failed")
        pipeline = self._connection.pipeline()
        pipeline.__enter__()
        try:
            yield
        except BaseException as error:
            with suppress(psycopg.Error):
                pipeline.__exit__(type(error), error, error.__traceback__)
            raise
        self._asked(lambda: pipeline.__exit__(None, None, None))

    def _asked(self, work: Callable[[], object]) -> None:
        try:
            with self._watch:
                work()
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            if self._connection.closed or (error.sqlstate or "").startswith("57P"):
                raise _Cut(_line(error)) from error
            raise _in_words(self.where, error) from error
        except psycopg.Error as error:
            raise _in_words(self.where, error) from error


class _Watch:
    """Ends a wait for a server that neither answers nor goes away: the socket is shut, and the wait is an error."""

    def __init__(self) -> None:
        self._due, self._ended = float("inf"), threading.Event()
        self._connection: psycopg.Connection[Any] | None = None
        threading.Thread(target=self._look, name="ledger's watch", daemon=True).start()

    def over(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._due = time.monotonic() + ANSWER_S + PATIENCE_S

    def __exit__(self, *_: object) -> None:
        self._due = float("inf")

    def close(self) -> None:
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(1.0):
            if time.monotonic() > self._due and self._connection is not None and not self._connection.closed:
                self._due = float("inf")
                with socket.socket(fileno=os.dup(self._connection.fileno())) as line:
                    line.shutdown(socket.SHUT_RDWR)


def schema_of(run_id: str) -> str:
    """The schema of a run, at most 63 characters of a-z, 0-9 and _.

    >>> schema_of("Laptop-1a2b3c4d")
    'etude_laptop_1a2b3c4d'
    """
    clean = "etude_" + re.sub("[^a-z0-9]", "_", run_id.lower())
    return clean if len(clean) <= 63 else f"{clean[:46]}_{hashlib.sha256(run_id.encode()).hexdigest()[:16]}"


def shown(url: str) -> str:
    """A server's URL as it may be told: without user, password and options.

    >>> shown("postgresql://me:secret@db:5433/etude?sslmode=require")
    'postgresql://db:5433/etude'
    """
    parts = urlsplit(url)
    return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value  # an enum's member is its text


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _passes(error: BaseException) -> bool:
    """Whether a failed connection may come right by itself: a server that starts, or is not there for now."""
    return not re.search(r"authentication|password|does not exist|permission denied|pg_hba", str(error))


def _no_entry(where: str, error: BaseException) -> EtudeError:
    """Why a connection could not be opened at first."""
    if isinstance(error, psycopg.Error) and (error.sqlstate or "")[:2] == "42":
        return _in_words(where, error)
    if not _passes(error):
        return LedgerError(
            f"{where} lets nobody in as this user",
            _line(error),
            hint="give user and database in the URL, the password in PGPASSWORD, ~/.pgpass or a service file",
        )
    return StoreError(
        f"the ledger's server at {where} does not answer",
        _line(error),
        hint="start it, or correct experience.ledger; '' keeps the ledger in the run folder",
    )


def _in_words(where: str, error: psycopg.Error) -> EtudeError:
    state, text = error.sqlstate or "", _line(error)
    if state == "42501":
        hint = "as its owner: GRANT CREATE ON DATABASE ... TO the run's user, or give it a schema of that name"
        return LedgerError(f"{where} gives this user no right to what a ledger needs", text, hint=hint)
    if state in ("55P03", "57014"):
        hint = "somebody holds a lock on its tables: see pg_stat_activity on the server"
        return LedgerError(f"waited {LOCK_S if state == '55P03' else ANSWER_S:g} s for {where}", text, hint=hint)
    if state == "25006":
        return LedgerError(
            f"{where} cannot be used", text, hint="a reader changes nothing; a standby cannot be written"
        )
    if state[:2] in ("53", "58"):
        return StoreError(f"{where} cannot be written", text, hint="free the server's disk, then etude run --resume")
    return LedgerError(f"{where} is not a sound ledger", text, hint="restore the schema from a copy")


def check(url: str) -> None:
    """Whether a run could keep its ledger on this server. Raises `LedgerError`, `StoreError`."""
    try:
        with psycopg.connect(url, connect_timeout=CONNECT_S, application_name="etude preflight") as connection:
            sql = "SELECT has_database_privilege(current_database(), 'CREATE'), current_database(), current_user"
            may, database, user = connection.execute(sql).fetchall()[0]
            version = connection.info.server_version
    except psycopg.Error as error:
        raise _no_entry(shown(url), error) from None
    _check_version(shown(url), version)
    if not may:
        raise LedgerError(
            f"{shown(url)} gives {user} no right to make a run's schema",
            f"in database {database}",
            hint=f"as its owner: GRANT CREATE ON DATABASE {database} TO {user}",
        )


def _check_version(where: str, version: int) -> None:
    if version < OLDEST * 10_000:
        raise LedgerError(
            f"{where} is PostgreSQL {version // 10_000}", f"needed is {OLDEST}", hint="upgrade the server"
        )
