"""AdjustableSemaphore for so many at once, where how many may change while they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Limit:
    """How many may run at once; whoever has the number sets it, and rooms follow."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.changed = asyncio.Event()

    def set(self, value: int) -> None:
        """From now on. Those who run already are left alone."""
        self.value = value
        self.notify_all()

    def notify_all(self) -> None:
        """Have everybody who waits look again."""
        self.changed.set()
        self.changed = asyncio.Event()


class AdjustableSemaphore:
    """A semaphore under a `Limit`.

    >>> async def story() -> list[int]:
    ...     limit = Limit(0)
    ...     semaphore, done = AdjustableSemaphore(limit), list[int]()
    ...     async def work(i: int) -> None:
    ...         async with semaphore.slot():
    ...             done.append(i)
    ...     tasks = [asyncio.create_task(work(i)) for i in range(3)]
    ...     await asyncio.sleep(0)
    ...     assert not done
    ...     limit.set(1)
    ...     await asyncio.gather(*tasks)
    ...     return done
    >>> asyncio.run(story())
    [0, 1, 2]
    """

    def __init__(self, limit: Limit) -> None:
        self._limit, self._num_taken = limit, 0

    @property
    def free(self) -> int:
        """Places that `acquire` would not wait for."""
        return max(0, self._limit.value - self._num_taken)

    async def acquire(self) -> None:
        """Wait for a place and take it."""
        while not self.free:
            await self._limit.changed.wait()
        self._num_taken += 1

    def release(self) -> None:
        """Give a place back."""
        self._num_taken -= 1
        self._limit.notify_all()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """A place while the block runs."""
        await self.acquire()
        try:
            yield
        finally:
            self.release()
