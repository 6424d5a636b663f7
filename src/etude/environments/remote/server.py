"""Serve machines over HTTP: the ASGI app, the expiry of leases, and the shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.applications import Starlette

from etude.environments.remote.api_errors import HANDLERS
from etude.environments.remote.config import ServerConfig
from etude.environments.remote.control import SandboxRoutes
from etude.environments.remote.envd import EnvdRoutes
from etude.environments.remote.keys import Keyring
from etude.environments.remote.sandboxes import SandboxManager, Template
from etude.environments.remote.states import StateRoutes
from etude.environments.remote.transfers import FileRoutes
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
    """Build the ASGI app that serves the machines of `runtime` to the accounts of `keys`.

    `templates` are the templates of sandboxes, by name. `clock` returns seconds, for leases. The app's `state.manager`
    is its `SandboxManager`. The caller must close the runtime."""
    config = config or ServerConfig()
    manager = SandboxManager(runtime, templates or {}, config, clock=clock)
    account_routes = [*SandboxRoutes(manager, keys, config).routes(), *StateRoutes(manager, keys, config).routes()]
    routes = [*account_routes, *EnvdRoutes(manager, config).routes(), *FileRoutes(manager, config).routes()]
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.state.manager = manager
    return app


@contextlib.asynccontextmanager
async def serving(
    app: Starlette, *, host: str = "127.0.0.1", port: int = 0, sock: socket.socket | None = None
) -> AsyncIterator[str]:
    """Serve an app of `create_app` during the `with` block, and yield its URL.

    At the end of the block all sandboxes are ended. `sock` is a bound socket to use in place of `host` and `port`; port
    0 picks a free port. Raises `ConfigError` if the address cannot be used."""
    manager: SandboxManager = app.state.manager
    async with run_http_server(app, sock or bind(host, port), name="the server of machines") as url:
        reaper = asyncio.create_task(manager.reap(), name="leases")
        try:
            yield url
        finally:
            reaper.cancel()
            await manager.close()
            await asyncio.gather(reaper, return_exceptions=True)
