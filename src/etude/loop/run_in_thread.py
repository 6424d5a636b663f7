"""Work in a thread, to its end; and, where it must, one piece after the other."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


async def run_in_thread(work: Callable[[], T]) -> T:
    """What work returns; the loop goes on meanwhile. Who is cancelled waits for the end of the work, so that it never
    runs beside what comes after.

    >>> asyncio.run(run_in_thread(lambda: 2 + 2))
    4
    """
    return await _to_its_end(asyncio.ensure_future(asyncio.to_thread(work)))


class SerialExecutor:
    """One thread that does what it is given, in the order in which it was given: work that waits for a disk or a server
    neither stops the event loop nor overtakes anything.

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
        """What work returns or raises. A caller that is cancelled waits for its end."""
        call = functools.partial(work, *args, **named)
        return await _to_its_end(asyncio.get_running_loop().run_in_executor(self._thread, call))

    def close(self) -> None:
        """Let the thread end after what it was given. Idempotent."""
        self._thread.shutdown(wait=True)


async def _to_its_end(doing: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(doing)
    finally:
        await asyncio.wait([doing])
        if not doing.cancelled():
            doing.exception()  # of work whose caller was cancelled: nobody else looks
