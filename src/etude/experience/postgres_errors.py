"""What a ledger's server refuses, and why it does not answer: in words, with what to do. Quotes no secret."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import psycopg

from etude.errors import EtudeError, LedgerError, StoreError

OLDEST = 13
CONNECT_S, ANSWER_S, LOCK_S = 10, 60.0, 10


def redacted_url(url: str) -> str:
    """A server's URL as it may be told: without user, password and options.

    >>> redacted_url("postgresql://me:secret@db:5433/etude?sslmode=require")
    'postgresql://db:5433/etude'
    """
    parts = urlsplit(url)
    return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"


def one_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def is_transient(error: BaseException) -> bool:
    """Whether a failed connection may come right by itself: a server that starts, or is not there for now."""
    return not re.search(r"authentication|password|does not exist|permission denied|pg_hba", str(error))


def connection_error(where: str, error: BaseException) -> EtudeError:
    """Why a connection could not be opened at first."""
    if isinstance(error, psycopg.Error) and (error.sqlstate or "")[:2] == "42":
        return map_error(where, error)
    if not is_transient(error):
        return LedgerError(
            f"{where} lets nobody in as this user",
            one_line(error),
            hint="give user and database in the URL, the password in PGPASSWORD, ~/.pgpass or a service file",
        )
    return StoreError(
        f"the ledger's server at {where} does not answer",
        one_line(error),
        hint="start it, or correct experience.ledger; '' keeps the ledger in the run folder",
    )


def map_error(where: str, error: psycopg.Error) -> EtudeError:
    """What a server refused."""
    state, text = error.sqlstate or "", error.diag.message_primary or one_line(error)
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
        raise connection_error(redacted_url(url), error) from None
    check_version(redacted_url(url), version)
    if not may:
        raise LedgerError(
            f"{redacted_url(url)} gives {user} no right to make a run's schema",
            f"in database {database}",
            hint=f"as its owner: GRANT CREATE ON DATABASE {database} TO {user}",
        )


def check_version(where: str, version: int) -> None:
    """`version` is libpq's: 130004 for 13.4. Raises `LedgerError`."""
    if version < OLDEST * 10_000:
        raise LedgerError(
            f"{where} is PostgreSQL {version // 10_000}", f"needed is {OLDEST}", hint="upgrade the server"
        )
