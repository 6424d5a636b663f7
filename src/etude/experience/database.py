"""The interface between the ledger and its database, with helpers for SQL that SQLite and PostgreSQL share.

There are two implementations, which pass the same tests (`tests/contracts/test_ledger.py`): `sqlite` in the run folder,
and `postgres` on a server that runs share. The ledger's statements are written once, in SQL that both accept, with `?`
as the placeholder. This module knows nothing of the meaning of states."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs, urlsplit

from etude.errors import LedgerError

FORMAT = 3
"""Format number of the tables, the same in both databases."""
READABLE = ("1", "2")
"""Earlier formats, which can only be read, so that such a run cannot be resumed. In format 1 the rollouts are in the
ledger itself; in format 2 an outcome has a reward instead of terms."""
SERVERS = ("postgresql://", "postgres://")
AT_ONCE = 1000  # rows per statement
IN_ONE = 5_000  # values per statement

INDEXES = (
    "CREATE INDEX IF NOT EXISTS rollouts_by_state ON rollouts (state, position)",
    "CREATE INDEX IF NOT EXISTS rollouts_by_group ON rollouts (group_id)",
    "CREATE INDEX IF NOT EXISTS rollouts_held ON rollouts (group_id) WHERE state = 'held'",
    "CREATE INDEX IF NOT EXISTS rollouts_by_step ON rollouts (step)",
    "CREATE INDEX IF NOT EXISTS rollouts_open ON rollouts (group_id, position) WHERE batch_id IS NULL",
    "CREATE INDEX IF NOT EXISTS transitions_by_rollout ON transitions (rollout_id)",
)
"""Indexes with which every query of a live run reads open work only. Missing ones are created, also in ledgers of
earlier versions."""

T = TypeVar("T")


class NoLedger(LedgerError):
    """The ledger to be opened for reading does not exist."""


class Database(Protocol):
    """One connection to a ledger's database.

    It may be opened with a check, a function that runs before each outermost commit and prevents the commit by raising
    an error."""

    def transact(self, work: Callable[[], T], *, sync: bool = False) -> T:
        """Run `work` as one transaction and return its result: all of its statements take effect, or none.

        Calls may be nested; an inner one that fails undoes only its own changes. When the connection to a server
        breaks, the outermost `work` runs again from the start. With `sync` the commit is on disk when this returns, so
        that it survives a crash of the machine."""

    def execute(self, sql: str, *values: Any) -> None:
        """Run a statement that returns no rows.

        Its error may be raised by a later call of the same transaction. Outside `transact` it commits at once."""

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a query and return its rows."""

    def verify(self) -> None:
        """Read the whole database once. Raises `LedgerError` when it is damaged."""

    def close(self) -> None:
        """Close the connection; an open transaction is rolled back. Idempotent."""


def each(db: Database, sql: str, rows: Sequence[Sequence[Any]]) -> None:
    """Run a statement for many rows, `AT_ONCE` rows per round trip.

    `VALUES ?` in `sql` stands for the rows, whose columns are named column1, column2 … in both databases. The statement
    must cast columns that may be null."""
    for first in range(0, len(rows), AT_ONCE):
        some = rows[first : first + AT_ONCE]
        row = f"({marks(some[0])})"
        values = itertools.chain.from_iterable(some)
        db.execute(sql.replace("VALUES ?", f"VALUES {', '.join([row] * len(some))}"), *values)


def parts(values: Collection[T]) -> Iterator[tuple[T, ...]]:
    """Split values into parts of at most `IN_ONE`, each of which fits into one statement.

    A statement can have 32,766 values in SQLite and 65,535 in PostgreSQL. Yields nothing for no values.

    >>> [len(some) for some in parts(range(12_000))]
    [5000, 5000, 2000]
    """
    values = tuple(values)
    for first in range(0, len(values), IN_ONE):
        yield values[first : first + IN_ONE]


def marks(values: Collection[Any]) -> str:
    """Return a placeholder for each value, separated by commas.

    >>> marks(["a", "b"])
    '?, ?'
    """
    return ", ".join("?" * len(values))


def check_url(url: str) -> None:
    """Check the URL of a PostgreSQL server in a config.

    Raises `ValueError` for another scheme, a fragment or a password. The message contains no secret."""
    try:
        parts = urlsplit(url)
        options = parse_qs(parts.query)
        _ = parts.port
    except ValueError:
        raise ValueError("experience.ledger cannot be read: write 'postgresql://host/database'") from None
    if not url.startswith(SERVERS) or parts.fragment:
        raise ValueError(
            "experience.ledger is '' for a file in the run folder, or 'postgresql://host/database' "
            "(further libpq options in its query: '?service=NAME')"
        )
    if parts.password is not None or any(re.search("passw", name) for name in options):
        raise ValueError(
            "experience.ledger contains a password, and a run stores its config: remove it and use PGPASSWORD, "
            "~/.pgpass or a service file instead"
        )


def check_format(where: object, found: Any, *, readonly: bool) -> None:
    """Check the format number of a ledger's tables.

    `where`: the place of the ledger, for the message. `found`: the stored number as text, or None. Raises `LedgerError`
    if this etude version cannot write the format, or, with `readonly`, cannot read it."""
    if found != str(FORMAT) and not (readonly and found in READABLE):
        raise LedgerError(
            f"{where} has ledger format {found}",
            f"this version of etude writes format {FORMAT}, and reads {', '.join(READABLE)} and {FORMAT}",
            hint="use the etude version that wrote the run",
        )
