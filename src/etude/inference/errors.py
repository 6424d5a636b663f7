"""The errors of engines, as exceptions and as HTTP answers; client and server share this table.

The body is JSON, ``{"kind", "what", "facts", "hint"}``. `kind` separates errors that share a status code: a 503 that is
over in a moment (busy) and one that is not (failed). Engines that are not etude's own send no kind; then the status
decides.
"""

from __future__ import annotations

import msgspec

from etude.errors import ContextFull, EngineBehind, EngineError, EtudeError


class MalformedRequest(EngineError):
    """Bytes or values that no engine would accept (HTTP 400); the same request fails everywhere."""


class Unauthorised(EngineError):
    """The bearer token is missing or wrong (HTTP 401)."""


class EngineBusy(EngineError):
    """The engine's queue is full (HTTP 503); the request may be served a little later, or by another engine."""


class NotRegistered(EngineError):
    """The engine's lease has ended, or it never joined (HTTP 410). It must join again."""


class EngineUnreachable(EngineError):
    """The engine that wants to join does not answer the registry at the URL that it gave (HTTP 424)."""


class EngineLate(EngineError):
    """A request made no progress for its `deadline_s` (HTTP 504)."""


class EngineGone(EngineError):
    """Nothing answers at the engine's address, or the connection broke. Raised by clients only."""


_KINDS: dict[str, tuple[int, type[EngineError]]] = {
    "malformed": (400, MalformedRequest),
    "unauthorised": (401, Unauthorised),
    "behind": (409, EngineBehind),
    "not-registered": (410, NotRegistered),
    "context": (413, ContextFull),
    "unreachable": (424, EngineUnreachable),
    "busy": (503, EngineBusy),
    "late": (504, EngineLate),
    "failed": (503, EngineError),
}


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON body of an HTTP answer whose status is not 200."""

    what: str
    facts: str = ""
    hint: str = ""
    kind: str = ""


def to_http(error: EtudeError) -> tuple[int, bytes]:
    """The HTTP status and the JSON body of an error.

    >>> to_http(EngineBehind("step 4 asked", "this engine holds 3", hint="adopt first"))[0]
    409
    """
    kind = next((k for k, (_, t) in _KINDS.items() if type(error) is t), "failed")
    body = ErrorBody(what=error.what, facts=error.facts, hint=error.hint, kind=kind)
    return _KINDS[kind][0], msgspec.json.encode(body)


def from_http(status: int, body: bytes, *, engine: str) -> EngineError:
    """The exception of an HTTP answer. Never raises itself, whatever the bytes are.

    >>> from_http(409, b'{"what": "step 4 asked", "hint": "adopt first"}', engine="engine-0")
    EngineBehind('step 4 asked')
    """
    by_status = next((t for s, t in _KINDS.values() if s == status and s != 503), EngineError)
    try:
        error = msgspec.json.decode(body, type=ErrorBody)
    except ValueError:
        return by_status(f"{engine} answered {status}", repr(body[:200]), hint="its log says why")
    kind = _KINDS[error.kind][1] if error.kind in _KINDS else by_status
    return kind(error.what, error.facts, hint=error.hint)
