"""Runs blocking work in threads, always to its end."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread and return its result; the event loop continues meanwhile.

    A cancelled caller still waits for the end of the work, so that the work never overlaps with what follows.

    >>> asyncio.run(run_in_thread(lambda: 2 + 2))
    4
    """
    return await _to_its_end(asyncio.ensure_future(asyncio.to_thread(work)))


class SerialExecutor:
    """Runs calls in one thread, in the order of submission.

    They neither block the event loop nor overtake each other.

    >>> async def story() -> list[int]:
    ...     in_order, done = SerialExecutor("example"), list[int]()
    ...     await asyncio.gather(*(in_order(done.append, i) for i in range(4)))
    ...     in_order.close()
    ...     return done
    >>> asyncio.run(story())
    [0, 1, 2, 3]
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def __call__(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Run `work` in the thread and return its result. A cancelled caller still waits for its end."""
        call = functools.partial(work, *args, **named)
        return await _to_its_end(asyncio.get_running_loop().run_in_executor(self._thread, call))

    def close(self) -> None:
        """Wait for the submitted calls and end the thread. Idempotent."""
        self._thread.shutdown(wait=True)


async def _to_its_end(doing: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(doing)
    finally:
        if not doing.done():
            await asyncio.wait([doing])
        if not doing.cancelled():
            doing.exception()  # mark as retrieved: the caller was cancelled
