"""Encode and decode the agent's frames: ``u32 length | u8 kind | u32 id | body``, little endian.

The format is in docs/formats/agent.md. What a machine sends is not trusted: lengths are checked before use, and a body
that does not match its kind raises `ProtocolError`, which ends the channel.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

from etude.records.command import Command

VERSION = 1
MAX_FRAME = (1 << 20) + (64 << 10)  # of kind, id and body together
INPUT_WINDOW = 256 << 10  # of standard input not yet confirmed by the agent
PART = 256 << 10  # of a file or a tree in one frame

# host to agent
RUN, INPUT, KILL, READ, WRITE = b"E", b"I", b"K", b"R", b"W"
SAVE, LOAD, FREEZE, RENEW, PING = b"S", b"L", b"Z", b"N", b"P"
# agent to host
READY, STARTED, OUTPUT, TAKEN, ENDED, DATA, DONE, REFUSED = b"h", b"s", b"o", b"i", b"x", b"d", b"k", b"e"

STDIN, SEPARATE_STREAMS, ALL_OUTPUT = 1, 2, 4  # flags of RUN
AT_DEADLINE = 1  # flag of ENDED

_HEAD = struct.Struct("<IcI")
_MIN_LENGTH = _HEAD.size - 4  # kind and id
_NUMBER = struct.Struct("<I")
_RUN = struct.Struct("<IIB")
_ENDED = struct.Struct("<iBQ")


class ProtocolError(ValueError):
    """Raised for bytes that no correct agent sends."""


class Frame(NamedTuple):
    """One frame of the protocol. `kind`: one byte, a constant of this module. `id`: the id of its request."""

    kind: bytes
    id: int
    body: bytes


class Ended(NamedTuple):
    """How a command ended, from a frame of kind ENDED.

    `late`: whether the agent killed it at its deadline. `printed`: number of output bytes, including those that were
    not sent to the host.
    """

    exit_code: int
    late: bool
    printed: int


def frame(kind: bytes, number: int, *parts: bytes) -> bytes:
    """Encode a frame of kind `kind` and id `number`; its body consists of `parts`. Raises `ValueError` if it is too
    long.

    >>> frame(PING, 7)
    b'\\x05\\x00\\x00\\x00P\\x07\\x00\\x00\\x00'
    """
    length = _MIN_LENGTH + sum(map(len, parts))
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME}")
    return b"".join((_HEAD.pack(length, kind, number), *parts))


def request(data: bytes) -> int:
    """Return the request's id if the bytes are exactly one request that fits one frame, else 0.

    The first answer to such a request confirms that the agent has received all of it.

    >>> request(frame(PING, 7)), request(frame(INPUT, 7)), request(frame(PING, 7) * 2)
    (7, 0, 0)
    """
    length, kind, number = _HEAD.unpack_from(data)
    return int(number) if kind in (RUN, READ, SAVE, FREEZE, RENEW, PING) and len(data) == 4 + length else 0


class Parser:
    """Splits the byte stream of one channel into frames. It buffers less than one frame."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add data and yield the frames that are complete. Raises `ProtocolError` for an invalid length."""
        self._bytes += data
        at = 0
        try:
            while len(self._bytes) - at >= 4:
                (length,) = _NUMBER.unpack_from(self._bytes, at)
                if not _MIN_LENGTH <= length <= MAX_FRAME:
                    raise ProtocolError(f"a frame of {length} bytes")
                if len(self._bytes) - at < 4 + length:
                    break
                _, kind, number = _HEAD.unpack_from(self._bytes, at)
                body = bytes(self._bytes[at + _HEAD.size : at + 4 + length])
                at += 4 + length
                yield Frame(kind, number, body)
        finally:
            del self._bytes[:at]


def fields(*values: bytes) -> bytes:
    """Encode values as one body: ``u32 count, count x (u32 length, bytes)``."""
    return b"".join((_NUMBER.pack(len(values)), *(part for v in values for part in (_NUMBER.pack(len(v)), v))))


def run(number: int, command: Command, flags: int) -> bytes:
    """Encode the frame that starts a command.

    `number`: the request's id. `flags`: the sum of STDIN, SEPARATE_STREAMS and ALL_OUTPUT where they apply.
    """
    deadline_ms = int(min(max(command.deadline_s * 1000, 1), 0xFFFF_FFFF))
    head = _RUN.pack(deadline_ms, min(command.output_bytes, 0xFFFF_FFFF), flags)
    variables = (f"{name}={value}" for name, value in command.env.items())
    texts = (command.user, command.cwd, str(len(command.argv)), *command.argv, *variables)
    return frame(RUN, number, head, fields(*map(os.fsencode, texts)))


def ended(body: bytes) -> Ended:
    """Decode the body of an ENDED frame. Raises `ProtocolError`."""
    code, flags, printed = _unpack(_ENDED, body)
    if not 0 <= code <= 255:
        raise ProtocolError(f"an exit code of {code}")
    return Ended(code, bool(flags & AT_DEADLINE), printed)


def number(body: bytes) -> int:
    """Decode a body that is one number. Raises `ProtocolError` for any other length."""
    (value,) = _unpack(_NUMBER, body)
    return int(value)


def refused(body: bytes) -> tuple[int, str]:
    """Decode the body of a REFUSED frame. Returns (error number, message). Raises `ProtocolError`."""
    if len(body) < _NUMBER.size:
        raise ProtocolError("a refusal without a number")
    return _NUMBER.unpack_from(body)[0], body[_NUMBER.size :].decode(errors="replace")


def _unpack(shape: struct.Struct, body: bytes) -> tuple[int, ...]:
    if len(body) != shape.size:
        raise ProtocolError(f"a body of {len(body)} bytes instead of {shape.size}")
    return shape.unpack(body)
