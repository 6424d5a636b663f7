"""A semaphore whose limit may change while it is in use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Limit:
    """The number of slots of one or more `AdjustableSemaphore` objects. It can be changed while they are in use."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.changed = asyncio.Event()

    def set(self, value: int) -> None:
        """Change the number of slots. Holders keep their slots, even if there are more of them than slots now."""
        self.value = value
        self.notify_all()

    def notify_all(self) -> None:
        """Wake all waiters, so that they check for free slots again."""
        self.changed.set()
        self.changed = asyncio.Event()


class AdjustableSemaphore:
    """An asyncio semaphore whose number of slots is a `Limit`, which may change while it is in use.

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
        """The number of slots that `acquire` would give without waiting."""
        return max(0, self._limit.value - self._num_taken)

    async def acquire(self) -> None:
        """Wait for a free slot and take it."""
        while not self.free:
            await self._limit.changed.wait()
        self._num_taken += 1

    def release(self) -> None:
        """Release a slot."""
        self._num_taken -= 1
        self._limit.notify_all()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a free slot and hold it until the end of the block."""
        await self.acquire()
        try:
            yield
        finally:
            self.release()
