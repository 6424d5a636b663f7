"""How an engine says no, as exceptions and as HTTP: both sides of the wire share this table.

The body is JSON, ``{"kind", "what", "facts", "hint"}``. `kind` tells apart what one status code cannot: a 503 that
is over in a moment (busy) and one that is not (failed). An engine of another make sends no kind; then the status
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
    """The engine's queue is full (HTTP 503); a little later, or elsewhere, the request may be served."""


class NotRegistered(EngineError):
    """An engine whose lease has ended, or that never joined (HTTP 410): it joins again."""


class EngineUnreachable(EngineError):
    """An engine does not answer its registry at the URL that it is to join with (HTTP 424)."""


class EngineLate(EngineError):
    """Nothing happened with a request for as long as it allows, its `deadline_s` (HTTP 504)."""


class EngineGone(EngineError):
    """Nobody answers at the engine's address, or the connection broke. Raised by clients only."""


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
    """The JSON body of an answer that is not 200."""

    what: str
    facts: str = ""
    hint: str = ""
    kind: str = ""


def to_http(error: EtudeError) -> tuple[int, bytes]:
    """Status and body.

    >>> to_http(EngineBehind("step 4 asked", "this engine holds 3", hint="adopt first"))[0]
    409
    """
    kind = next((k for k, (_, t) in _KINDS.items() if type(error) is t), "failed")
    body = ErrorBody(what=error.what, facts=error.facts, hint=error.hint, kind=kind)
    return _KINDS[kind][0], msgspec.json.encode(body)


def from_http(status: int, body: bytes, *, engine: str) -> EngineError:
    """The exception behind an answer; never raises, whatever the bytes are.

    >>> from_http(409, b'{"what": "step 4 asked", "hint": "adopt first"}', engine="engine-0")
    EngineBehind('step 4 asked')
    """
    by_status = next((t for s, t in _KINDS.values() if s == status and s != 503), EngineError)
    try:
        said = msgspec.json.decode(body, type=ErrorBody)
    except ValueError:
        return by_status(f"{engine} answered {status}", repr(body[:200]), hint="its log says why")
    kind = _KINDS[said.kind][1] if said.kind in _KINDS else by_status
    return kind(said.what, said.facts, hint=said.hint)
