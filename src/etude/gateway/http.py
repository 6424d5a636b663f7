"""Serving the gateway's app over HTTP: the listening server, client disconnects, and error handlers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import URL
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from etude.errors import ConfigError, EtudeError, nearest
from etude.gateway.config import GatewayConfig
from etude.gateway.dialects import DIALECTS, messages
from etude.gateway.errors import RequestRefused, broken, from_error, openai_error
from etude.http_server import bind, disconnected, run_http_server

T = TypeVar("T")


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


def is_local(request: Request) -> bool:
    """Return whether the request's Host header has a loopback name. Without a valid Host header, the server's address
    is checked instead."""
    server = request.scope.get("server")
    return _is_local(request.headers.get("host"), None if server is None else tuple(server))


@lru_cache(maxsize=256)
def _is_local(header: str | None, server: tuple[str, int | None] | None) -> bool:
    headers = [] if header is None else [(b"host", header.encode("latin-1"))]
    try:
        url = URL(scope={"scheme": "http", "path": "/", "server": server, "headers": headers})
        return is_loopback(url.hostname or "")
    except ValueError:  # an invalid Host header
        return False


async def read_body(request: Request, max_bytes: int, *, hint: str) -> bytes:
    """Return the body of a request.

    Raises `RequestRefused` (HTTP status 413) with `hint` if it has more than `max_bytes` bytes, and
    `ClientDisconnect` if the client disconnects."""
    parts: list[bytes] = []
    num_bytes, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > max_bytes:
            facts = f"it has more than {max_bytes} bytes"
            raise RequestRefused(413, "the body is too large", facts, hint=hint, code="request_too_large")
    return b"".join(parts)


async def run_until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Await `work` and return its result.

    When the client disconnects first, cancel `work` and raise `ClientDisconnect`."""
    gone = asyncio.create_task(disconnected(request))
    try:
        return await run_until(gone, work)
    finally:
        gone.cancel()


async def run_until(gone: asyncio.Task[None], work: Awaitable[T]) -> T:
    """Await `work` and return its result.

    If the task `gone`, which ends when the client disconnects, ends before it, cancels `work` and raises
    `ClientDisconnect`. The caller cancels `gone`."""
    scope, ended = asyncio.timeout(None), False

    def stop(_: asyncio.Task[None]) -> None:
        if not ended:
            scope.reschedule(0.0)

    gone.add_done_callback(stop)
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
        gone.remove_done_callback(stop)


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(request: Request, refused: RequestRefused) -> Response:
    """Return the HTTP response for an error, in the format of the API to which the request's path belongs.

    For a path of no API, or of several, the format is Anthropic's if the request has the header `anthropic-version`,
    and otherwise OpenAI's."""
    path = request.scope["path"]
    others = messages.error if "anthropic-version" in request.headers else openai_error
    write = next((d.error for d in DIALECTS.values() if path.startswith(d.path)), others)
    return json_response(write(refused), refused.status, refused.headers)


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, EtudeError)
    return error_response(request, from_error(error))


def no_route(request: Request, error: Exception) -> Response:
    """Return the response for a path that does not exist (status 404), or does not support this method (405)."""
    path = request.scope["path"]
    what = f"{request.method} {path[:200]} is not supported"
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {})["Allow"]
        method = "POST" if "POST" in allowed else "GET"
        facts, hint, code = f"this path takes only {method}", f"send {method}", "method_not_allowed"
        return error_response(request, RequestRefused(405, what, facts, hint=hint, code=code, allow=allowed))
    offered = ["/health", "/metrics", "/openapi.json", "/v1/models", "/v1/messages/count_tokens", "/v1/feedback"]
    offered += [d.path for d in DIALECTS.values()]
    urls = "clients of OpenAI's API need the base URL http://HOST:PORT/v1, those of Anthropic's http://HOST:PORT"
    hint = f"{nearest(path.replace('/v1/v1', '/v1'), offered)}; {urls}"
    return error_response(request, RequestRefused(404, what, hint=hint, code="not_found"))


async def _broken(request: Request, error: Exception) -> Response:
    return error_response(request, broken())


HANDLERS: Any = {EtudeError: _failed, Exception: _broken}
"""Starlette's handlers by exception type."""


@contextlib.asynccontextmanager
async def serving(app: Starlette, *, config: GatewayConfig) -> AsyncIterator[str]:
    """Serve `app`, made by `create_app`, while the block runs. Yields the URL that OpenAI clients take as `base_url`.

    Raises `ConfigError` when the port is in use, and when the app has no API key but `config.host` is not a loopback
    address. At exit, new requests get status 503, and running ones have `config.drain_s` seconds to end."""
    if not app.state.needs_key and not is_loopback(config.host):
        hint = "give a key (--key, or ETUDE_API_KEY), or keep --host 127.0.0.1"
        raise ConfigError(
            f"host {config.host!r} is open to the network",
            "no API key is configured, so anybody could send requests",
            hint=hint,
        )
    async with run_http_server(app, bind(config.host, config.port), name="the gateway", grace_s=1) as url:
        try:
            yield f"{url}/v1"
        finally:
            await app.state.gateway.drain(config.drain_s)
