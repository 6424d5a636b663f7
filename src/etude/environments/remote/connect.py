"""The part of the Connect RPC protocol that E2B uses: JSON messages over HTTP/1.1.

A call is a POST to `/package.Service/Method`. The body of a unary call is one message. The body of a streaming call is
a sequence of envelopes: one byte of flags, the length as a big-endian u32, the message. The last envelope of a response
has flag 2 and the result of the call. The header `connect-timeout-ms` has the caller's time limit.

Source: connectrpc.com/docs/protocol. E2B's clients send JSON without compression, so binary or compressed messages are
refused.
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
_MAX_TIMEOUT_MS = 9_999_999_999  # ten digits, the limit of the protocol


class Code(enum.StrEnum):
    """The error codes of the Connect protocol."""

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
        """HTTP status of a unary response with this error code."""
        return _STATUS.get(self, 500)


_STATUS = {
    Code.CANCELED: 499, Code.INVALID_ARGUMENT: 400, Code.DEADLINE_EXCEEDED: 504, Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409, Code.PERMISSION_DENIED: 403, Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400, Code.ABORTED: 409, Code.OUT_OF_RANGE: 400, Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503, Code.UNAUTHENTICATED: 401,
}  # fmt: skip
_CODES = {400: Code.INVALID_ARGUMENT, 409: Code.ALREADY_EXISTS, 502: Code.UNAVAILABLE} | {
    status: code for code, status in _STATUS.items() if status not in (400, 409)
}


class RpcError(Exception):
    """An error of a Connect call; the server raises and sends it, and the client raises it again.

    `hint` says what to do, or is a word by which etude's client chooses its exception, such as "folder". It is an extra
    JSON field that other clients ignore.

    >>> RpcError(Code.NOT_FOUND, "no process 7", hint="see List").body()
    b'{"code":"not_found","message":"no process 7","hint":"see List"}'
    """

    def __init__(self, code: Code, message: str, *, hint: str = "") -> None:
        self.code, self.message, self.hint = code, message, hint
        super().__init__(f"{code}: {message}")

    def fields(self) -> dict[str, str]:
        """Return the JSON fields of the error; `hint` is left out if it is empty."""
        found = {"code": str(self.code), "message": self.message}
        return found | ({"hint": self.hint} if self.hint else {})

    def body(self) -> bytes:
        """Encode the error as the JSON body of a unary response."""
        return msgspec.json.encode(self.fields())


def error_of_response(status: int, body: bytes) -> RpcError:
    """Parse an HTTP error response, from the server or from a proxy in front of it.

    If the body is not a Connect error, the code is derived from `status`, and the text is the start of the body."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        content = None
    content = content if isinstance(content, dict) else {}
    code = content.get("code")
    known = Code(code) if isinstance(code, str) and code in set(Code) else _CODES.get(status, Code.UNKNOWN)
    message = content.get("message")
    text = message if isinstance(message, str) else body[:300].decode(errors="replace") or f"HTTP status {status}"
    return RpcError(known, text, hint=str(content.get("hint", "")))


def decode(kind: type[T], data: bytes) -> T:
    """Decode a JSON message to an object of type `kind`, ignoring unknown fields.

    Raises `RpcError` if it is invalid.

    >>> decode(dict, b'{"path": "/tmp"}')
    {'path': '/tmp'}
    """
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise RpcError(Code.INVALID_ARGUMENT, f"not a {kind.__name__}: {error}") from None


def envelope(message: object) -> bytes:
    """Encode one message of a stream: flags, length, JSON.

    >>> envelope({})
    b'\\x00\\x00\\x00\\x00\\x02{}'
    """
    data = msgspec.json.encode(message)
    return _HEAD.pack(0, len(data)) + data


def end(error: RpcError | None = None) -> bytes:
    """Encode the last envelope of a response stream, with the error if the call failed."""
    data = msgspec.json.encode({"error": error.fields()} if error else {})
    return _HEAD.pack(_END, len(data)) + data


async def envelopes(
    chunks: AsyncIterable[bytes], kind: type[T], *, is_response: bool, max_bytes: int = MAX_MESSAGE_BYTES
) -> AsyncIterator[T]:
    """Decode a stream's bytes and yield each message, as an object of type `kind`, as soon as it is complete.

    A response (`is_response`) must end with an end envelope; a request has none. Raises `RpcError` for an invalid
    stream, for a message above `max_bytes`, and for the error in the end envelope. If a response breaks off, the code
    is UNAVAILABLE."""
    buffer = bytearray()
    async for chunk in chunks:
        buffer += chunk
        while len(buffer) >= _HEAD.size:
            flags, length = _HEAD.unpack_from(buffer)
            if flags & _COMPRESSED:
                raise RpcError(
                    Code.UNIMPLEMENTED, "compressed messages are not supported", hint="send them uncompressed"
                )
            if flags & ~_END or (flags and not is_response):
                raise RpcError(Code.INVALID_ARGUMENT, f"an envelope has the invalid flags {flags}")
            if length > max_bytes:
                raise RpcError(
                    Code.RESOURCE_EXHAUSTED, f"a message has {length} bytes; at most {max_bytes} are allowed"
                )
            if len(buffer) < _HEAD.size + length:
                break
            data = bytes(buffer[_HEAD.size : _HEAD.size + length])
            del buffer[: _HEAD.size + length]
            if flags & _END:
                _raise_end(data)
                return
            yield decode(kind, data)
    if buffer or is_response:
        raise RpcError(Code.UNAVAILABLE, "the stream broke off")


def _raise_end(data: bytes) -> None:
    content = decode(dict, data or b"{}").get("error")
    if isinstance(content, dict):
        raise error_of_response(500, msgspec.json.encode(content))


def read_timeout(headers: Mapping[str, str]) -> float | None:
    """Return the caller's time limit in seconds from the header `connect-timeout-ms`; None if there is none.

    Raises `RpcError` if it is not a number of milliseconds.

    >>> read_timeout({"connect-timeout-ms": "1500"}), read_timeout({})
    (1.5, None)
    """
    text = headers.get(TIMEOUT)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) > _MAX_TIMEOUT_MS:
        raise RpcError(Code.INVALID_ARGUMENT, f"{TIMEOUT}: {text[:20]!r} is not a number of milliseconds")
    return int(text) / 1000


def check_type(headers: Mapping[str, str], *, streaming: bool) -> str | None:
    """Check the content type and encoding of a request.

    Returns None if they are supported, else the reason, for a response with HTTP status 415."""
    wanted, given = STREAM if streaming else JSON, headers.get("content-type", "").split(";")[0].strip().lower()
    if given != wanted:
        return f"content-type {given[:60]!r} is not supported: send {wanted}"
    name = "connect-content-encoding" if streaming else "content-encoding"
    encoding = headers.get(name, "identity")
    return None if encoding == "identity" else f"{name} {encoding[:20]!r} is not supported: send uncompressed messages"
