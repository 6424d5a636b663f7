"""QEMUs that wait for a snapshot: each can become any machine of its base, so they are made before they are needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from etude.environments.microvm.base import Base
from etude.environments.microvm.qemu import Qemu
from etude.errors import MachineError


class Spares:
    """Up to `count` of one base, made anew beside what goes on."""

    def __init__(self, base: Base, count: int) -> None:
        self.base, self._count = base, count
        self._waiting: deque[Qemu] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._closed = False

    async def take(self) -> Qemu:
        """One that waits, or a new one. It is replaced by the next `fill`. Raises `MachineError`."""
        while self._waiting:
            guest = self._waiting.popleft()
            if guest.process.is_alive:
                return guest
            await guest.close()
        return await self._spawn()

    def fill(self) -> None:
        """Have missing ones made."""
        if not self._closed and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(self._fill())

    async def filled(self) -> None:
        """Wait until none is missing."""
        self.fill()
        if self._filling is not None:
            await asyncio.shield(self._filling)

    async def _fill(self) -> None:
        with contextlib.suppress(MachineError):  # whoever needs one will meet the reason
            while len(self._waiting) < self._count and not self._closed:
                self._waiting.append(await self._spawn())

    async def _spawn(self) -> Qemu:
        guest = Qemu(self.base.hardware, self.base.ram)
        try:
            await guest.connect()
        except BaseException:
            await guest.close()
            raise
        return guest

    async def close(self) -> None:
        """End those that wait. Idempotent."""
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        waiting, self._waiting = self._waiting, deque()
        await asyncio.gather(*(guest.close() for guest in waiting))
