"""Who may read the pages, and what a browser may do with them.

Without a key only requests that name a loopback host are answered: a web page whose host name resolves to this machine
(DNS rebinding) is refused. With keys, the key is the password of HTTP basic authentication, or a bearer token. The
headers of every response forbid scripts, styles and connections from elsewhere, and frames: a hostile transcript that
got past the escaping still could not run or send anything."""

from __future__ import annotations

import base64
import binascii

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etude.gateway import Keys
from etude.gateway.errors import RequestRefused
from etude.gateway.http import is_local

MAX_URL_BYTES = 4096
HEADERS = {
    "content-security-policy": "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}


class Guard:
    """An ASGI middleware that refuses requests which may not read the pages.

    It answers only GET and HEAD requests with a valid key or, if there are no `keys`, from this machine. It adds the
    security headers to every response."""

    def __init__(self, app: ASGIApp, *, keys: Keys | None) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refused = self._refusal(scope)
        await (refused or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        request = Request(scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("these pages are only read\n", 405, {"allow": "GET, HEAD"})
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_URL_BYTES:
            return PlainTextResponse("the URL is too long\n", 414)
        if self._keys is None:
            if not is_local(request):
                what = "etude dash has no key, so it answers only requests to localhost; start it with --key\n"
                return PlainTextResponse(what, 403)
            return None
        try:
            self._keys.find(_given(request.headers))
        except RequestRefused:
            realm = {"www-authenticate": 'Basic realm="etude dash: the password is the key", charset="UTF-8"'}
            return PlainTextResponse("the key is missing or wrong\n", 401, realm)
        return None


def _given(headers: Headers) -> bytes:
    """The key of a request, from its headers; b"" if there is none."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1")
    return headers.get("x-api-key", "").strip().encode("latin-1")
