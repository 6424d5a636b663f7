"""A completion while it is sampled, as frames in the body of one answer. Shared by an engine's server and client.

A frame is its kind (one byte), its payload's length (u32, little endian) and the payload:

    t   token ids, int32 little endian: what was sampled since the last frame
    c   the `Completion`, packed; nothing comes after it
    e   status (u16, little endian) and body of the error that ended it; nothing comes after it

Knows nothing of sockets: `read_frames` is given whatever reads exactly so many bytes. No torch.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np

from etude.errors import EngineError, EtudeError
from etude.inference.errors import from_http, to_http
from etude.records.completion import Completion
from etude.records.wire import pack, unpack

STREAM = "/inference/v1/generate/stream"
MEDIA_TYPE = "application/vnd.etude.frames"
MAX_FRAME_BYTES = 1 << 28
_HEAD, _STATUS = struct.Struct("<cI"), struct.Struct("<H")


def frame(part: list[int] | Completion | EtudeError) -> bytes:
    """
    >>> frame([1, 2])
    b't\\x08\\x00\\x00\\x00\\x01\\x00\\x00\\x00\\x02\\x00\\x00\\x00'
    """
    if isinstance(part, list):
        kind, payload = b"t", np.array(part, "<i4").tobytes()
    elif isinstance(part, Completion):
        kind, payload = b"c", pack(part)
    else:
        status, body = to_http(part)
        kind, payload = b"e", _STATUS.pack(status) + body
    return _HEAD.pack(kind, len(payload)) + payload


async def read_frames(
    exactly: Callable[[int], Awaitable[bytes]], *, engine: str
) -> AsyncIterator[list[int] | Completion]:
    """The parts in a body, the `Completion` last. Raises the `EngineError` that an error frame holds, and one for bytes
    that are no frames or end too early."""
    try:
        while True:
            kind, size = _HEAD.unpack(await exactly(_HEAD.size))
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            payload = await exactly(size)
            if kind == b"t":
                yield np.frombuffer(payload, "<i4").tolist()
            elif kind == b"c":
                yield unpack(payload, Completion)
                return
            elif kind == b"e":
                raise from_http(_STATUS.unpack_from(payload)[0], payload[_STATUS.size :], engine=engine)
            else:
                raise ValueError(f"a frame of kind {kind!r}")
    except (ValueError, struct.error, asyncio.IncompleteReadError) as error:
        raise EngineError(
            f"{engine} broke off its answer", str(error), hint="ask again; its log says what happened"
        ) from None
