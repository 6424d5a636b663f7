"""The HTTP paths, messages and stream frames between an engine's server and its clients. Imports no torch."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import numpy as np

from etude.errors import EngineError, EtudeError
from etude.inference.errors import from_http, to_http
from etude.records.completion import Completion, Version
from etude.records.wire import pack, unpack

JSON = "application/json"
MSGPACK = "application/msgpack"
GENERATE = "/inference/v1/generate"


class AdoptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /adopt: wait until the engine has loaded a version of at least `min_step`.

    `deadline_s` is the longest wait in seconds."""

    min_step: int
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0.0 < self.deadline_s < 1e6:
            raise ValueError(f"deadline_s = {self.deadline_s} is not above 0 and below 1,000,000")


class HoldRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /hold: keep the loaded version for the next `seconds` (0 to 60).

    Each request replaces the time of the last one; 0 allows new versions at once. The response is the `Version`."""

    seconds: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.seconds <= 60.0:
            raise ValueError(f"seconds = {self.seconds} is not from 0 to 60")


class EndRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /inference/v1/end: the id of the streamed request to end with the tokens sampled so far."""

    request_id: str


class VerifyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /verify: the token ids of a text to score."""

    token_ids: list[int]


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """The response of POST /verify: the loaded version, and the log-probability of each token except the first."""

    version: Version
    logprobs: list[float]


class OperatorsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /operators: the text for which the results of all operators are requested.

    The first `prompt_tokens` tokens are computed in chunks, the others one by one."""

    token_ids: list[int]
    prompt_tokens: int


class OperatorResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one operator for all tokens of a text.

    `data` are the little-endian bytes of an array of `shape` and `dtype`, such as "bfloat16", which numpy lacks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class OperatorResults(msgspec.Struct, frozen=True, kw_only=True):
    """The response of POST /operators: the results of all operators in the order of computation."""

    results: list[OperatorResult]


STREAM, END = "/inference/v1/generate/stream", "/inference/v1/end"
MEDIA_TYPE = "application/vnd.etude.frames"
MAX_FRAME_BYTES = 1 << 28
_HEAD, _STATUS = struct.Struct("<cI"), struct.Struct("<H")


def frame(part: list[int] | Completion | EtudeError) -> bytes:
    """Encode one frame of a streamed response: token ids, the completion, or an error.

    A stream is a sequence of frames in the body of one response. A frame is its kind (one byte), the length of its
    payload (u32, little endian) and the payload:

    - t: token ids, int32 little endian: those sampled since the last frame
    - c: the packed `Completion`; the last frame
    - e: HTTP status (u16, little endian) and JSON body of an error; the last frame

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
    read_exactly: Callable[[int], Awaitable[bytes]], *, engine: str
) -> AsyncIterator[list[int] | Completion]:
    """Yield the parts of a streamed response: lists of token ids, and at the end the `Completion`.

    `read_exactly(n)` reads n bytes of the body. `engine` names the engine in errors. Raises the `EngineError` of an
    error frame, and `EngineError` for invalid or truncated bytes."""
    try:
        while True:
            kind, size = _HEAD.unpack(await read_exactly(_HEAD.size))
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame has {size} bytes, the limit is {MAX_FRAME_BYTES}")
            payload = await read_exactly(size)
            if kind == b"t":
                yield np.frombuffer(payload, "<i4").tolist()
            elif kind == b"c":
                yield unpack(payload, Completion)
                return
            elif kind == b"e":
                raise from_http(_STATUS.unpack_from(payload)[0], payload[_STATUS.size :], engine=engine)
            else:
                raise ValueError(f"a frame has the unknown kind {kind!r}")
    except (ValueError, struct.error, asyncio.IncompleteReadError) as error:
        raise EngineError(
            f"the stream of {engine} is invalid or ended early",
            str(error),
            hint="send the request again; if it fails again, see the engine's log",
        ) from None
