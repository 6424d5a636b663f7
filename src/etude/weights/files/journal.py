"""The redo journal of a checkpoint directory: the changes it is about to make.

They are absolute values, so repeating them after a kill gives the same files. A JSON header, then the lists, then a
SHA-256 of everything: `docs/formats/checkpoint_folder.md`.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

import msgspec
import numpy as np

from etude.records.completion import Version
from etude.weights.follow.head_tracker import FollowedPointer
from etude.weights.follow.live import Places
from etude.weights.tensors import Codes

MAGIC = b"etdj"
FORMAT = 1
_HEAD = struct.Struct("<4sHHI")
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Change:
    """A change of one tensor in a file: the codes (elements as unsigned integers) to write, and their places.

    `start`: offset of the tensor in the file, in bytes. `places`: ascending indices of the elements to write; None: all
    elements.
    """

    file: str
    start: int
    places: Places | None
    codes: Codes


@dataclass(frozen=True)
class Journal:
    """The version that the directory will have, and the steps to get there.

    `moves`: names of new, complete files that are renamed into place. `removes`: names of files to delete. `followed`:
    the store's pointer that led to the version, if known.
    """

    version: Version
    changes: list[Change] = field(default_factory=list)
    moves: list[str] = field(default_factory=list)
    removes: list[str] = field(default_factory=list)
    followed: FollowedPointer | None = None


class _Listed(msgspec.Struct, frozen=True):
    file: str
    start: int
    itemsize: int
    count: int
    whole: bool


class _Header(msgspec.Struct, frozen=True):
    version: Version
    changes: list[_Listed]
    moves: list[str]
    removes: list[str]
    followed: FollowedPointer | None = None


def write_journal(journal: Journal) -> bytes:
    """Encode a journal as the bytes of its file."""
    listed = [_Listed(c.file, c.start, c.codes.itemsize, c.codes.size, c.places is None) for c in journal.changes]
    header = msgspec.json.encode(_Header(journal.version, listed, journal.moves, journal.removes, journal.followed))
    parts = [_HEAD.pack(MAGIC, FORMAT, 0, len(header)), header]
    for change in journal.changes:
        if change.places is not None:
            parts.append(change.places.astype("<i8", copy=False).tobytes())
        parts.append(change.codes.astype(change.codes.dtype.newbyteorder("<"), copy=False).tobytes())
    body = b"".join(parts)
    return body + hashlib.sha256(body).digest()


def read_journal(data: bytes) -> Journal:
    """Decode a journal. Raises `ValueError` for bytes that `write_journal` did not write."""
    body, stored = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if len(data) < _HEAD.size + _DIGEST_BYTES or hashlib.sha256(body).digest() != stored:
        raise ValueError(f"its {len(data)} bytes do not match its digest")
    magic, form, flags, header_bytes = _HEAD.unpack_from(body)
    if (magic, form, flags) != (MAGIC, FORMAT, 0):
        raise ValueError(f"it is of format {form}.{flags}")
    at = _HEAD.size + header_bytes
    try:
        header = msgspec.json.decode(body[_HEAD.size : at], type=_Header)
    except (ValueError, RecursionError) as error:
        raise ValueError(str(error)) from None
    for name in (*(one.file for one in header.changes), *header.moves, *header.removes):
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"it names {name[:80]!r}, which is no file of the folder itself")
    changes = []
    for one in header.changes:
        if one.itemsize not in (1, 2, 4, 8) or one.count < 0 or one.start < 0:
            raise ValueError(f"a change of {one.count} elements of {one.itemsize} bytes at {one.start}")
        places = None
        if not one.whole:
            places = np.frombuffer(body, "<i8", one.count, at).astype(np.int64) if one.count else np.empty(0, np.int64)
            at += 8 * one.count
            if len(places) and (places[0] < 0 or not (places[1:] > places[:-1]).all()):
                raise ValueError(f"the places of a change of {one.file[:80]!r} do not ascend")
        codes = (
            np.frombuffer(body, f"<u{one.itemsize}", one.count, at) if one.count else np.empty(0, f"u{one.itemsize}")
        )
        at += one.itemsize * one.count
        changes.append(Change(one.file, one.start, places, codes.astype(f"u{one.itemsize}", copy=False)))
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes are left over")
    return Journal(header.version, changes, header.moves, header.removes, header.followed)
