"""Serving machines over HTTP: the app of all routes, the leases that end, and the end of every machine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.applications import Starlette

from etude.environments.remote.config import ServerConfig
from etude.environments.remote.control import Control
from etude.environments.remote.envd import Envd
from etude.environments.remote.keys import Keyring
from etude.environments.remote.refusal import HANDLERS
from etude.environments.remote.sandboxes import Boxes, Template
from etude.environments.remote.states import States
from etude.environments.remote.transfers import Transfers
from etude.http_server import bind, run_http_server
from etude.seams import Runtime


def create_app(
    runtime: Runtime,
    keys: Keyring,
    *,
    templates: Mapping[str, Template] | None = None,
    config: ServerConfig | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Starlette:
    """The ASGI app that offers a runtime's machines: `app.state.boxes`. The runtime stays the caller's."""
    config = config or ServerConfig()
    boxes = Boxes(runtime, templates or {}, config, clock=clock)
    of_account = [*Control(boxes, keys, config).routes(), *States(boxes, keys, config).routes()]
    routes = [*of_account, *Envd(boxes, config).routes(), *Transfers(boxes, config).routes()]
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.state.boxes = boxes
    return app


@contextlib.asynccontextmanager
async def serving(
    app: Starlette, *, host: str = "127.0.0.1", port: int = 0, sock: socket.socket | None = None
) -> AsyncIterator[str]:
    """Serve while the block runs; yields the URL. At its end every machine is ended.

    Raises `ConfigError` for an address that cannot be had.
    """
    boxes: Boxes = app.state.boxes
    async with run_http_server(app, sock or bind(host, port), name="the server of machines") as url:
        reaper = asyncio.create_task(boxes.reap(), name="leases")
        try:
            yield url
        finally:
            reaper.cancel()
            await boxes.close()
            await asyncio.gather(reaper, return_exceptions=True)
