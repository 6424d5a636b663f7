"""Maps the errors of a ledger's PostgreSQL server to etude's errors with hints. Messages contain no secret."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import psycopg

from etude.errors import EtudeError, LedgerError, StoreError

OLDEST = 13
CONNECT_S, ANSWER_S, LOCK_S = 10, 60.0, 10


def redacted_url(url: str) -> str:
    """Return a server's URL without user, password and options.

    >>> redacted_url("postgresql://me:secret@db:5433/etude?sslmode=require")
    'postgresql://db:5433/etude'
    """
    parts = urlsplit(url)
    return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"


def one_line(error: BaseException) -> str:
    """Return the message of an error as one line of at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def is_transient(error: BaseException) -> bool:
    """Return whether a failed connection may succeed later: the server may be starting or unreachable."""
    return not re.search(r"authentication|password|does not exist|permission denied|pg_hba", str(error))


def connection_error(where: str, error: BaseException) -> EtudeError:
    """Return the error to raise when the first connection failed.

    It is a `LedgerError` if the server rejects the login, and a `StoreError` if it does not answer. `where`: the
    server, as the message names it (`redacted_url`)."""
    if isinstance(error, psycopg.Error) and (error.sqlstate or "")[:2] == "42":
        return map_error(where, error)
    if not is_transient(error):
        return LedgerError(
            f"{where} rejected the login of this user",
            one_line(error),
            hint="give user and database in the URL, the password in PGPASSWORD, ~/.pgpass or a service file",
        )
    return StoreError(
        f"the ledger's server at {where} does not answer",
        one_line(error),
        hint="start it, or correct experience.ledger; '' keeps the ledger in the run folder",
    )


def map_error(where: str, error: psycopg.Error) -> EtudeError:
    """Return the error to raise when the server rejected an SQL statement.

    It is a `StoreError` if the server lacks resources or has a system error (SQLSTATE classes 53 and 58), else a
    `LedgerError`. `where`: the server, as the message names it."""
    state, text = error.sqlstate or "", error.diag.message_primary or one_line(error)
    if state == "42501":
        hint = "as the owner: GRANT CREATE ON DATABASE ... TO the run's user, or create the schema for it"
        return LedgerError(f"this user lacks permissions at {where}", text, hint=hint)
    if state in ("55P03", "57014"):
        hint = "another session has a lock on its tables: see pg_stat_activity on the server"
        return LedgerError(f"waited {LOCK_S if state == '55P03' else ANSWER_S:g} s for {where}", text, hint=hint)
    if state == "25006":
        return LedgerError(f"{where} is read-only", text, hint="connect to the primary server, not to a standby")
    if state[:2] in ("53", "58"):
        return StoreError(f"{where} cannot be written", text, hint="free the server's disk, then etude run --resume")
    return LedgerError(f"{where} is not a valid ledger", text, hint="restore the schema from a copy")


def check(url: str) -> None:
    """Check that a run can keep its ledger on this server.

    Raises `StoreError` when it does not answer, and `LedgerError` when it rejects the login, is too old, or does not
    allow to create a schema."""
    try:
        with psycopg.connect(url, connect_timeout=CONNECT_S, application_name="etude preflight") as connection:
            sql = "SELECT has_database_privilege(current_database(), 'CREATE'), current_database(), current_user"
            may, database, user = connection.execute(sql).fetchall()[0]
            version = connection.info.server_version
    except psycopg.Error as error:
        raise connection_error(redacted_url(url), error) from None
    check_version(redacted_url(url), version)
    if not may:
        raise LedgerError(
            f"{user} may not create schemas at {redacted_url(url)}",
            f"in database {database}",
            hint=f"as the owner: GRANT CREATE ON DATABASE {database} TO {user}",
        )


def check_version(where: str, version: int) -> None:
    """Raise `LedgerError` when the server is too old. `version` is in libpq's form: 130004 is 13.4."""
    if version < OLDEST * 10_000:
        raise LedgerError(
            f"{where} runs PostgreSQL {version // 10_000}", f"it must be {OLDEST} or later", hint="upgrade the server"
        )
