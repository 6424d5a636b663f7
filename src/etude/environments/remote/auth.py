"""Authenticate HTTP requests by API key, access token or signature.

Requests that create or manage sandboxes need an API key, which belongs to an account. Requests to a sandbox name it by
the header `E2b-Sandbox-Id` or by the host (`49983-ID.DOMAIN`), and need its access token, which only its creator
received. Downloads and uploads can have a signature made with that token instead.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time

from starlette.requests import Request
from starlette.responses import Response

from etude.environments.remote.api_errors import ApiError, sandbox_gone
from etude.environments.remote.connect import Code, RpcError
from etude.environments.remote.keys import Account, Keyring
from etude.environments.remote.sandboxes import Sandbox, SandboxManager

_PORT = "49983"  # of E2B's daemon; other ports of sandboxes are not served


def sandbox_of(manager: SandboxManager, request: Request, *, signed: str = "") -> Sandbox:
    """Return the running sandbox that a request names, after checking its access token or signature.

    `signed` is the text that a signature in the query must sign; "" allows no signatures. Raises `ApiError`: 400 if no
    sandbox is named, 401 for a wrong token, 404 if the sandbox does not exist or is paused."""
    sandbox_id = request.headers.get("e2b-sandbox-id", "")
    if not sandbox_id:
        port, _, rest = request.headers.get("host", "").partition("-")
        sandbox_id = rest.partition(".")[0] if port == _PORT else ""
    if not sandbox_id:
        hint = "send the header E2b-Sandbox-Id, or use the host 49983-ID.DOMAIN"
        raise ApiError(400, "the request names no sandbox", hint=hint)
    sandbox = manager.get(sandbox_id)
    if sandbox.paused is not None:
        raise ApiError(404, f"sandbox {sandbox_id} is paused", hint="connect to it to resume it")
    given = request.headers.get("x-access-token", "")
    if not hmac.compare_digest(given.encode(), sandbox.token.encode()) and not _is_signed(
        request, signed, sandbox.token
    ):
        raise ApiError(
            401, "the access token is missing or wrong", hint="send X-Access-Token with the token that create returned"
        )
    return sandbox


def account_of(keys: Keyring, request: Request) -> Account:
    """Return the account of a request's API key. Raises `ApiError` (401) if the key is missing or unknown."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    given = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
    account = keys.account(given)
    if account is None:
        raise ApiError(401, "the API key is missing or wrong", hint="send X-API-Key with a key of this server")
    return account


def user_of(request: Request) -> str:
    """Return the machine user that a request names in its basic authorization; "" if it names none.

    Raises `RpcError` if the header cannot be decoded."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[0]
    except ValueError:
        raise RpcError(Code.INVALID_ARGUMENT, "the authorization header has no user") from None


def refusal_response(error: ApiError) -> Response:
    """Build the response to a request that `sandbox_of` refused.

    For a sandbox that does not exist (404) it is the 502 of E2B's proxy, which clients expect."""
    return sandbox_gone("") if error.status == 404 else error.response()


def _is_signed(request: Request, what: str, token: str) -> bool:
    """Whether the query has a valid, unexpired signature of `what` with the access token."""
    given, until = request.query_params.get("signature"), request.query_params.get("signature_expiration")
    if not given or not what or (until is not None and not (until.isascii() and until.isdigit() and len(until) < 12)):
        return False
    raw = f"{what}:{token}" + (f":{until}" if until is not None else "")
    good = "v1_" + base64.b64encode(hashlib.sha256(raw.encode()).digest()).rstrip(b"=").decode()
    return hmac.compare_digest(given.encode(), good.encode()) and (until is None or int(until) > time.time())
