"""A relay: any store, to be read over HTTP by machines that share no disk. `http.HttpStore` is the other side.

``GET /KEY`` with ``X-Etude-Range: START-STOP`` (as of `BlobStore.get`; STOP may be empty) has the bytes as its body;
``GET /?prefix=P`` a JSON list of keys. 404: no such object; 401: another token; 502: what the store behind says, as
``{"error": text}``. Nothing can be written through it. Knows nothing of caches: give it a `CachedStore`.
"""

from __future__ import annotations

import hmac
import json
import re

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.errors import StoreError
from etude.seams import BlobStore
from etude.stores.keys import is_key

_RANGE = re.compile(r"(\d{1,18})-(\d{0,18})")


def build_relay(store: BlobStore, *, token: str | None = None) -> Starlette:
    """The application. `token`: what every request must bear; None for a relay that only its own host reaches."""

    async def serve(request: Request) -> Response:
        if token is not None and not _bears(request, token):
            return Response(status_code=401)
        key = request.path_params["key"]
        found = _RANGE.fullmatch(request.headers.get("x-etude-range", "0-"))
        start, stop = (int(found[1]), int(found[2]) if found[2] else None) if found else (1, 0)
        if (stop is not None and stop < start) or (key and not is_key(key)):
            return JSONResponse({"error": "no such range or key"}, status_code=400)
        try:
            if not key:
                keys = await run_in_threadpool(store.list, request.query_params.get("prefix", ""))
                return Response(json.dumps(keys).encode()[start:stop], media_type="application/json")
            data = await run_in_threadpool(store.get, key, start, stop)
        except KeyError:
            return Response(status_code=404)
        except StoreError as error:
            return JSONResponse({"error": f"{error.what}: {error.facts}"}, status_code=502)
        return Response(data, media_type="application/octet-stream", headers={"Cache-Control": "no-store"})

    return Starlette(routes=[Route("/{key:path}", serve, methods=["GET"])])


def _bears(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "")
    return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode())
