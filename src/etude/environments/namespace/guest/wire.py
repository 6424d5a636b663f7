"""Encode and decode frames for file trees: ``u8 kind | u32 count | count x (u32 length | bytes)``, little endian.

Fields are opaque bytes, so a parser allocates only what is there. They are used instead of JSON or pickle, since
contents are bytes and a frame must not be able to name a type.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_SIZE = struct.Struct("<I")
_BODY = struct.Struct("<BI")
MAX_FIELDS = 1 << 18

TREE = 1


class FrameError(ValueError):
    """Raised for bytes that are not a frame as this module describes it."""


class Frame(NamedTuple):
    """A decoded frame. `kind`: TREE for a file tree (`files` describes its fields)."""

    kind: int
    fields: list[bytes]


def pack(kind: int, *fields: bytes) -> bytes:
    """Encode a frame of kind `kind` with these fields.

    >>> unpack(pack(TREE, b"calc.py", b"f", b"x = 1"))
    Frame(kind=1, fields=[b'calc.py', b'f', b'x = 1'])
    """
    parts = [_BODY.pack(kind, len(fields))]
    for field in fields:
        parts += (_SIZE.pack(len(field)), field)
    return b"".join(parts)


def unpack(body: bytes) -> Frame:
    """Decode a frame. Raises `FrameError` for anything else."""
    if len(body) < _BODY.size:
        raise FrameError(f"a frame of {len(body)} bytes has no header")
    kind, count = _BODY.unpack_from(body)
    if count > MAX_FIELDS:
        raise FrameError(f"{count} fields, at most {MAX_FIELDS}")
    at, fields = _BODY.size, []
    for _ in range(count):
        if at + _SIZE.size > len(body):
            raise FrameError("a field's length is cut off")
        (size,) = _SIZE.unpack_from(body, at)
        at += _SIZE.size
        if at + size > len(body):
            raise FrameError(f"a field of {size} bytes is cut off")
        fields.append(body[at : at + size])
        at += size
    if at != len(body):
        raise FrameError(f"{len(body) - at} bytes after the last field")
    return Frame(kind, fields)
