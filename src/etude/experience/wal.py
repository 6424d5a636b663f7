"""Reads an SQLite write-ahead log for damage that SQLite takes for its end.

SQLite stops at the first frame whose checksum does not fit, without a word: it is how a torn write ends. A flipped bit
in the middle looks the same, and what was committed behind it is dropped. Here such a frame is told from the end by the
frames of the same generation (equal salts) behind it. See https://www.sqlite.org/fileformat2.html#walformat.
"""

from __future__ import annotations

import struct
from pathlib import Path

_HEADER, _FRAME = 32, 24
_MAGIC = (0x377F0682, 0x377F0683)  # checksums of little-endian, of big-endian words


def lost_frames(database: Path) -> str:
    """What is damaged in a database's log, in words; empty where nothing is, or where there is no log. A writer may
    begin the log anew while it is read, so what is found is looked at twice."""
    found = _look(database)
    return found if found and _look(database) == found else ""


def _look(database: Path) -> str:
    try:
        data = Path(f"{database}-wal").read_bytes()
    except FileNotFoundError:
        return ""
    if len(data) < _HEADER + _FRAME:
        return ""
    magic, _, page, _, *salts, one, two = struct.unpack(">8I", data[:_HEADER])
    if magic not in _MAGIC or not 512 <= page <= 65536 or page & (page - 1):
        return f"the head of {database}-wal is damaged"
    order = "<" if magic == _MAGIC[0] else ">"
    sums = _added(data[: _HEADER - 8], order, (0, 0))
    if sums != (one, two):
        return f"the head of {database}-wal is damaged"
    starts = range(_HEADER, len(data) - _FRAME - page + 1, _FRAME + page)
    for start in starts:
        _, _, *found, one, two = struct.unpack(">6I", data[start : start + _FRAME])
        if found == salts:
            sums = _added(data[start : start + 8], order, sums)
            sums = _added(data[start + _FRAME : start + _FRAME + page], order, sums)
        if found != salts or sums != (one, two):
            later = [at for at in starts if at > start and data[at + 8 : at + 16] == struct.pack(">2I", *salts)]
            return f"{database}-wal is damaged at byte {start}, and {len(later)} frames lie behind" if later else ""
    return ""


def _added(data: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    one, two = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for first, second in zip(words[::2], words[1::2], strict=True):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return one, two
