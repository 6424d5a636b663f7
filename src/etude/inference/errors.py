"""Errors of engines, as exceptions and as HTTP responses. Client and server share this table.

The body is JSON, ``{"kind", "what", "facts", "hint"}``. `kind` separates errors with the same status: 503 is "busy" or
"failed". Other servers send no kind; then the status decides."""

from __future__ import annotations

import msgspec

from etude.errors import ContextFull, EngineBehind, EngineError, EtudeError, MalformedRequest


class InvalidGrammar(MalformedRequest):
    """A request whose grammar is invalid, too complex, or cannot be used with this engine (HTTP 400)."""


class Unauthorised(EngineError):
    """Raised when the bearer token is missing or wrong (HTTP 401)."""


class EngineBusy(EngineError):
    """Raised when the engine's queue is full (HTTP 503).

    The request may be served a little later, or by another engine."""


class NotRegistered(EngineError):
    """Raised by a registry for an engine that never joined, or whose membership has expired (HTTP 410).

    The engine must join again."""


class EngineUnreachable(EngineError):
    """Raised when the registry cannot reach a joining engine at the URL that it gave (HTTP 424)."""


class EngineLate(EngineError):
    """Raised for a request that made no progress for its `deadline_s` (HTTP 504)."""


class EngineGone(EngineError):
    """Raised by clients when no server responds at the engine's address, or the connection broke."""


_KINDS: dict[str, tuple[int, type[EngineError]]] = {
    "malformed": (400, MalformedRequest),
    "grammar": (400, InvalidGrammar),
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
    """The JSON body of an engine's response whose status is not 200.

    `what`, `facts` and `hint` are the texts of the exception. `kind` names its class, such as "behind"; "" from other
    servers."""

    what: str
    facts: str = ""
    hint: str = ""
    kind: str = ""


def to_http(error: EtudeError) -> tuple[int, bytes]:
    """Return the HTTP status and the JSON body of an error.

    >>> to_http(EngineBehind("step 4 asked", "this engine holds 3", hint="adopt first"))[0]
    409
    """
    kind = next((k for k, (_, t) in _KINDS.items() if type(error) is t), "failed")
    body = ErrorBody(what=error.what, facts=error.facts, hint=error.hint, kind=kind)
    return _KINDS[kind][0], msgspec.json.encode(body)


def from_http(status: int, body: bytes, *, engine: str) -> EngineError:
    """Return the exception for an engine's HTTP response with an error status. Accepts any `body` without raising.

    `engine` names the engine in the exception's text.

    >>> from_http(409, b'{"what": "step 4 asked", "hint": "adopt first"}', engine="engine-0")
    EngineBehind('step 4 asked')
    """
    by_status = next((t for s, t in _KINDS.values() if s == status and s != 503), EngineError)
    try:
        error = msgspec.json.decode(body, type=ErrorBody)
    except ValueError:
        return by_status(f"{engine} returned status {status}", repr(body[:200]), hint="see the engine's log")
    kind = _KINDS[error.kind][1] if error.kind in _KINDS else by_status
    return kind(error.what, error.facts, hint=error.hint)
