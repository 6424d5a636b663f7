"""Handles POST /v1/feedback: passes signals about answers to a receiver, which verifies and stores them."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from etude.errors import EtudeError, SignalRefused
from etude.gateway.errors import RequestRefused
from etude.gateway.http import json_response, read_body
from etude.seams import FeedbackReceiver

MAX_BODY_BYTES = 1 << 20
"""The maximum size of a request with signals. A larger one is refused with status 413."""
RETRY_S = 5.0
"""Seconds after which a client may send signals again that could not be stored (the header retry-after)."""
_REFUSED = {
    "invalid": (400, "invalid_request"),
    "unknown": (404, "answer_not_found"),
    "expired": (410, "answer_expired"),
    "conflict": (409, "idempotency_conflict"),
}


async def take_signals(receiver: FeedbackReceiver | None, request: Request, sender: tuple[str, str]) -> Response:
    """Pass the signals of a request to the receiver, wait until they are stored, and return the id and status of each.

    `sender`: the names of organisation and user. Raises `RequestRefused`: with status 404 without a receiver; with 400,
    404, 409 or 410 for signals that the receiver refuses; with 503 if they cannot be stored now."""
    if receiver is None:
        hint = "start it with --feedback FILE"
        raise RequestRefused(404, "this gateway takes no feedback", hint=hint, code="not_found")
    body = await read_body(request, MAX_BODY_BYTES, hint="send the signals in several requests")
    try:
        receipts = await asyncio.wrap_future(receiver.receive(*sender, body))
    except SignalRefused as error:
        status, code = _REFUSED[error.reason]
        what, facts, hint = error.what, error.facts, error.hint
        raise RequestRefused(status, what, facts, hint=hint, code=code, param=error.param or None) from None
    except EtudeError as error:
        hint = "send the same signals again, with the same ids"
        raise RequestRefused(503, error.what, hint=hint, code="feedback_unavailable", retry_s=RETRY_S) from None
    data = [{"id": signal_id, "status": status} for signal_id, status in receipts]
    return json_response({"object": "list", "data": data})
