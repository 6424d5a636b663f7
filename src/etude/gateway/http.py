"""Serving the gateway's app over HTTP: the listening server, client disconnects, and error handlers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from etude.errors import ConfigError, EtudeError
from etude.gateway.config import GatewayConfig
from etude.gateway.dialects import DIALECTS
from etude.gateway.errors import RequestRefused, from_error, openai_error
from etude.http_server import bind, run_http_server

T = TypeVar("T")
BROKEN = RequestRefused(500, "the gateway failed; its log says why", code="internal_error")


def host(request: Request) -> str:
    """Return the host name in the request's Host header, or "" when the header is invalid."""
    try:
        return request.url.hostname or ""
    except ValueError:  # an invalid Host header
        return ""


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


async def run_until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Await `work` and return its result.

    When the client disconnects first, cancel `work` and raise `ClientDisconnect`."""
    gone, ended = asyncio.create_task(_disconnected(request)), False
    scope = asyncio.timeout(None)
    gone.add_done_callback(lambda _: None if ended else scope.reschedule(0.0))
    try:
        async with scope:
            try:
                return await work
            finally:
                ended = True
    except TimeoutError:
        if scope.expired():
            raise ClientDisconnect from None
        raise
    finally:
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response with a JSON body."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(request: Request, refused: RequestRefused) -> Response:
    """Return the HTTP response of an error, in the format of the API that the request's path belongs to."""
    path = request.scope["path"]
    write = next((d.error for d in DIALECTS.values() if path.startswith(d.path)), openai_error)
    return json_response(write(refused), refused.status, refused.headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return error_response(request, error)


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, EtudeError)
    return error_response(request, from_error(error))


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = f"{request.method} {request.scope['path']} is not offered"
    return error_response(request, RequestRefused(status, what, code="not_found"))


async def _broken(request: Request, error: Exception) -> Response:
    return error_response(request, BROKEN)


HANDLERS: Any = {RequestRefused: _refused, EtudeError: _failed, Exception: _broken, 404: _no_route, 405: _no_route}
"""Starlette's handlers by exception type and HTTP status."""


@contextlib.asynccontextmanager
async def serving(app: Starlette, *, config: GatewayConfig) -> AsyncIterator[str]:
    """Serve `app`, made by `create_app`, while the block runs. Yields the URL that OpenAI clients take as `base_url`.

    Raises `ConfigError` when the port is in use, and when the app has no API key but `config.host` is not a loopback
    address. At exit, new requests get status 503, and running ones have `config.drain_s` seconds to end."""
    if not app.state.needs_key and not is_loopback(config.host):
        hint = "give a key (--key, or ETUDE_API_KEY), or keep --host 127.0.0.1"
        raise ConfigError(f"host {config.host!r} is open to the network", "there is no key", hint=hint)
    async with run_http_server(app, bind(config.host, config.port), name="the gateway", grace_s=1) as url:
        try:
            yield f"{url}/v1"
        finally:
            await app.state.gateway.drain(config.drain_s)
