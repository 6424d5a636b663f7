"""Integrity of an SQLite ledger: a CRC per row, and damage in its write-ahead log.

SQLite itself has no checksums of data. The CRCs are in a table of their own, by table and rowid. They are written by
temporary triggers of the writer's connection, so that any other program can still read the file. A row without a CRC
and a CRC without a row count as damage.

SQLite takes the first frame of the log with a wrong checksum for its end, since a torn write looks like this. A flipped
bit in the middle looks the same, and the committed frames behind it are dropped without an error. Here damage is
recognised by later frames of the same generation (equal salts). See https://www.sqlite.org/fileformat2.html#walformat.
This module knows nothing of the meaning of rows."""

from __future__ import annotations

import sqlite3
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

SUMS = "row_sums"
FORMER = "sums"  # CRCs of another form, in ledgers of earlier versions
TABLE = f"""
CREATE TABLE {SUMS} (
    name TEXT NOT NULL,
    row INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (name, row)
) STRICT, WITHOUT ROWID;
"""


def row_crc(*values: object) -> int:
    """Return the CRC-32 of a row's values. The CRC depends on the types of the values and on where one value ends and
    the next begins.

    >>> row_crc("a", 1) != row_crc("a1") != row_crc("a", 2) != row_crc("a", "2")
    True
    """
    return zlib.crc32(repr(values).encode())


def has_sums(connection: sqlite3.Connection) -> bool:
    """Return whether rows have CRCs; in ledgers of earlier versions they have none."""
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (SUMS,)).fetchone())


def keep_sums(connection: sqlite3.Connection) -> None:
    """Keep a CRC of every row in a table of CRCs: triggers update it at each change through this connection.

    If the table is missing, create it with the CRCs of all present rows. Call this once per connection."""
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
    """Yield a sentence for every damaged row. Reads in one transaction, so it does not see concurrent writes."""
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
            yield f"row {row} of {table} is missing"


def _tables(connection: sqlite3.Connection) -> list[tuple[str, list[str]]]:
    """Return all tables except that of the CRCs, with their columns."""
    sql = "SELECT name FROM main.sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' AND name NOT IN (?, ?)"
    names = [name for (name,) in connection.execute(sql, (SUMS, FORMER))]
    return [(name, [row[1] for row in connection.execute(f"PRAGMA main.table_info({name})")]) for name in sorted(names)]


# The write-ahead log


_HEADER, _FRAME = 32, 24
_MAGIC = (0x377F0682, 0x377F0683)  # checksums of little-endian, of big-endian words


def lost_frames(database: Path) -> str:
    """Return a sentence on the damage in a database's write-ahead log; "" if there is no damage or no log.

    A writer may restart the log while it is read, so damage is confirmed by a second read."""
    found = _find_damage(database)
    return found if found and _find_damage(database) == found else ""


def _find_damage(database: Path) -> str:
    try:
        data = Path(f"{database}-wal").read_bytes()
    except FileNotFoundError:
        return ""
    if len(data) < _HEADER + _FRAME:
        return ""
    magic, _, page, _, *salts, one, two = struct.unpack(">8I", data[:_HEADER])
    if magic not in _MAGIC or not 512 <= page <= 65536 or page & (page - 1):
        return f"the header of {database}-wal is damaged"
    order = "<" if magic == _MAGIC[0] else ">"
    sums = _checksum(data[: _HEADER - 8], order, (0, 0))
    if sums != (one, two):
        return f"the header of {database}-wal is damaged"
    starts = range(_HEADER, len(data) - _FRAME - page + 1, _FRAME + page)
    for start in starts:
        _, _, *found, one, two = struct.unpack(">6I", data[start : start + _FRAME])
        if found == salts:
            sums = _checksum(data[start : start + 8], order, sums)
            sums = _checksum(data[start + _FRAME : start + _FRAME + page], order, sums)
        if found != salts or sums != (one, two):
            later = [at for at in starts if at > start and data[at + 8 : at + 16] == struct.pack(">2I", *salts)]
            return f"{database}-wal is damaged at byte {start}, before {len(later)} more frames" if later else ""
    return ""


def _checksum(data: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    one, two = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for first, second in zip(words[::2], words[1::2], strict=True):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return one, two
