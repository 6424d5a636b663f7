"""Serves an ASGI app over HTTP with uvicorn, and drops clients that block a connection.

uvicorn bounds neither the time nor the size of a request's head, nor the time that a response waits for a client that
does not read it. Here such connections are aborted. The app itself must bound request bodies and its response times.
Signals are left to the caller."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from etude.errors import ConfigError, DeadlineExceeded

_START_S, _STOP_S = 10.0, 10.0
_HEAD_BYTES = 64 << 10
_IDLE_S = 75  # longer than clients and load balancers keep idle connections (60 s): they must not send while it closes
_CLIENT_TIMEOUT_S = 20.0  # for a request's head to arrive, and for a client to read more of a response


async def disconnected(request: Request) -> None:
    """Wait until the client of a request, whose body was read, closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def run_http_server(
    app: ASGIApp,
    sock: socket.socket,
    *,
    name: str,
    grace_s: int = 2,
    max_connections: int = 8192,
    client_timeout_s: float = _CLIENT_TIMEOUT_S,
) -> AsyncIterator[str]:
    """Serve an app on a socket while the block runs. Yields the base URL.

    `sock` is a listening socket from `bind`, which is closed at the end. `name` is the server's name in errors.
    Requests in progress at the end of the block may continue for `grace_s` seconds. A client has `client_timeout_s`
    seconds to send a request's head, and as many to read more of a response. Requests beyond `max_connections` get HTTP
    503. Raises `DeadlineExceeded` if the server does not start or stop in time."""
    config = uvicorn.Config(
        app,
        http=type("Connection", (_Connection,), {"client_timeout_s": client_timeout_s}),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        limit_concurrency=max_connections,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=grace_s,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[sock]), name=name)
    try:
        await _wait_started(server, serving, name)
        host, port = sock.getsockname()[:2]
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        server.should_exit = True
        try:
            async with asyncio.timeout(_STOP_S):
                await asyncio.gather(serving, return_exceptions=True)
        except TimeoutError:
            facts = f"waited {_STOP_S:g} s"
            raise DeadlineExceeded(
                f"{name} did not stop", facts, hint="see the log: a request probably hangs"
            ) from None
        finally:
            sock.close()


def bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens on `host` and `port`; port 0 takes any free port. Raises `ConfigError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        hint = "give e.g. --host 127.0.0.1"
        raise ConfigError(f"host {host!r} cannot be resolved", str(error.strerror), hint=hint) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        hint = "choose another --port (0 takes any free one), or a --host of this machine"
        raise ConfigError(f"cannot listen on {host}:{port}", str(error.strerror), hint=hint) from None
    return sock


class _Server(uvicorn.Server):
    """A uvicorn server that sets `ready` once it is up, and leaves signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _wait_started(server: _Server, serving: asyncio.Task[None], name: str) -> None:
    ready = asyncio.create_task(server.ready.wait())
    try:
        await asyncio.wait({ready, serving}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ready.cancel()
    if serving.done():
        serving.result()
    if not server.ready.is_set():
        facts = "it ended" if serving.done() else f"waited {_START_S:g} s"
        raise DeadlineExceeded(f"{name} did not start", facts, hint="see the output above")


class _Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP connection, with either parser, aborted when its client blocks it."""

    client_timeout_s = _CLIENT_TIMEOUT_S
    _abort_timer: asyncio.TimerHandle | None = None
    _is_in_head, _head_bytes = False, 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES:
                self.transport.abort()
        if self.cycle is not before:
            self._stop_waiting()
        elif self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()

    def on_message_begin(self) -> None:  # called by httptools, which does not bound the head; h11 does
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader(self.transport.get_write_buffer_size() + 1)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        if self._abort_timer is None:
            self._abort_timer = asyncio.get_running_loop().call_later(self.client_timeout_s, self.transport.abort)

    def _wait_for_reader(self, bytes_before: int) -> None:
        """Abort the connection unless the client has read something since the last check; check again later."""
        self._stop_waiting()
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes >= bytes_before:
            self.transport.abort()
        else:
            loop = asyncio.get_running_loop()
            self._abort_timer = loop.call_later(self.client_timeout_s, self._wait_for_reader, num_bytes)

    def _stop_waiting(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer = None
