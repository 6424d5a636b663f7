"""The event loop of the conductor and the gateway, which serve thousands of calls, tasks and timers a second."""

from __future__ import annotations

import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")
YOUNG_OBJECTS = 10_000  # between two garbage collections; Python's 700 are allocated by a few rollouts


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a program's work in a new event loop and return its result.

    From now on the garbage collector ignores the objects that exist already, and runs less often, since almost no
    garbage of these programs is in reference cycles."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
    return uvloop.run(work)
