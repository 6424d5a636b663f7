"""Signed ids of responses: who was given an answer, when, and by which model, without a record of each answer.

An id is 64 hexadecimal characters: 6 bytes of time (ms), 5 random ones, 1 with the number of answers, 4 that name the
model, and the first 16 of an HMAC-SHA256 over these and the names of organisation and user. An API of the gateway puts
its prefix before it, such as "chatcmpl-"."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from etude.records.served import PREFIXES

MAX_CHARS = 128
"""The longest text that may be an id."""
_TIME, _NONCE, _ANSWERS, _MODEL, _TAG = 6, 5, 1, 4, 16
_ID = re.compile(rf"(?:{'|'.join(PREFIXES)})?([0-9a-f]{{{2 * (_TIME + _NONCE + _ANSWERS + _MODEL + _TAG)}}})", re.ASCII)


class ResponseId(NamedTuple):
    """A verified id.

    - `text`: without the prefix, as `Captured.response_id`.
    - `began`: when the answer was begun, Unix time in s.
    - `answers`: the number of answers in the response.
    - `model`: the digest of the served model's name (`model_digest`)."""

    text: str
    began: float
    answers: int
    model: str


class ResponseIds:
    """Makes and verifies ids of responses, by a secret of at least 32 bytes. `clock` returns Unix time in seconds.

    >>> ids = ResponseIds(bytes(32), clock=lambda: 1_700_000_000.0)
    >>> given = ids.new("acme", "bob", "laptop")
    >>> ids.verify(f"chatcmpl-{given}", "acme", "bob").began
    1700000000.0
    >>> ids.verify(given, "acme", "eve"), ids.verify(given, "other", "bob"), ids.verify("0" * 64, "acme", "bob")
    (None, None, None)
    """

    def __init__(self, secret: bytes, *, clock: Callable[[], float] = time.time) -> None:
        self._secret, self._clock = secret, clock

    def new(self, organisation: str, user: str, model: str, answers: int = 1) -> str:
        """Return the id of a new response to a user of an organisation (or to no named one: "") by a served model.

        `answers`: the number of answers in the response, 1 to 255."""
        began = int(self._clock() * 1000).to_bytes(_TIME, "big")
        payload = began + secrets.token_bytes(_NONCE) + bytes([answers]) + bytes.fromhex(model_digest(model))
        return (payload + self._tag(payload, organisation, user)).hex()

    def verify(self, text: str, organisation: str, user: str) -> ResponseId | None:
        """Return what an id says; None unless `new` made it with this secret for this organisation and user."""
        found = _ID.fullmatch(text) if len(text) <= MAX_CHARS else None
        if found is None:
            return None
        data = bytes.fromhex(found[1])
        payload, tag = data[:-_TAG], data[-_TAG:]
        if not hmac.compare_digest(tag, self._tag(payload, organisation, user)):
            return None
        began, answers = int.from_bytes(payload[:_TIME], "big") / 1000, payload[_TIME + _NONCE]
        return ResponseId(found[1], began, answers, payload[-_MODEL:].hex())

    def _tag(self, payload: bytes, organisation: str, user: str) -> bytes:
        names = [name.encode("utf-8", "surrogatepass") for name in (organisation, user)]
        signed = b"".join([b"etude response 2\0", payload, *(struct.pack(">Q", len(one)) + one for one in names)])
        return hmac.digest(self._secret, signed, "sha256")[:_TAG]


def model_digest(model: str) -> str:
    """Return the 8 hexadecimal characters that stand for a served model's name in ids."""
    return hashlib.blake2b(model.encode("utf-8", "surrogatepass"), digest_size=_MODEL).hexdigest()


def began_at(response_id: str) -> float:
    """Return when the answer with an id that `ResponseIds.new` made was begun, without verifying it; Unix time in s."""
    return int(response_id[: 2 * _TIME], 16) / 1000
