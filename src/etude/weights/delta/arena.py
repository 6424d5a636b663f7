"""Short-lived buffers whose memory returns to the operating system as soon as they are released.

A heap allocator keeps freed memory that lies between live objects. In an engine that follows versions, that would be
some percent of the model. So large short-lived arrays are allocated as memory mappings of their own.
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
"""An array of at least this many bytes is a mapping of its own. For smaller ones the heap is cheaper."""

BLOCK_BYTES = 1 << 20
_ALIGNMENT = 64


def allocate(count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an uninitialised array of shape [count].

    An array of `MAPPED_BYTES` or more is a memory mapping of its own, which is unmapped as soon as the array is
    released.

    >>> allocate(3, np.dtype(np.uint16)).shape
    (3,)
    """
    num_bytes = count * dtype.itemsize
    if num_bytes < MAPPED_BYTES or sys.platform == "win32":
        return np.empty(count, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype, count)


def trim_heap() -> None:
    """Make glibc's allocator return free pages to the system; with other allocators, do nothing.

    It takes milliseconds: do not call it while an engine is paused.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in musl
    return trim


class Arena:
    """Allocates many small arrays from shared blocks of memory. A block is released when all arrays in it are
    released."""

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)
        self._at = 0

    def take(self, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an uninitialised array of shape [count].

        >>> arena = Arena()
        >>> a, b = (arena.take(5, np.dtype(np.uint16)) for _ in range(2))
        >>> bool(np.shares_memory(a, b)), a.base is b.base
        (False, True)
        """
        num_bytes = count * dtype.itemsize
        if num_bytes > BLOCK_BYTES // 4:
            return allocate(count, dtype)
        if self._at + num_bytes > self._block.nbytes:
            self._block, self._at = allocate(BLOCK_BYTES, np.dtype(np.uint8)), 0
        start, self._at = self._at, self._at + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._block[start : start + num_bytes].view(dtype)
