"""Frames between the host and a machine: ``u32 length | u8 kind | u32 count | count x (u32 length | bytes)``.

Little endian throughout. Fields are opaque bytes, so a parser allocates only what the length prefix announced and
the caller allowed. Used by both sides; the host must survive any bytes, because agent code may get hold of the socket.
Chosen over JSON or pickle: outputs are bytes, and nothing in a frame may be able to name a type.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

HEAD = struct.Struct("<I")
_BODY = struct.Struct("<BI")
MAX_FIELDS = 1 << 18

# kinds of request: host to machine
EXEC, READ, WRITE, LOAD, SAVE = 1, 2, 3, 4, 5
# kinds of reply: machine to host
READY, DONE, OK, REFUSED, BROKEN = 64, 65, 66, 67, 68

EXEC_PARAMS = struct.Struct("<dI")  # deadline_s, output_bytes
EXEC_RESULT = struct.Struct("<BBB")  # exit code 0..255, timed out, truncated
SIZE = struct.Struct("<Q")
ERRNO = struct.Struct("<I")


class FrameError(ValueError):
    """Bytes that are not a frame, or one larger than the caller allows."""


class Frame(NamedTuple):
    """One message: its kind and its fields."""

    kind: int
    fields: list[bytes]


def pack(kind: int, *fields: bytes) -> bytes:
    """A frame's bytes, length prefix included.

    >>> unpack(pack(READ, b"calc.py")[4:])
    Frame(kind=2, fields=[b'calc.py'])
    """
    parts = [_BODY.pack(kind, len(fields))]
    for field in fields:
        parts += (HEAD.pack(len(field)), field)
    body = b"".join(parts)
    return HEAD.pack(len(body)) + body


def unpack(body: bytes) -> Frame:
    """The frame in the bytes after the length prefix. Raises `FrameError` for anything else."""
    if len(body) < _BODY.size:
        raise FrameError(f"a frame of {len(body)} bytes has no header")
    kind, count = _BODY.unpack_from(body)
    if count > MAX_FIELDS:
        raise FrameError(f"{count} fields, at most {MAX_FIELDS}")
    at, fields = _BODY.size, []
    for _ in range(count):
        if at + HEAD.size > len(body):
            raise FrameError("a field's length is cut off")
        (size,) = HEAD.unpack_from(body, at)
        at += HEAD.size
        if at + size > len(body):
            raise FrameError(f"a field of {size} bytes is cut off")
        fields.append(body[at : at + size])
        at += size
    if at != len(body):
        raise FrameError(f"{len(body) - at} bytes after the last field")
    return Frame(kind, fields)
