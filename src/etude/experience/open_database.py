"""Open a ledger's database: an SQLite file, or a schema on a PostgreSQL server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from etude.errors import LedgerError
from etude.experience.database import SERVERS, Database


def open_database(
    place: Path | str,
    *,
    readonly: bool = False,
    immutable: bool = False,
    check: Callable[[], None] | None = None,
    log: Callable[[str], None],
) -> Database:
    """Open a ledger's database: an SQLite file at a path, or a schema of a PostgreSQL server.

    `place`: a path, or `postgresql://host/db#run_id`, which needs `pip install 'etude[postgres]'`. A database that does
    not exist is created; with `readonly`, `NoLedger` is raised instead. `immutable`: promises that nothing writes it
    meanwhile, so SQLite creates no files beside it for reading. `check` runs before each outermost commit. `log` is
    called with a line when the server was unreachable for a while."""
    if is_server(place):
        try:
            from etude.experience.postgres import PostgresDatabase
        except ImportError as error:
            raise _no_client(error) from None
        return PostgresDatabase(str(place), readonly=readonly, check=check, log=log)
    from etude.experience.sqlite import SqliteDatabase

    return SqliteDatabase(Path(place), readonly=readonly, immutable=immutable, check=check)


def check_server(url: str) -> None:
    """Check that a run can use this server.

    Raises the `LedgerError` or `StoreError` with which the run would fail: the server cannot be reached, rejects the
    login, or does not allow to create a schema."""
    try:
        from etude.experience.postgres_errors import check
    except ImportError as error:
        raise _no_client(error) from None
    check(url)


def _no_client(error: ImportError) -> LedgerError:
    hint = "pip install 'etude[postgres]'"
    return LedgerError("experience.ledger names a PostgreSQL server", str(error), hint=hint)


def is_server(place: Path | str) -> bool:
    """Return whether the location of a ledger is a server's URL, not a path.

    >>> is_server("postgresql://db.internal/etude#laptop-1a2b3c4d"), is_server(Path("ledger.sqlite"))
    (True, False)
    """
    return isinstance(place, str) and place.startswith(SERVERS)
