"""A CRC for each row of an SQLite ledger, so that a value that the disk altered is found: SQLite itself has none.

They are in a table of their own, by table and rowid, and are written by triggers of the writer's connection, which
are not in the file, so any other program reads it as ever. A row without its CRC and a CRC without its row are damage,
too.
Knows nothing of what the rows mean.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator

SUMS = "row_sums"
FORMER = "sums"  # CRCs of another form, in ledgers of an earlier etude
TABLE = f"""
CREATE TABLE {SUMS} (
    name TEXT NOT NULL,
    row INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (name, row)
) STRICT, WITHOUT ROWID;
"""


def row_crc(*values: object) -> int:
    """CRC-32 over a row's values as Python writes them, which tells types and ends apart. In one piece: this is done
    a dozen times a rollout.

    >>> row_crc("a", 1) != row_crc("a1") != row_crc("a", 2) != row_crc("a", "2")
    True
    """
    return zlib.crc32(repr(values).encode())


def has_sums(connection: sqlite3.Connection) -> bool:
    """Whether rows have CRCs: those of a ledger of an earlier etude have none."""
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (SUMS,)).fetchone())


def keep_sums(connection: sqlite3.Connection) -> None:
    """Have every change through this connection change the CRCs with it; make those that are missing altogether."""
    connection.create_function("etude_row_crc", -1, row_crc, deterministic=True)
    if not has_sums(connection):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(TABLE)
        connection.execute(f"DROP TABLE IF EXISTS {FORMER}")
        for table, columns in _tables(connection):
            crc = f"SELECT '{table}', rowid, etude_row_crc({', '.join(columns)}) FROM {table}"
            connection.execute(f"INSERT INTO {SUMS} {crc}")
        connection.execute("COMMIT")
    for table, columns in _tables(connection):
        new = ", ".join(f"NEW.{column}" for column in columns)
        drop = f"DELETE FROM {SUMS} WHERE name = '{table}' AND row = OLD.rowid;"
        put = (
            f"INSERT INTO {SUMS} VALUES ('{table}', NEW.rowid, etude_row_crc({new}))"
            " ON CONFLICT (name, row) DO UPDATE SET crc = excluded.crc;"
        )
        for event, work in (("INSERT", put), ("UPDATE", put), ("DELETE", drop)):
            connection.execute(f"CREATE TEMP TRIGGER {table}_{event} AFTER {event} ON main.{table} BEGIN {work} END")


def wrong_rows(connection: sqlite3.Connection) -> Iterator[str]:
    """Every row that is not what was written, in words. Read in one transaction: what a writer does meanwhile is not
    seen."""
    for table, columns in _tables(connection):
        sql = (
            f"SELECT t.rowid, s.crc, {', '.join(f't.{column}' for column in columns)} FROM {table} AS t"
            f" LEFT JOIN {SUMS} AS s ON s.name = '{table}' AND s.row = t.rowid"
        )
        for row, crc, *values in connection.execute(sql):
            if crc is None:
                yield f"row {row} of {table} has no checksum"
            elif crc != row_crc(*values):
                yield f"row {row} of {table} is not what was written"
        lost = f"SELECT row FROM {SUMS} WHERE name = ? AND row NOT IN (SELECT rowid FROM {table})"
        for (row,) in connection.execute(lost, (table,)):
            yield f"row {row} of {table} is gone"


def _tables(connection: sqlite3.Connection) -> list[tuple[str, list[str]]]:
    """Every table but that of the CRCs, and its columns."""
    sql = "SELECT name FROM main.sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' AND name NOT IN (?, ?)"
    names = [name for (name,) in connection.execute(sql, (SUMS, FORMER))]
    return [(name, [row[1] for row in connection.execute(f"PRAGMA main.table_info({name})")]) for name in sorted(names)]
