"""A relay: a read-only HTTP server in front of a blob store. `etude.stores.http.HttpStore` is its client.

``GET /KEY`` with the header ``X-Etude-Range: START-STOP`` returns these bytes (as `BlobStore.get`; STOP can be empty).
``GET /?prefix=P`` returns a JSON list of keys. Status 404: no such object; 401: wrong token; 400: invalid range, key or
prefix; 502: the store failed, with ``{"error": text}``. For a cache, give it a `CachedStore`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from etude.errors import StoreError
from etude.seams import BlobStore
from etude.stores.keys import is_key, is_prefix

AT_ONCE, SEND_S = 32, 60.0
_CHUNK = 1 << 18
_RANGE = re.compile(r"(\d{1,18})-(\d{0,18})")


def build_relay(
    store: BlobStore, *, token: str | None = None, at_once: int = AT_ONCE, send_s: float = SEND_S
) -> Starlette:
    """Return the ASGI app of a relay, which serves `store` read-only over HTTP.

    - `token`: the bearer token that each request needs. None: no check, for a relay that listens on loopback only.
    - `at_once`: the most responses that are held in memory. Further requests wait.
    - `send_s`: a client that takes no bytes for this many seconds is disconnected."""
    free = asyncio.Semaphore(at_once)

    async def serve(request: Request) -> Response:
        if token is not None and not _has_token(request, token):
            return Response(status_code=401)
        key, prefix = request.path_params["key"], request.query_params.get("prefix", "")
        found = _RANGE.fullmatch(request.headers.get("x-etude-range", "0-"))
        start, stop = (int(found[1]), int(found[2]) if found[2] else None) if found else (1, 0)
        if (stop is not None and stop < start) or not (is_key(key) if key else is_prefix(prefix)):
            return JSONResponse({"error": "invalid range, key or prefix"}, status_code=400)

        def read() -> bytes:
            if key:
                return store.get(key, start, stop)
            return json.dumps(store.list(prefix)).encode()[start:stop]

        return _RelayResponse(read, free, send_s)

    return Starlette(routes=[Route("/{key:path}", serve, methods=["GET"])])


class _RelayResponse(Response):
    """A response that is read and sent while it has a slot of the semaphore `free`, which limits memory."""

    def __init__(self, read: Callable[[], bytes], free: asyncio.Semaphore, send_s: float) -> None:
        super().__init__()
        self._read, self._free, self._send_s = read, free, send_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._free:
            try:
                data = await run_in_threadpool(self._read)
            except KeyError:
                await Response(status_code=404)(scope, receive, send)
                return
            except StoreError as error:
                content = {"error": f"{error.what}: {error.facts}"}
                await JSONResponse(content, status_code=502)(scope, receive, send)
                return
            headers = [(b"content-length", b"%d" % len(data)), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for at in range(0, max(1, len(data)), _CHUNK):
                chunk = data[at : at + _CHUNK]
                body = {"type": "http.response.body", "body": chunk, "more_body": at + _CHUNK < len(data)}
                try:
                    await asyncio.wait_for(send(body), self._send_s)
                except TimeoutError:
                    return  # the response is incomplete, so the server closes the connection


def _has_token(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "")
    return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode())
