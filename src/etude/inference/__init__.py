"""Inference engines that load new weights while they serve.

An engine is a server with a URL, for example `python -m etude.inference.server`. `HttpEngine` is its client. A `Fleet`
of clients implements `Policy.complete`, through which rollouts, evaluations and the gateway sample. What is exported
here needs no torch; the engine itself is `etude.inference.engine.ReferenceEngine`.

>>> fleet = Fleet({"engine-0": HttpEngine("http://127.0.0.1:8001"), "engine-1": HttpEngine("http://127.0.0.1:8002")})
>>> sorted(fleet.engines)
['engine-0', 'engine-1']
"""

from etude.errors import MalformedRequest
from etude.inference.client import HttpEngine
from etude.inference.config import EngineConfig
from etude.inference.errors import EngineBusy, EngineGone, Unauthorised
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
