"""Sends signals to a gateway. It needs nothing but Python's standard library: a product may copy this file."""

from __future__ import annotations

import email.utils
import http.client
import json
import random
import time
import urllib.error
import urllib.request
import uuid
from typing import Any

_RETRIED = (408, 429, 500, 502, 503, 504)
_FIRST_S, _LONGEST_S = 0.5, 30.0


class FeedbackFailed(Exception):
    """Signals were refused, or could not be sent before the deadline. `status`: the last HTTP status; 0 without one."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def send_feedback(
    base_url: str,
    key: str,
    response_id: str,
    *,
    user: str = "",
    answer: int = 0,
    at: float | None = None,
    signal_id: str = "",
    deadline_s: float = 60.0,
    **signals: bool | float,
) -> dict[str, str]:
    """Send signals about an answer, such as ``send_feedback(url, key, completion.id, kept=True, rated=0.8)``.

    - `base_url`: as for OpenAI's client, such as "http://127.0.0.1:8000/v1". `key`: the API key; "" without one.
    - `response_id`: the id of the answer. `answer`: the number of the choice in it.
    - `user`: what the request of the answer had in the header x-etude-user.
    - `at`: when it happened, Unix time in s; None: now.
    - `signal_id`: begins the ids of the signals. Give one of your own if the call itself may be repeated, such as after
      a crash; with the same `at`.
    - `deadline_s`: for this time it tries again, with the same ids, so that each signal counts once.
    - `signals`: names with values, true, false or a number in [0, 1].

    Returns the status of each signal by its name: "stored", "duplicate", "over_cap" or "no_consent". Raises
    `FeedbackFailed`."""
    first = signal_id or uuid.uuid4().hex
    at = time.time() if at is None else at
    sent = [
        {"id": f"{first}-{name}", "response_id": response_id, "answer": answer, "name": name, "value": value, "at": at}
        for name, value in signals.items()
    ]
    headers = {"content-type": "application/json"}
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    headers |= {"x-etude-user": user.encode().decode("latin-1")} if user else {}  # urllib sends latin-1: UTF-8 then
    body = json.dumps({"signals": sent}).encode()
    request = urllib.request.Request(f"{base_url.rstrip('/')}/feedback", body, headers, method="POST")
    found = _answer(request, time.monotonic() + deadline_s)
    return {name: one["status"] for name, one in zip(signals, found["data"], strict=True)}


def _answer(request: urllib.request.Request, end: float) -> Any:
    """Send a request until it is answered, at most until `end` (monotonic time), and return the JSON of the answer."""
    pause_s = _FIRST_S
    while True:
        left_s = max(0.1, end - time.monotonic())
        status, retry_s = 0, 0.0
        try:
            with urllib.request.urlopen(request, timeout=left_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                status, retry_s = error.code, _retry_after(error.headers.get("retry-after"))
                failure = _message(error)
            if status not in _RETRIED:
                raise FeedbackFailed(failure, status) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            failure = f"{type(error).__name__}: {error}"
        wait_s = max(retry_s, pause_s * random.uniform(0.5, 1.0))
        if time.monotonic() + wait_s >= end:
            raise FeedbackFailed(f"the signals could not be sent before the deadline: {failure}", status)
        time.sleep(wait_s)
        pause_s = min(2 * pause_s, _LONGEST_S)


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return f"HTTP status {error.code}"


def _retry_after(told: str | None) -> float:
    """Return the seconds to wait that the header retry-after names, at most `_LONGEST_S`; 0 without it."""
    if told is None:
        return 0.0
    try:
        seconds = float(told)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(told).timestamp() - time.time()
        except ValueError:
            seconds = 0.0
    return min(max(0.0, seconds), _LONGEST_S)
