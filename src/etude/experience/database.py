"""What the ledger asks of a database, and which one stands behind a place: a path, or a server's URL.

Two implement it and pass one suite (`tests/contracts/test_ledger.py`): `sqlite` in the run folder, `postgres` on a
server that runs share. The ledger's statements are written once, in the SQL that both read, with `?` for a value.
Knows nothing of what a state means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs, urlsplit

from etude.errors import LedgerError

FORMAT = 2
"""Of the tables, the same in both."""
READABLE = ("1",)
"""Earlier formats that can be looked at: rollouts lay in the ledger, so a run cannot go on with one."""
SERVERS = ("postgresql://", "postgres://")
AT_ONCE = 1000  # rows of values in one statement
IN_ONE = 5_000  # values in one statement

INDEXES = (
    "CREATE INDEX IF NOT EXISTS rollouts_by_state ON rollouts (state, position)",
    "CREATE INDEX IF NOT EXISTS rollouts_by_group ON rollouts (group_id)",
    "CREATE INDEX IF NOT EXISTS rollouts_by_step ON rollouts (step)",
    "CREATE INDEX IF NOT EXISTS rollouts_open ON rollouts (group_id, position) WHERE batch_id IS NULL",
    "CREATE INDEX IF NOT EXISTS transitions_by_rollout ON transitions (rollout_id)",
)
"""Each question that is asked while a run goes on looks at open work only; made where they are missing, so that a
ledger of an earlier etude has them, too."""

T = TypeVar("T")


class NoLedger(LedgerError):
    """There is none at the place that was opened to be read."""


class Database(Protocol):
    """One connection. The check that it was opened with runs before each outermost commit and may refuse it."""

    def transact(self, work: Callable[[], T], *, sync: bool = False) -> T:
        """All of `work`'s statements, or none; nested: an inner one that fails undoes only itself. A server that went
        away in between has an outermost `work` run again from its beginning. `sync`: on the disk when it returns,
        whatever happens to the machine."""
        ...

    def execute(self, sql: str, *values: Any) -> None:
        """One statement that answers nothing; what it fails with may be raised by a later call of the transaction.
        Outside `transact` it commits by itself."""
        ...

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]: ...

    def prove(self) -> None:
        """Walk everything once. Raises `LedgerError` where it is damaged."""
        ...

    def close(self) -> None:
        """Idempotent. An open transaction is undone."""
        ...


def each(db: Database, sql: str, rows: Sequence[Sequence[Any]]) -> None:
    """One statement for many rows, as many round trips as for one. `VALUES ?` stands for all of them; a query over
    them calls their columns column1, column2 …, in both databases, and casts what may be null."""
    for first in range(0, len(rows), AT_ONCE):
        some = rows[first : first + AT_ONCE]
        row = f"({marks(some[0])})"
        values = (value for one in some for value in one)
        db.execute(sql.replace("VALUES ?", f"VALUES {', '.join([row] * len(some))}"), *values)


def parts(values: Collection[T]) -> Iterator[tuple[T, ...]]:
    """Values for several statements, none of which has more than a database takes in one: SQLite 32,766, PostgreSQL
    65,535. None for no values.

    >>> [len(some) for some in parts(range(12_000))]
    [5000, 5000, 2000]
    """
    values = tuple(values)
    for first in range(0, len(values), IN_ONE):
        yield values[first : first + IN_ONE]


def marks(values: Collection[Any]) -> str:
    """A place for each value.

    >>> marks(["a", "b"])
    '?, ?'
    """
    return ", ".join("?" * len(values))


def open_database(
    place: Path | str,
    *,
    readonly: bool = False,
    still: bool = False,
    check: Callable[[], None] | None = None,
    said: Callable[[str], None],
) -> Database:
    """A path is an SQLite file, `postgresql://host/db#run_id` a schema on a server (`pip install 'etude[postgres]'`).
    One that is not there is made, or with `readonly` a `NoLedger`; `still`: nobody writes it meanwhile, so SQLite makes
    no files beside it in order to read. `said` is told of a server that was waited for."""
    if is_server(place):
        try:
            from etude.experience.postgres import PostgresDatabase
        except ImportError as error:
            raise _no_client(error) from None
        return PostgresDatabase(str(place), readonly=readonly, check=check, said=said)
    from etude.experience.sqlite import SqliteDatabase

    return SqliteDatabase(Path(place), readonly=readonly, still=still, check=check)


def check_server(url: str) -> None:
    """Raise what a run would end with whose config names this server: it is not there, lets nobody in, gives no right
    to make a schema."""
    try:
        from etude.experience.server_words import check
    except ImportError as error:
        raise _no_client(error) from None
    check(url)


def _no_client(error: ImportError) -> LedgerError:
    hint = "pip install 'etude[postgres]'"
    return LedgerError("experience.ledger names a PostgreSQL server", str(error), hint=hint)


def is_server(place: Path | str) -> bool:
    """Whether a place is a server's URL.

    >>> is_server("postgresql://db.internal/etude#laptop-1a2b3c4d"), is_server(Path("ledger.sqlite"))
    (True, False)
    """
    return isinstance(place, str) and place.startswith(SERVERS)


def check_url(url: str) -> None:
    """Raise `ValueError` for a server that a config may not name. The message quotes no secret."""
    try:
        parts = urlsplit(url)
        options = parse_qs(parts.query)
        _ = parts.port
    except ValueError:
        raise ValueError("experience.ledger cannot be read: write 'postgresql://host/database'") from None
    if not url.startswith(SERVERS) or parts.fragment:
        raise ValueError(
            "experience.ledger is '' for a file in the run folder, or 'postgresql://host/database' "
            "(more in its query, as libpq has it: '?service=NAME')"
        )
    if parts.password is not None or any(re.search("passw", name) for name in options):
        raise ValueError(
            "experience.ledger holds a password, and a run writes its config down: leave it out and put it into "
            "PGPASSWORD, ~/.pgpass or a service file"
        )


def check_format(where: object, found: Any, *, readonly: bool) -> None:
    """Raise `LedgerError` unless the tables are those that this etude writes; or reads, where it only does that."""
    if found != str(FORMAT) and not (readonly and found in READABLE):
        raise LedgerError(
            f"{where} has ledger format {found}",
            f"this etude reads {FORMAT}",
            hint="use the etude version that wrote the run",
        )
