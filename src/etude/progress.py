"""A progress counter of this process: long work increments it, and code that waits for the work reads it.

So a wait can be limited by the time without progress, however large the work is. There is one counter per process,
shared by all threads. `begin` names the work that starts, so that the error about a wait can say where it stands."""

from __future__ import annotations

import itertools

_ticks = itertools.count(1)
_last = 0
_doing = ""


def tick() -> None:
    """Count one unit of work as done: a row of a batch, a tensor, a file. Cheap and thread-safe."""
    global _last
    _last = next(_ticks)


def count() -> int:
    """Return the number of `tick` calls so far. A larger value than before means that work has progressed.

    >>> before = count()
    >>> tick()
    >>> count() > before
    True
    """
    return _last


def begin(what: str) -> None:
    """Count one unit of work as done, and name the next one, such as "reading FILE"."""
    global _doing
    _doing = what
    tick()


def doing() -> str:
    """Return what `begin` was called with last, or ""."""
    return _doing
