"""Whom a request is from, and which machine it means.

Machines are had by API keys. For what is inside of one, it is named by a header (`E2b-Sandbox-Id`) or by the host
(`49983-ID.DOMAIN`), and every call needs its access token, which only its owner was told; a download or upload may have
a signature made of that token instead.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time

from starlette.requests import Request
from starlette.responses import Response

from etude.environments.remote.connect import Code, RpcError
from etude.environments.remote.keys import Account, Keyring
from etude.environments.remote.refusal import Refused, gone
from etude.environments.remote.sandboxes import Box, Boxes

_PORT = "49983"  # of E2B's daemon; other ports of machines are not offered


def box_of(boxes: Boxes, request: Request, *, signed: str = "") -> Box:
    """The running machine that is meant, by whoever may. Raises `Refused` (401, 404)."""
    box_id = request.headers.get("e2b-sandbox-id", "")
    if not box_id:
        port, _, rest = request.headers.get("host", "").partition("-")
        box_id = rest.partition(".")[0] if port == _PORT else ""
    if not box_id:
        hint = "send E2b-Sandbox-Id, or ask 49983-ID.DOMAIN"
        raise Refused(400, "it is not said which machine is meant", hint=hint)
    box = boxes.get(box_id)
    if box.paused is not None:
        raise Refused(404, f"{box_id} is paused", hint="connect to it: that resumes it")
    given = request.headers.get("x-access-token", "")
    if not hmac.compare_digest(given.encode(), box.token.encode()) and not _is_signed(request, signed, box.token):
        raise Refused(401, "the access token is missing or wrong", hint="send X-Access-Token, as create said it")
    return box


def account_of(keys: Keyring, request: Request) -> Account:
    """Who asks for machines, by the API key. Raises `Refused` (401)."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    given = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
    account = keys.account(given)
    if account is None:
        raise Refused(401, "the API key is missing or wrong", hint="send X-API-Key; whoever serves knows the keys")
    return account


def user_of(request: Request) -> str:
    """Whom it is done as: a name without a password. Raises `RpcError`."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[0]
    except ValueError:
        raise RpcError(Code.INVALID_ARGUMENT, "the authorization header names no user") from None


def shut(error: Refused) -> Response:
    """The answer to a request that is not let in; a machine that is not there is E2B's 502."""
    return gone("") if error.status == 404 else error.response()


def _is_signed(request: Request, what: str, token: str) -> bool:
    """Whether the query has a signature over `what`, made of the machine's token, that has not run out."""
    given, until = request.query_params.get("signature"), request.query_params.get("signature_expiration")
    if not given or not what or (until is not None and not (until.isascii() and until.isdigit() and len(until) < 12)):
        return False
    raw = f"{what}:{token}" + (f":{until}" if until is not None else "")
    good = "v1_" + base64.b64encode(hashlib.sha256(raw.encode()).digest()).rstrip(b"=").decode()
    return hmac.compare_digest(given.encode(), good.encode()) and (until is None or int(until) > time.time())
