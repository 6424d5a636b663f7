"""Connect, the RPC protocol that E2B's machines are spoken to with, as far as they use it: JSON messages over HTTP/1.1.

A call is a POST to `/package.Service/Method`. A unary one has a message as its body; a streaming one has envelopes: one
byte of flags, the length as a big-endian u32, the message. The last envelope of an answer has flag 2 and says how the
call ended; `connect-timeout-ms` is the caller's deadline (connectrpc.com/docs/protocol). E2B's clients, in Python and
in JavaScript, speak JSON and do not compress; what is binary or compressed is refused by its name.

Knows nothing of machines, processes and files.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import TypeVar

import msgspec

T = TypeVar("T")
JSON = "application/json"
STREAM = "application/connect+json"
TIMEOUT = "connect-timeout-ms"
MAX_MESSAGE_BYTES = 16 << 20
_COMPRESSED, _END = 1, 2
_HEAD = struct.Struct(">BI")
_MAX_TIMEOUT_MS = 9_999_999_999  # ten digits, says the protocol


class Code(enum.StrEnum):
    """Why a call failed, in the protocol's own words."""

    CANCELED = "canceled"
    UNKNOWN = "unknown"
    INVALID_ARGUMENT = "invalid_argument"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    PERMISSION_DENIED = "permission_denied"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    FAILED_PRECONDITION = "failed_precondition"
    ABORTED = "aborted"
    OUT_OF_RANGE = "out_of_range"
    UNIMPLEMENTED = "unimplemented"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"
    DATA_LOSS = "data_loss"
    UNAUTHENTICATED = "unauthenticated"

    @property
    def status(self) -> int:
        """The HTTP status of a unary answer."""
        return _STATUS.get(self, 500)


_STATUS = {
    Code.CANCELED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 400,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.UNAUTHENTICATED: 401,
}
_CODES = {400: Code.INVALID_ARGUMENT, 409: Code.ALREADY_EXISTS, 502: Code.UNAVAILABLE} | {
    status: code for code, status in _STATUS.items() if status not in (400, 409)
}


class RpcError(Exception):
    """An RPC error, on the client or the server. The field `hint` is etude's extension; others ignore it.

    >>> RpcError(Code.NOT_FOUND, "no process 7", hint="see List").body()
    b'{"code":"not_found","message":"no process 7","hint":"see List"}'
    """

    def __init__(self, code: Code, message: str, *, hint: str = "") -> None:
        self.code, self.message, self.hint = code, message, hint
        super().__init__(f"{code}: {message}")

    def fields(self) -> dict[str, str]:
        """As plain data."""
        found = {"code": str(self.code), "message": self.message}
        return found | ({"hint": self.hint} if self.hint else {})

    def body(self) -> bytes:
        """The body of a unary answer."""
        return msgspec.json.encode(self.fields())


def of_answer(status: int, body: bytes) -> RpcError:
    """The error in an answer whose status is none of success: Connect's own, or that of a proxy before it."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = None
    said = said if isinstance(said, dict) else {}
    code = said.get("code")
    known = Code(code) if isinstance(code, str) and code in set(Code) else _CODES.get(status, Code.UNKNOWN)
    message = said.get("message")
    text = message if isinstance(message, str) else body[:300].decode(errors="replace") or f"HTTP status {status}"
    return RpcError(known, text, hint=str(said.get("hint", "")))


def decode(kind: type[T], data: bytes) -> T:
    """A message from JSON. Raises `RpcError` for what is none; fields that nobody knows are left out.

    >>> decode(dict, b'{"path": "/tmp"}')
    {'path': '/tmp'}
    """
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise RpcError(Code.INVALID_ARGUMENT, f"not a {kind.__name__}: {error}") from None


def envelope(message: object) -> bytes:
    """One message of a stream.

    >>> envelope({})
    b'\\x00\\x00\\x00\\x00\\x02{}'
    """
    data = msgspec.json.encode(message)
    return _HEAD.pack(0, len(data)) + data


def end(error: RpcError | None = None) -> bytes:
    """The last envelope of an answer."""
    data = msgspec.json.encode({"error": error.fields()} if error else {})
    return _HEAD.pack(_END, len(data)) + data


async def envelopes(
    chunks: AsyncIterable[bytes], kind: type[T], *, is_answer: bool, max_bytes: int = MAX_MESSAGE_BYTES
) -> AsyncIterator[T]:
    """The messages of a stream, as they come.

    Raises `RpcError` for what is no such stream, for a message above `max_bytes`, for the error that an answer ended
    with, and (`UNAVAILABLE`) for an answer that ended without saying so: its connection broke.
    """
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        while len(held) >= _HEAD.size:
            flags, length = _HEAD.unpack_from(held)
            if flags & _COMPRESSED:
                raise RpcError(
                    Code.UNIMPLEMENTED, "compressed messages are not understood", hint="send them as they are"
                )
            if flags & ~_END or (flags and not is_answer):
                raise RpcError(Code.INVALID_ARGUMENT, f"an envelope with flags {flags}")
            if length > max_bytes:
                raise RpcError(Code.RESOURCE_EXHAUSTED, f"a message of {length} bytes; at most {max_bytes} are taken")
            if len(held) < _HEAD.size + length:
                break
            data = bytes(held[_HEAD.size : _HEAD.size + length])
            del held[: _HEAD.size + length]
            if flags & _END:
                _raise_end(data)
                return
            yield decode(kind, data)
    if held or is_answer:
        raise RpcError(Code.UNAVAILABLE, "the stream broke off")


def _raise_end(data: bytes) -> None:
    said = decode(dict, data or b"{}").get("error")
    if isinstance(said, dict):
        raise of_answer(500, msgspec.json.encode(said))


def read_timeout(headers: Mapping[str, str]) -> float | None:
    """The caller's deadline in seconds; None without one. Raises `RpcError`.

    >>> read_timeout({"connect-timeout-ms": "1500"}), read_timeout({})
    (1.5, None)
    """
    text = headers.get(TIMEOUT)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) > _MAX_TIMEOUT_MS:
        raise RpcError(Code.INVALID_ARGUMENT, f"{TIMEOUT}: {text[:20]!r} is no number of milliseconds")
    return int(text) / 1000


def check_type(headers: Mapping[str, str], *, streaming: bool) -> str | None:
    """Why a request cannot be understood (HTTP 415), or None."""
    wanted, given = STREAM if streaming else JSON, headers.get("content-type", "").split(";")[0].strip().lower()
    if given != wanted:
        return f"content-type {given[:60]!r} is not spoken here: send {wanted}"
    name = "connect-content-encoding" if streaming else "content-encoding"
    encoding = headers.get(name, "identity")
    return None if encoding == "identity" else f"{name} {encoding[:20]!r} is not understood: send messages as they are"
