"""An HTTP/1.1 client of one server, which takes little CPU time for a request. httptools parses the responses.

It is for requests to engines, of which a gateway sends one for each call: each takes about a third of what aiohttp
takes (decision 111). It has no redirects, cookies, proxies and compression; other requests are sent with aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohappyeyeballs
import httptools

CONNECT_S = 5.0
MAX_BODY_BYTES = 1 << 30
_HEAD_BYTES, _BUFFERED_BYTES = 64 << 10, 1 << 20
_KEPT_S = 4.0  # how long an idle connection is kept; uvicorn closes it after 5 s
_RACE_S = 1.0  # in this time after a request the server may have closed the connection before it got the request
_NEXT_ADDRESS_S = 0.25  # until the next address of a host is tried too
_IDLE_S, _BETWEEN_S, _PROBES = 15, 5, 4  # TCP keep-alive: a response may take hours
_CLOSED = "this client was closed"


class Broken(ConnectionError):
    """Raised when no connection could be opened, or when it ended, or carried no valid HTTP, before the end of the
    response."""


class HttpClient:
    """Sends requests to one server, each over a connection of its own, which is then kept for later ones.

    `url` is the server's, with a path that begins all paths or without; `headers` are sent with each request. All calls
    must be in one event loop. Raises `ValueError` for a URL that is not of HTTP, and for headers with line breaks."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username is not None:
            raise ValueError(f"{url!r} is not http://HOST:PORT or https://HOST:PORT")
        self._host, self._tls = parts.hostname, ssl.create_default_context() if parts.scheme == "https" else None
        self._port, self._path = parts.port or (443 if self._tls else 80), parts.path.rstrip("/")
        lines = "".join(f"{name}: {value}\r\n" for name, value in {"host": parts.netloc, **headers}.items())
        if lines.count("\n") != lines.count("\r") or lines.count("\n") != len(headers) + 1 or not self._path.isascii():
            raise ValueError(f"a header has a line break, or the path {self._path!r} is not ASCII")
        self._rest = f" HTTP/1.1\r\n{lines}".encode("latin-1")
        self._closed = False
        self._connections = set[_Connection]()
        self._idle = dict[_Connection, None]()  # the one that was used last is at the end

    def close(self) -> None:
        """Close all connections. Requests that wait for a connection or a response get `Broken`, and all later ones."""
        self._closed = True
        for connection in list(self._connections):
            connection.close(_CLOSED)

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        silence_s: float | None = None,
        on_silence: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncIterator[HttpResponse]:
        """Send a request and yield its response, whose head has arrived. Leaving the block before the end of the
        response closes the connection.

        `silence_s`: when so many seconds nothing arrives that is waited for, `TimeoutError` is raised. With
        `on_silence` it is awaited instead, and what it raises is raised. Raises `Broken`. If the server closes a kept
        connection at the moment of the request, the request is sent again, so it must be one that may be repeated."""
        length = b"\r\n" if body is None else b"content-length: %d\r\n\r\n" % len(body)
        data = f"{method} {self._path}{path}".encode("ascii") + self._rest + length + (body or b"")
        now = asyncio.get_running_loop().time
        connection, is_kept = self._take(now()), True
        while True:
            if connection is None:
                connection, is_kept = await self._connect(), False
            sent_at, response = now(), HttpResponse(connection, silence_s, on_silence)
            try:
                connection.send(data, response)
                try:
                    await response._head()
                except Broken:
                    if not is_kept or connection.has_answered or now() - sent_at > _RACE_S:
                        raise
                    connection = None
                    continue
                yield response
                return
            finally:
                if connection is not None:
                    self._give_back(connection, now())

    def _take(self, now: float) -> _Connection | None:
        """Return the connection that was used last, if the server keeps it certainly."""
        if not self._idle:
            return None
        connection, _ = self._idle.popitem()
        if now - connection.idle_since < _KEPT_S and not connection.transport.is_closing():
            return connection
        connection.close("it was idle for too long")
        return None

    def _give_back(self, connection: _Connection, now: float) -> None:
        if connection.end():
            connection.idle_since = now
            self._idle[connection] = None
            oldest = next(iter(self._idle))
            if now - oldest.idle_since > _KEPT_S:
                oldest.close("it was idle for too long")
        else:
            connection.close("its request ended early")

    def _forget(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._idle.pop(connection, None)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                addresses = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                sock = await aiohappyeyeballs.start_connection(
                    addresses, happy_eyeballs_delay=_NEXT_ADDRESS_S, socket_factory=_kept_alive
                )
                try:
                    named = self._host if self._tls else None
                    _, connection = await loop.create_connection(
                        lambda: _Connection(self._forget), sock=sock, ssl=self._tls, server_hostname=named
                    )
                except BaseException:
                    sock.close()
                    raise
        except TimeoutError:
            raise Broken(f"no connection within {CONNECT_S:g} s") from None
        except (OSError, RuntimeError, UnicodeError) as error:  # uvloop raises RuntimeError too
            raise Broken(str(error) or type(error).__name__) from None
        self._connections.add(connection)
        if self._closed:
            connection.close(_CLOSED)
            raise Broken(_CLOSED)
        return connection


class HttpResponse:
    """The response to one request (`HttpClient.request`): its `status`, and its body as it arrives.

    At most about 1 MiB of the body waits to be read; then the server must wait."""

    def __init__(
        self, connection: _Connection, silence_s: float | None, on_silence: Callable[[], Awaitable[None]] | None
    ) -> None:
        self.status = 0  # before the head
        self.is_whole = False
        self._connection, self._silence_s, self._on_silence = connection, silence_s, on_silence
        self._body = bytearray()
        self._wanted = 0  # bytes that the reader waits for
        self._error: Broken | None = None
        self._waiter: asyncio.Future[bool] | None = None

    async def read(self) -> bytes:
        """Return the rest of the body.

        Raises `Broken` if the connection fails or more than `MAX_BODY_BYTES` are unread, and `TimeoutError` after
        `silence_s` without data (not with `on_silence`)."""
        self._want(MAX_BODY_BYTES)
        while not self.is_whole:
            await self._more()
        body, self._body = bytes(self._body), bytearray()
        return body

    async def readexactly(self, num_bytes: int) -> bytes:
        """Return the next `num_bytes` bytes of the body.

        Raises `asyncio.IncompleteReadError` if the body ends before, `Broken` if the connection fails, and
        `TimeoutError` after `silence_s` without data (not with `on_silence`)."""
        self._want(num_bytes)
        while len(self._body) < num_bytes:
            if self.is_whole:
                raise asyncio.IncompleteReadError(bytes(self._body), num_bytes)
            await self._more()
        found = bytes(self._body[:num_bytes])
        del self._body[:num_bytes]
        self._want(0)
        return found

    async def _head(self) -> None:
        while not self.status:
            await self._more()

    def _want(self, num_bytes: int) -> None:
        self._wanted = num_bytes
        if self._connection.is_paused and self.num_waiting <= 0:
            self._connection.pause(False)

    @property
    def num_waiting(self) -> int:
        """The number of bytes of the body above those that may wait to be read."""
        return len(self._body) - max(self._wanted, _BUFFERED_BYTES)

    async def _more(self) -> None:
        """Wait until more has arrived, or there was silence."""
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = None if self._silence_s is None else loop.call_later(self._silence_s, self.wake, False)
        try:
            heard = await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
        if not heard:
            if self._on_silence is None:
                raise TimeoutError
            await self._on_silence()

    def add(self, data: bytes) -> None:
        """Add a part of the body. Raises `ValueError` for too large a body."""
        self._body += data
        if len(self._body) > MAX_BODY_BYTES:
            raise ValueError(f"the body has more than {MAX_BODY_BYTES} bytes")

    def fail(self, error: Broken) -> None:
        """End the response, unless it is whole."""
        if not self.is_whole and self._error is None:
            self._error = error
        self.wake()

    def wake(self, heard: bool = True) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(heard)


class _Connection(asyncio.Protocol):
    """A connection to the server, and the parser of its responses. `on_lost` is called at its end."""

    transport: Any  # asyncio.Transport; uvloop's has another base

    def __init__(self, on_lost: Callable[[_Connection], None]) -> None:
        self.idle_since = 0.0
        self.has_answered = False  # whether bytes have arrived since the last request
        self.is_paused = False
        self._on_lost = on_lost
        self._parser = httptools.HttpResponseParser(self)
        self._response: HttpResponse | None = None
        self._num_head, self._keeps = 0, False

    def send(self, data: bytes, response: HttpResponse) -> None:
        """Send a request. What arrives from now on belongs to `response`."""
        self._response, self.has_answered, self._num_head, self._keeps = response, False, 0, False
        self.transport.write(data)

    def end(self) -> bool:
        """End the request. Returns whether the connection may have another one."""
        response, self._response = self._response, None
        usable = response is not None and response.is_whole and self._keeps and not self.is_paused
        return usable and not self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def close(self, why: str) -> None:
        """Close the connection. Its response gets `Broken`, unless it is whole."""
        self._on_lost(self)
        self.transport.abort()
        if self._response is not None:
            self._response.fail(Broken(why))

    def pause(self, paused: bool) -> None:
        """Stop reading from the server, or read again."""
        self.is_paused = paused
        if not self.transport.is_closing():
            (self.transport.pause_reading if paused else self.transport.resume_reading)()

    # called by the event loop

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self)
        if self._response is not None:
            told = "the connection ended" if exc is None else f"the connection broke ({exc})"
            where = "before the response" if not self._response.status else "in the middle of the response"
            self._response.fail(Broken(f"{told} {where}"))

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            self.close("the server sent bytes without a request")
            return
        self.has_answered = True
        try:
            if not response.status:
                self._num_head += len(data)
            self._parser.feed_data(data)
            if not response.status and self._num_head > _HEAD_BYTES:
                raise ValueError(f"the head has more than {_HEAD_BYTES} bytes")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError) as error:
            self._keeps = False
            cause = error.__context__ if isinstance(error.__context__, ValueError) else error
            response.fail(Broken(f"the response is not HTTP/1.1 as expected: {cause}"))
            self.close("it sent no valid response")
            return
        if response.num_waiting > 0 and not self.is_paused:
            self.pause(True)
        response.wake()

    # called by the parser

    def on_message_begin(self) -> None:
        if self._response is None or self._response.is_whole:
            raise ValueError("a second response")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._response is not None and status >= 200:  # those below announce another response
            self._response.status, self._keeps = status, self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        if self._response is not None:
            self._response.add(data)

    def on_message_complete(self) -> None:
        if self._response is not None and self._response.status:
            self._response.is_whole = True


def _kept_alive(address: Any) -> socket.socket:
    """Return a socket with TCP keep-alive, so that a broken connection ends."""
    family, kind, protocol, *_ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _BETWEEN_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    return sock
