"""What HTTP needs whatever is asked: who calls, whether the caller is still there, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from etude.errors import EtudeError
from etude.gateway.refusal import Refused, of_error

T = TypeVar("T")


def host(request: Request) -> str:
    """The name under which the caller addresses us; empty for a Host header that is none."""
    try:
        return request.url.hostname or ""
    except ValueError:  # a Host header that is none
        return ""


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """Do the work, unless the client goes away: then it is cancelled, and `ClientDisconnect` raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error.response()


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, EtudeError)
    return of_error(error).response()


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return Refused(status, f"{request.method} {request.scope['path']} is not offered", code="not_found").response()


async def _broken(request: Request, error: Exception) -> Response:
    return Refused(500, "the gateway failed; its log says why", code="internal_error").response()


HANDLERS: Any = {Refused: _refused, EtudeError: _failed, Exception: _broken, 404: _no_route, 405: _no_route}
"""What Starlette does with an error."""
