"""Serving the app over HTTP. Loopback by default; an address that others can reach needs a key."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette

from etude.errors import ConfigError
from etude.gateway.config import GatewayConfig
from etude.gateway.http import is_loopback
from etude.http_server import bind, run_http_server


@contextlib.asynccontextmanager
async def serving(app: Starlette, *, config: GatewayConfig) -> AsyncIterator[str]:
    """Serve while the block runs; yields the URL to give a client as `base_url`.

    Raises `ConfigError` for a port in use, and for an address beyond loopback when the app needs no key.
    """
    if not app.state.needs_key and not is_loopback(config.host):
        hint = "give a key (--key, or ETUDE_API_KEY), or keep --host 127.0.0.1"
        raise ConfigError(f"host {config.host!r} is open to the network", "there is no key", hint=hint)
    async with run_http_server(app, bind(config.host, config.port), name="the gateway", grace_s=5) as url:
        yield f"{url}/v1"
