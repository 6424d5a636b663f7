"""Memory that the system has back as soon as nobody uses it: what an update needs for a moment.

An allocator keeps what it is given back, between other things that are still held: an engine that follows versions
would keep some percent of its model so. Lists of changes, and what an undo needs, are mappings of their own.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

MAPPED_BYTES = 1 << 20
"""From so many on an array is a mapping of its own; a smaller one costs less in the heap."""

BLOCK_BYTES = 1 << 20
_ALIGNMENT = 64


def room(count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """[count] a new array; what is in it is not said.

    >>> room(3, np.dtype(np.uint16)).shape
    (3,)
    """
    num_bytes = count * dtype.itemsize
    if num_bytes < MAPPED_BYTES or sys.platform == "win32":
        return np.empty(count, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype, count)


def give_back() -> None:
    """Have the allocator give back what it keeps, where it is glibc's: free pages between what is still held. It takes
    milliseconds: not for an engine's pause."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in musl
    return trim


class Rooms:
    """Many small arrays, one after another in blocks, each of which lives as long as one of its arrays does."""

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)
        self._at = 0

    def take(self, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """[count] a new array; what is in it is not said.

        >>> rooms = Rooms()
        >>> a, b = (rooms.take(5, np.dtype(np.uint16)) for _ in range(2))
        >>> bool(np.shares_memory(a, b)), a.base is b.base
        (False, True)
        """
        num_bytes = count * dtype.itemsize
        if num_bytes > BLOCK_BYTES // 4:
            return room(count, dtype)
        if self._at + num_bytes > self._block.nbytes:
            self._block, self._at = room(BLOCK_BYTES, np.dtype(np.uint8)), 0
        start, self._at = self._at, self._at + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._block[start : start + num_bytes].view(dtype)
