"""Serving the app over HTTP: one socket, bound before anything starts, closed in order.

Loopback by default. An address that others can reach needs a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.applications import Starlette

from etude.errors import ConfigError, DeadlineExceeded
from etude.gateway.config import GatewayConfig
from etude.gateway.http import is_loopback

START_DEADLINE_S = 10.0
STOP_DEADLINE_S = 10.0


@contextlib.asynccontextmanager
async def serving(app: Starlette, *, config: GatewayConfig) -> AsyncIterator[str]:
    """Serve while the block runs; yields the URL to give a client as `base_url`.

    Raises `ConfigError` for a port in use, and for an address beyond loopback when the app needs no key.
    """
    if not app.state.needs_key and not is_loopback(config.host):
        hint = "give a key (--key, or ETUDE_API_KEY), or keep --host 127.0.0.1"
        raise ConfigError(f"host {config.host!r} is open to the network", "there is no key", hint=hint)
    sock = _bind(config.host, config.port)
    server = _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=int(STOP_DEADLINE_S / 2),
        )
    )
    work = asyncio.create_task(server.serve(sockets=[sock]), name="gateway")
    try:
        await _started(server, work)
        host, port = sock.getsockname()[:2]
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    finally:
        server.should_exit = True
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await asyncio.gather(work, return_exceptions=True)
        except TimeoutError:
            what = "the gateway did not stop"
            raise DeadlineExceeded(what, f"within {STOP_DEADLINE_S:g} s", hint="a request hangs; see its log") from None
        finally:
            sock.close()


class _Server(uvicorn.Server):
    """uvicorn that says when it is up, and leaves signals to whoever started the gateway."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        hint = "give e.g. --host 127.0.0.1"
        raise ConfigError(f"host {host!r} is no address", str(error.strerror), hint=hint) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(256)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        hint = "choose another --port (0 takes any free one), or a --host of this machine"
        raise ConfigError(f"cannot listen on {host}:{port}", str(error.strerror), hint=hint) from None
    return sock


async def _started(server: _Server, work: asyncio.Task[None]) -> None:
    up = asyncio.create_task(server.up.wait())
    try:
        await asyncio.wait({up, work}, timeout=START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        up.cancel()
    if work.done():
        work.result()
    if not server.up.is_set():
        facts = "it ended" if work.done() else f"within {START_DEADLINE_S:g} s"
        raise DeadlineExceeded("the gateway did not start", facts, hint="see what was printed above")
