"""Runs functions whose time grows with their input: short input on the event loop, long input in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")
_SHORT_S = 0.02  # after more CPU time than this, less runs on the event loop


class ShortWork:
    """Runs functions with short input on the event loop, where they delay it little, and all others in a thread.

    `most` is the maximum size of a short input, in any unit, such as characters. This limit is halved when two
    consecutive functions have each taken more than 20 ms on the event loop, and raised again, up to `most`, by each
    function that takes less. `in_thread` runs a function in a thread."""

    def __init__(self, most: int, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] = asyncio.to_thread) -> None:
        self._most = self._limit = most
        self._in_thread = in_thread
        self._was_long = False

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Run `work`, whose input has the size `size`, and return its result. Raises what `work` raises."""
        if size > self._limit:
            return cast(T, await self._in_thread(work))
        clock = time.thread_time if self._was_long else time.perf_counter  # the first is a slow system call
        began = clock()
        result = work()
        took_long = clock() - began > _SHORT_S
        if not took_long:
            self._limit = min(self._most, self._limit + self._most // 64)
        elif self._was_long:
            self._limit //= 2
        self._was_long = took_long
        return result
