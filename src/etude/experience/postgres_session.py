"""A session on a ledger's PostgreSQL server: the connection, and the lock that makes it the schema's only writer.

Every wait has a deadline. The server limits the time of a statement itself. When it neither answers nor closes the
connection, a watchdog thread shuts the socket. Whatever breaks the connection raises `ConnectionBroken`, and the caller
decides what to do. This module knows nothing of transactions and tables."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg

from etude.errors import LedgerError
from etude.experience.postgres_errors import ANSWER_S, CONNECT_S, LOCK_S, map_error, one_line

T = TypeVar("T")
POLL_S = 0.2
GRACE_S = 3.0  # for the server to notice that the previous conductor is gone
PATIENCE_S = 5.0  # after ANSWER_S, the server's own limit of a statement
_HOLDER = (
    "SELECT a.pid, coalesce(a.application_name, 'another user''s'), coalesce(host(a.client_addr), 'the server''s host')"
    " FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' AND l.granted"
    " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND (l.classid::bigint << 32) | l.objid::bigint = ?"
)


class ConnectionBroken(Exception):
    """The connection to the server broke. The caller may open it again."""


class Session:
    """A connection to one schema of a ledger's PostgreSQL server. It can be opened again after it broke.

    `url`: for libpq. `where`: the server, as messages name it. It starts a watchdog thread, so call `close` at the end.
    """

    def __init__(self, url: str, where: str, schema: str, *, readonly: bool) -> None:
        self.url, self.where, self.schema, self.readonly = url, where, schema, readonly
        self.name = secrets.token_hex(6)
        self._key = int.from_bytes(hashlib.sha256(schema.encode()).digest()[:8], "big") >> 1
        self._watch = _Watchdog()
        self._connections: list[psycopg.Connection[Any]] = []  # one, or none

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The open connection. Raises `IndexError` if there is none."""
        return self._connections[0]

    @property
    def is_open(self) -> bool:
        """Whether there is a connection that is not closed."""
        return bool(self._connections) and not self.connection.closed

    def open(self) -> None:
        """Open a new connection and take the writer's lock, unless the session is read-only.

        Raises `ConnectionBroken`, psycopg errors, and `LedgerError` when another conductor has the lock."""
        self.disconnect()
        name = f"etude {self.name} {socket.gethostname()[:24]}:{os.getpid()}"
        connection = psycopg.connect(
            self.url,
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
            "plan_cache_mode": "force_custom_plan",  # generic plans would read all history
            "tcp_keepalives_idle": "10",
            "tcp_keepalives_interval": "5",
            "tcp_keepalives_count": "3",
            "default_transaction_read_only": "on" if self.readonly else "off",
        }
        self.run("; ".join(f"SET {name} = '{value}'" for name, value in settings.items()))
        if not self.readonly:
            self._lock()

    def disconnect(self) -> None:
        """Close the connection, which may be opened again. Idempotent."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def _lock(self) -> None:
        """Take the writer's lock. An earlier session of this process that the server still has is terminated."""
        until = time.monotonic() + GRACE_S
        while not self.query("SELECT pg_try_advisory_lock(?)", (self._key,))[0][0]:
            held = self.query(_HOLDER, (self._key,))
            mine = bool(held) and self.name in held[0][1]
            if mine:
                self.run("SELECT pg_terminate_backend(?)", (held[0][0],))
            if mine and time.monotonic() > until:
                raise ConnectionBroken("the previous session still has the lock")
            if held and time.monotonic() > until:
                raise LedgerError(
                    f"{self.where} is written by another conductor",
                    f"{held[0][1]}, from {held[0][2]}",
                    hint="a run has one conductor: stop the other one, or use another run folder",
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        """Close the connection and stop the watchdog."""
        self._watch.close()
        self.disconnect()

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run the statement `sql`, with `values` for its placeholders `?`, and return its rows."""
        return self._guarded(self.run(sql, values).fetchall)

    def run(self, sql: str, values: Sequence[Any] = ()) -> psycopg.Cursor[Any]:
        """Run a statement, or several without values, and return the cursor.

        Raises `ConnectionBroken` when the connection broke, and `LedgerError` or `StoreError` when the server rejects
        it."""
        if not self._connections:
            raise ConnectionBroken("not connected")
        text, given = sql.replace("?", "%s").encode(), tuple(map(_plain, values)) if values else None
        return self._guarded(lambda: self.connection.cursor(binary=bool(values)).execute(text, given))

    @contextmanager
    def pipelined(self) -> Iterator[None]:
        """Send the statements of the `with` block in a pipeline, so that a transaction takes about four round trips.

        Statements without a result are sent together with the next one that has a result. When the block ends, the
        server has answered all of them."""
        if not self._connections:
            raise ConnectionBroken("not connected")
        pipeline = self.connection.pipeline()
        self._guarded(pipeline.__enter__)
        try:
            yield
        except BaseException as error:
            with suppress(psycopg.Error), self._watch:
                pipeline.__exit__(type(error), error, error.__traceback__)
            raise
        self._guarded(lambda: pipeline.__exit__(None, None, None))

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            with self._watch:
                return work()
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            if self.connection.closed or (error.sqlstate or "").startswith("57P"):
                raise ConnectionBroken(one_line(error)) from error
            raise map_error(self.where, error) from error
        except psycopg.Error as error:
            raise map_error(self.where, error) from error


class _Watchdog:
    """Context manager that shuts the socket when the server neither answers nor closes the connection in time."""

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
                with socket.socket(fileno=os.dup(self._connection.fileno())) as wire:
                    wire.shutdown(socket.SHUT_RDWR)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value  # a member of a string enum as plain text
