"""Strict parsing of HTTP/1 request heads, and closing of connections; used by the mirror and the proxy.

Only requests that all servers parse alike are accepted. Two parsers that disagree on where a request ends allow request
smuggling (RFC 9112, section 11.2). So these are refused: bare LF, folded lines, space before a colon, control
characters, both a length and a transfer coding, two lengths, any coding but one ``chunked``.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

MAX_HEAD_BYTES = 32_768
_MAX_FIELDS = 100
_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([\x21-\x7e]{1,8192}) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::(?P<port>[0-9]{1,5}))?")


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class BadRequest(ValueError):
    """Raised for bytes that are not an acceptable request head. Its text is sent to the client."""


class RequestHead(NamedTuple):
    """The parsed head of an HTTP request.

    `target` is the URL or authority in the request line. `fields` are the header fields in order, with names in lower
    case. `body` is the length of the body in bytes, or None for a chunked body."""

    method: str
    target: str
    fields: tuple[tuple[str, bytes], ...]
    body: int | None


class Target(NamedTuple):
    """The server (host and port) and the path that a proxy request asks for. `path` includes the query; it is "" for
    CONNECT."""

    host: str  # lower case, without brackets and a last dot
    port: int
    path: str


def parse_head(data: bytes) -> RequestHead:
    """Parse the head of a request, up to and including the empty line. Raises `BadRequest`.

    >>> parse_head(b"GET http://a/b HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n").target
    'http://a/b'
    """
    if len(data) > MAX_HEAD_BYTES or not data.endswith(b"\r\n\r\n"):
        raise BadRequest("the head is too long, or does not end")
    first, *lines = data[:-4].split(b"\r\n")
    found = _LINE.fullmatch(first)
    if not found:
        raise BadRequest("the request line is not plain")
    if len(lines) > _MAX_FIELDS:
        raise BadRequest("too many fields")
    fields = []
    for line in lines:
        field = _FIELD.fullmatch(line)
        if not field:
            raise BadRequest("a field is not plain")
        fields.append((field[1].decode().lower(), field[2].rstrip(b" \t")))
    return RequestHead(found[1].decode(), found[2].decode(), tuple(fields), _body(fields))


def _body(fields: list[tuple[str, bytes]]) -> int | None:
    lengths = [value for name, value in fields if name == "content-length"]
    codings = [value for name, value in fields if name == "transfer-encoding"]
    if len(lengths) + len(codings) > 1:
        raise BadRequest("the body has more than one length")
    if codings:
        if codings[0].lower() != b"chunked":
            raise BadRequest("a transfer coding is not chunked")
        return None
    if lengths:
        if not re.fullmatch(rb"[0-9]{1,15}", lengths[0]):
            raise BadRequest("the body's length is no number")
        return int(lengths[0])
    return 0


def target_of(head: RequestHead) -> Target:
    """Return the target of a request to a proxy: the authority of a CONNECT, else the absolute URL.

    Raises `BadRequest` if there is none or its scheme is not ``http``."""
    if head.method == "CONNECT":
        host, port = authority(head.target)
        if port is None:
            raise BadRequest("CONNECT names no port")
        return Target(host, port, "")
    scheme, _, rest = head.target.partition("://")
    if scheme.lower() != "http" or not rest:
        raise BadRequest("a proxy request needs an http:// URL, or CONNECT")
    where, slash, path = rest.partition("/")
    if "?" in where or "#" in where or "@" in where:
        raise BadRequest("the URL's host is not plain")
    host, port = authority(where)
    if "#" in path:
        raise BadRequest("the URL has a fragment")
    return Target(host, 80 if port is None else port, slash + path or "/")


def authority(text: str) -> tuple[str, int | None]:
    """Split ``host:port`` into the host in lower case and the port, None if it is missing. Raises `BadRequest`.

    >>> authority("Example.COM.:443")
    ('example.com', 443)
    """
    found = _AUTHORITY.fullmatch(text)
    port = int(found["port"]) if found and found["port"] else None
    if not found or (port is not None and not 0 < port < 65_536):
        raise BadRequest("no plain host and port")
    host = found["host"].strip("[]").lower().removesuffix(".")
    if not host or ".." in host or host.startswith("."):
        raise BadRequest("no plain host")
    return host, port


class ConnectionServer:
    """Base of servers that handle each connection in a task of its own, on sockets that they are given."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._serving: set[asyncio.Task[None]] = set()

    async def _serve(self, listener: socket.socket, handle: Handler) -> asyncio.Server:
        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.get_running_loop().create_task(handle(reader, writer))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

        server = await asyncio.start_server(begin, sock=listener, limit=MAX_HEAD_BYTES)
        self._servers.append(server)
        return server

    async def close(self) -> None:
        """Stop serving on all sockets and abort open connections. Can be repeated."""
        for server in self._servers:
            server.close()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)


async def close_writer(writer: asyncio.StreamWriter, deadline_s: float) -> None:
    """Send the rest of the buffer and close the connection; abort it after `deadline_s` seconds."""
    writer.close()
    try:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(deadline_s):
                await writer.wait_closed()
    finally:
        writer.transport.abort()
