"""Signals as products send them: the body of a request, and lines of a file. Both are checked in full."""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

import msgspec

from etude.errors import SignalRefused

MAX_SIGNALS = 1000
"""The most signals of a request."""
MAX_ID_CHARS = 256
MAX_ANSWERS = 16
"""The most answers of a response: an API request may ask for several (`n`)."""
_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}", re.ASCII)
_LATEST = 1e11  # a time after this is in ms
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")


class GivenSignal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One signal as its sender wrote it.

    - `id`: names the signal: sent again under the same id, it counts once. 1 to 256 characters, of the sender's choice.
    - `response_id`: the id of the response, as the gateway gave it. `answer`: the number of the answer in it, from 0.
    - `name`: what happened, such as "kept", "accepted", "reverted", "rated" or "retried": up to 64 characters of a-z,
      0-9 and _.-, the first a letter.
    - `value`: how much, in [0, 1]; true is 1 and false is 0.
    - `at`: when it happened by the sender's clock, Unix time in s; None: when it is received."""

    id: str
    response_id: str
    name: str
    value: bool | float
    at: float | None = None
    answer: int = 0

    def check(self) -> None:
        """Raise `SignalRefused` if a field has an invalid value."""
        if not 0 < len(self.id) <= MAX_ID_CHARS:
            hint = f"give an id of 1 to {MAX_ID_CHARS} characters, such as a random UUID"
            raise SignalRefused("a signal has an empty or long id", f"{len(self.id)} characters", hint=hint, param="id")
        if not _NAME.fullmatch(self.name):
            hint = "a name has up to 64 characters of a-z, 0-9 and _.-, the first a letter, such as kept"
            raise SignalRefused(f"{self.name[:80]!r} is not the name of a signal", hint=hint, param="name")
        if not 0 <= self.value <= 1:
            raise SignalRefused(f"the value {self.value} is outside [0, 1]", hint="scale it", param="value")
        if not 0 <= self.answer < MAX_ANSWERS:
            hint = "give the index of the choice that it is about, from 0"
            raise SignalRefused(f"no response has an answer {self.answer}", hint=hint, param="answer")
        if self.at is not None and not (math.isfinite(self.at) and 0 <= self.at < _LATEST):
            hint = "send Unix time in seconds, not in milliseconds, or leave it out"
            raise SignalRefused(f"at = {self.at} is not a time", hint=hint, param="at")

    def content(self, response_id: str) -> bytes:
        """Return a digest (16 bytes) of all but the id. `response_id`: the verified one, without its prefix."""
        told = msgspec.msgpack.encode([response_id, self.answer, self.name, float(self.value), self.at])
        return hashlib.blake2b(told, digest_size=16).digest()


class ImportedSignal(GivenSignal, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A signal in a line of a file. `organisation`, `user`: who was given the answer, as the gateway knew them: the
    name of the API key ("local" without keys), and the header x-etude-user ("" without it)."""

    organisation: str = "local"
    user: str = ""


class SignalBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several signals in one request."""

    signals: list[GivenSignal]


_LINES = msgspec.json.Decoder(ImportedSignal)


def parse_body(body: bytes) -> list[GivenSignal]:
    """Return the signals in the body of a request: one signal, or ``{"signals": [...]}`` with 1 to `MAX_SIGNALS`.

    Raises `SignalRefused`, whose `param` names the invalid field."""
    hint = 'send one signal, or {"signals": [...]}, each with id, response_id, name and value'
    try:
        told: Any = msgspec.json.decode(body)
        if isinstance(told, dict) and "signals" in told:
            found = msgspec.convert(told, SignalBatch).signals
        else:
            found = [msgspec.convert(told, GivenSignal)]
    except msgspec.ValidationError as error:
        text = str(error)
        place = _PLACE.search(text)
        raise SignalRefused("the body has no signals", text, hint=hint, param=place[1] if place else "") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SignalRefused("the body is not JSON", str(error), hint=hint) from None
    if not 0 < len(found) <= MAX_SIGNALS:
        what = f"the request has {len(found)} signals"
        raise SignalRefused(what, hint=f"send 1 to {MAX_SIGNALS} in a request", param="signals")
    for index, one in enumerate(found):
        try:
            one.check()
        except SignalRefused as error:
            raise error if len(found) == 1 else placed(error, index) from None
    return found


def placed(error: SignalRefused, index: int) -> SignalRefused:
    """Return an error about a signal as one about signal `index` of a request."""
    param = f"signals[{index}]" + (f".{error.param}" if error.param else "")
    return SignalRefused(error.what, error.facts, hint=error.hint, reason=error.reason, param=param)


def parse_line(line: bytes) -> ImportedSignal:
    """Return the signal in a line of JSON. Raises `SignalRefused`."""
    try:
        found = _LINES.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "write one object a line with id, response_id, name and value; see docs/formats/feedback.md"
        raise SignalRefused("a line is not a signal", str(error), hint=hint) from None
    found.check()
    return found
