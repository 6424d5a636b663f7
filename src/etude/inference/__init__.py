"""Engines: tokens in, tokens out, while the weights change underneath.

An engine is a URL: `python -m etude.inference.server` is one, `HttpEngine` speaks to it, and a `Fleet` of them is
the one call (`Policy.complete`) through which everything asks a model. What is exported here needs no torch; the
engine itself is `etude.inference.engine.ReferenceEngine`.

>>> fleet = Fleet({"engine-0": HttpEngine("http://127.0.0.1:8001"), "engine-1": HttpEngine("http://127.0.0.1:8002")})
>>> sorted(fleet.engines)
['engine-0', 'engine-1']
"""

from etude.inference.client import HttpEngine
from etude.inference.config import EngineConfig
from etude.inference.errors import EngineBusy, EngineGone, MalformedRequest, Unauthorised
from etude.inference.fleet import Assignment, Fleet

__all__ = [
    "Assignment",
    "EngineBusy",
    "EngineConfig",
    "EngineGone",
    "Fleet",
    "HttpEngine",
    "MalformedRequest",
    "Unauthorised",
]
