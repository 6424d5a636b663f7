"""A relay: any store, to be read over HTTP by machines that share no disk. `http.HttpStore` is the other side.

``GET /KEY`` with ``X-Etude-Range: START-STOP`` (as of `BlobStore.get`; STOP may be empty) has the bytes as its body;
``GET /?prefix=P`` a JSON list of keys. 404: no such object; 401: another token; 502: what the store behind says, as
``{"error": text}``. Nothing can be written through it. Knows nothing of caches: give it a `CachedStore`.
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
    """The application. `token`: what every request must bear; None for a relay that only its own host reaches.

    `at_once`: answers that are in memory; others wait. `send_s`: a client that takes nothing for so long is let go.
    """
    free = asyncio.Semaphore(at_once)

    async def serve(request: Request) -> Response:
        if token is not None and not _bears(request, token):
            return Response(status_code=401)
        key, prefix = request.path_params["key"], request.query_params.get("prefix", "")
        found = _RANGE.fullmatch(request.headers.get("x-etude-range", "0-"))
        start, stop = (int(found[1]), int(found[2]) if found[2] else None) if found else (1, 0)
        if (stop is not None and stop < start) or not (is_key(key) if key else is_prefix(prefix)):
            return JSONResponse({"error": "no such range, key or prefix"}, status_code=400)

        def read() -> bytes:
            if key:
                return store.get(key, start, stop)
            return json.dumps(store.list(prefix)).encode()[start:stop]

        return _Answer(read, free, send_s)

    return Starlette(routes=[Route("/{key:path}", serve, methods=["GET"])])


class _Answer(Response):
    """Read and sent while it has one of the free places, so that memory is bounded by those."""

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
                said = {"error": f"{error.what}: {error.facts}"}
                await JSONResponse(said, status_code=502)(scope, receive, send)
                return
            headers = [(b"content-length", b"%d" % len(data)), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for at in range(0, max(1, len(data)), _CHUNK):
                chunk = data[at : at + _CHUNK]
                body = {"type": "http.response.body", "body": chunk, "more_body": at + _CHUNK < len(data)}
                try:
                    await asyncio.wait_for(send(body), self._send_s)
                except TimeoutError:
                    return  # an answer that is not ended: the server closes the connection


def _bears(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "")
    return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode())
