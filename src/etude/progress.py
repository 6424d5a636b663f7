"""A counter of progress in this process: long work counts it up, and code that waits for the work reads it.

A deadline on a whole piece of work is a guess about its size; a deadline on the time without progress is not. There is
one counter per process: work in any of its threads counts.
"""

from __future__ import annotations

import itertools

_ticks = itertools.count(1)
_last = 0


def tick() -> None:
    """Count one part of the current work as done: a row of a batch, a tensor, a file. Cheap; may be called from any
    thread."""
    global _last
    _last = next(_ticks)


def count() -> int:
    """How often `tick` was called; greater than before means that something got on.

    >>> before = count()
    >>> tick()
    >>> count() > before
    True
    """
    return _last
