"""Reads and writes delta files (`.etdf`): a complete delta in one file.

A file has a head, a table of tensors, a note, delta objects, and a SHA-256 of everything before it.
`docs/formats/delta_file.md` defines every field. This module handles only the container; `codec` encodes the objects.
Channels do not use this format, since their manifests contain the same information. It is for users who move deltas by
themselves.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from etude.errors import WeightsError
from etude.weights.delta.checksums import CHECKSUM_BYTES
from etude.weights.tensors import DTYPES, MAX_DIMENSIONS, Spec

MAGIC = b"etdf"
FORMAT = 2
MAX_ENTRIES = 1 << 22
MAX_TABLE_BYTES = 1 << 30
MAX_NOTE_BYTES = 1 << 28
MAX_NAME_BYTES = 512
DIGEST_BYTES = 32

_HEAD = struct.Struct("<4sHHIIII")
_OBJECT = struct.Struct("<QI")


class Kind(enum.IntEnum):
    """How a tensor differs between the base and the target of a delta.

    SAME: not at all. CHANGED: same dtype and shape, other bits; stored as a delta. NEW, REMOVED: only the target or
    only the base has it. REPLACED: another dtype or shape; stored in full.
    """

    SAME = 0
    CHANGED = 1
    NEW = 2
    REMOVED = 3
    REPLACED = 4


@dataclass(frozen=True)
class Entry:
    """One tensor in the table of a delta file: of the base (`old`), of the target (`new`), or of both.

    Spec and checksum (`checksums.checksum`, 32 hex characters) are None on a side that lacks the tensor. `same`: no bit
    changes, so both sides have the same spec and checksum.
    """

    name: str
    old: Spec | None
    old_checksum: str | None
    new: Spec | None
    new_checksum: str | None
    same: bool = False

    @property
    def kind(self) -> Kind:
        """How the tensor differs between base and target."""
        if self.old is None:
            return Kind.NEW
        if self.new is None:
            return Kind.REMOVED
        if self.old != self.new:
            return Kind.REPLACED
        return Kind.SAME if self.same else Kind.CHANGED

    @property
    def coded(self) -> bool:
        """Whether an object of the file contains data of this tensor."""
        return self.kind in (Kind.CHANGED, Kind.NEW, Kind.REPLACED)


@dataclass(frozen=True)
class DeltaFile:
    """A parsed delta file whose SHA-256 was verified. Its objects (groups of encoded tensors) are not decoded.

    `entries`: one per tensor, sorted by name. `note`: bytes for the program that wrote the file. `objects`: for each
    object, the number of entries whose data it contains, and its bytes.
    """

    entries: tuple[Entry, ...]
    note: bytes
    objects: tuple[tuple[int, memoryview], ...]

    @property
    def target_bytes(self) -> int:
        """Size of all tensors of the target, in bytes."""
        return sum(entry.new.num_bytes for entry in self.entries if entry.new)


def write_head(entries: Sequence[Entry], note: bytes, num_objects: int) -> bytes:
    """Encode the part of a delta file before its first object: header, table of tensors, and note.

    Raises `WeightsError` if a limit of the format is exceeded."""
    table = b"".join(map(_write_entry, entries))
    for what, size, limit in (
        ("tensors", len(entries), MAX_ENTRIES),
        ("bytes of table", len(table), MAX_TABLE_BYTES),
        ("bytes of note", len(note), MAX_NOTE_BYTES),
    ):
        if size > limit:
            raise WeightsError(
                f"a delta file cannot have {size} {what}",
                f"the limit is {limit}",
                hint="split the tensors over several files",
            )
    return _HEAD.pack(MAGIC, FORMAT, 0, len(entries), num_objects, len(table), len(note)) + table + note


def write_object_head(num_bytes: int, num_tensors: int) -> bytes:
    """Encode the prefix of a group of tensors in a delta file: its size in bytes, and the number of tensors in it."""
    return _OBJECT.pack(num_bytes, num_tensors)


def read(data: bytes | memoryview) -> DeltaFile:
    """Parse a delta file and verify its SHA-256. The objects are views of `data`, not copies.

    Raises `WeightsError` for bytes that are not a delta file, or a damaged one.
    """
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size + DIGEST_BYTES:
        raise damaged(f"it has {len(view)} bytes, fewer than any delta file", cut=True)
    magic, form, flags, num_entries, num_objects, table_bytes, note_bytes = _HEAD.unpack(view[: _HEAD.size])
    if magic != MAGIC:
        raise WeightsError(
            "this is not a delta file",
            f"it starts with {bytes(magic)!r}, not {MAGIC!r}",
            hint="give bytes that `etude.weights.delta.encode` returned, or a file that `etude weights encode` wrote",
        )
    if form != FORMAT or flags:
        older = form < FORMAT and not flags
        raise WeightsError(
            f"the delta file has format {form}.{flags}",
            f"this version of etude supports format {FORMAT}.0",
            hint="encode it again, or read it with the version of etude that wrote it"
            if older
            else "update etude on this machine",
        )
    body, stored = view[:-DIGEST_BYTES], view[-DIGEST_BYTES:]
    found = hashlib.sha256(body)
    if found.digest() != stored:
        raise damaged("the SHA-256 of its bytes is not the one at its end", cut=True)
    if num_entries > MAX_ENTRIES or table_bytes > MAX_TABLE_BYTES or note_bytes > MAX_NOTE_BYTES:
        raise damaged(f"{num_entries} tensors in {table_bytes} bytes and a note of {note_bytes} are over the limits")
    reader = _Reader(body, _HEAD.size)
    table = _Reader(reader.take(table_bytes), 0)
    entries = tuple(_read_entry(table) for _ in range(num_entries))
    table.end()
    names = [entry.name.encode() for entry in entries]
    if any(a >= b for a, b in pairwise(names)):
        raise damaged("its names are not sorted")
    note = bytes(reader.take(note_bytes))
    objects = []
    for _ in range(num_objects):
        num_bytes, num_tensors = _OBJECT.unpack(reader.take(_OBJECT.size))
        objects.append((num_tensors, reader.take(num_bytes)))
    reader.end()
    if sum(count for count, _ in objects) != sum(entry.coded for entry in entries):
        raise damaged("its objects do not cover its tensors")
    return DeltaFile(entries, note, tuple(objects))


def damaged(facts: str, *, cut: bool = False) -> WeightsError:
    """Create the error for a damaged delta file.

    `facts`: what is wrong. `cut`: its digest or length is wrong, so it was probably truncated or altered.
    """
    hint = "copy the file again: it was cut off or altered" if cut else "encode it again: etude did not write this file"
    return WeightsError("the delta file is damaged", facts, hint=hint)


def _write_entry(entry: Entry) -> bytes:
    name = entry.name.encode()
    if not 0 < len(name) <= MAX_NAME_BYTES:
        raise WeightsError(
            f"a tensor's name has {len(name)} bytes: {entry.name[:40]!r}",
            f"1 to {MAX_NAME_BYTES} are allowed",
            hint="rename the tensor",
        )
    sides = [entry.new or entry.old, entry.old if entry.kind is Kind.REPLACED else None]
    checksums = [entry.old_checksum, entry.new_checksum if entry.kind is not Kind.SAME else None]
    return b"".join(
        (
            struct.pack("<HB", len(name), entry.kind),
            name,
            *(_write_spec(spec) for spec in sides if spec),
            *(bytes.fromhex(checksum) for checksum in checksums if checksum),
        )
    )


def _write_spec(spec: Spec) -> bytes:
    head = struct.pack("<BB", len(spec.dtype), len(spec.shape))
    return head + spec.dtype.encode() + struct.pack(f"<{len(spec.shape)}Q", *spec.shape)


def _read_entry(reader: _Reader) -> Entry:
    name_bytes, number = struct.unpack("<HB", reader.take(3))
    if not 0 < name_bytes <= MAX_NAME_BYTES:
        raise damaged(f"a name has {name_bytes} bytes")
    name = _text(reader.take(name_bytes))
    if number not in set(Kind):
        raise damaged(f"{name!r} is of kind {number}")
    kind = Kind(number)
    spec = _read_spec(reader)
    old = _read_spec(reader) if kind is Kind.REPLACED else spec
    first = reader.take(CHECKSUM_BYTES).hex()
    second = reader.take(CHECKSUM_BYTES).hex() if kind in (Kind.CHANGED, Kind.REPLACED) else first
    entry = Entry(
        name,
        None if kind is Kind.NEW else old,
        None if kind is Kind.NEW else first,
        None if kind is Kind.REMOVED else spec,
        None if kind is Kind.REMOVED else second,
        kind is Kind.SAME,
    )
    if entry.kind is not kind:
        raise damaged(f"{name!r} is marked as {kind.name.lower()} but is {entry.kind.name.lower()}")
    return entry


def _read_spec(reader: _Reader) -> Spec:
    dtype_bytes, dimensions = struct.unpack("<BB", reader.take(2))
    dtype = _text(reader.take(dtype_bytes))
    if dtype not in DTYPES or dimensions > MAX_DIMENSIONS:
        raise damaged(f"a tensor is {dtype!r} of {dimensions} dimensions")
    try:
        return Spec(dtype, struct.unpack(f"<{dimensions}Q", reader.take(8 * dimensions)))
    except ValueError as error:
        raise damaged(str(error)) from None


def _text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise damaged(f"a name is not UTF-8: {error.reason}") from None


class _Reader:
    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self._at = data, at

    def take(self, count: int) -> memoryview:
        if count > len(self._data) - self._at:
            raise damaged(f"{count} bytes are missing at byte {self._at}")
        self._at += count
        return self._data[self._at - count : self._at]

    def end(self) -> None:
        if self._at != len(self._data):
            raise damaged(f"{len(self._data) - self._at} bytes are left over")
