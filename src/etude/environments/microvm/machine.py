"""One guest as a `Machine`: commands and files through its agent, its state as a whole from QEMU."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence

from etude.environments.agent import AgentMachine, Channel
from etude.environments.microvm import overlay, snapshots
from etude.environments.microvm.qemu import NUDGE_S, Qemu
from etude.environments.microvm.snapshots import Snapshot
from etude.errors import MachineError

_QUIET_S = 20.0
_NOTHING = 1 << 20  # bytes on a disk that is full


class Guest:
    """A running guest: its QEMU, and `machine`, which is how it is used. Closing the machine ends it."""

    def __init__(
        self,
        qemu: Qemu,
        image: str,
        *,
        after: bytes,
        env: Mapping[str, str],
        users: Sequence[str],
        keep: Callable[[Snapshot], str],
        ended: Callable[[Guest], None],
    ) -> None:
        self.qemu, self._image, self._keep, self._ended = qemu, image, keep, ended
        self._channel = Channel(os.dup(qemu.channel.fileno()), after=after, nudge_s=NUDGE_S)
        self._turn = asyncio.Lock()
        self.machine = AgentMachine(
            self._channel, env=env, users=users, snapshot=self._snapshot, end=self._end, blame=self._blame, used=True
        )

    async def take(self) -> Snapshot:
        """Its state, memory and disk, between two frames of the channel. `Lost` where it is gone, `MachineError`."""
        async with self._turn, self._channel.held(_QUIET_S):
            return await snapshots.take(self.qemu, self._image)

    async def go_on(self) -> None:
        """Try again what its disk had no room for: QEMU stops it then. Nothing for one that runs or is gone."""
        async with self._turn:
            with contextlib.suppress(MachineError):
                await (await self.qemu.connect()).execute("cont")

    async def _snapshot(self, machine: AgentMachine) -> str:
        return self._keep(await self.take())

    def _blame(self) -> str:
        """No answer comes. A guest can end or hang by what runs in it, and nothing but its end is owed to it; but one
        whose writes find no room on the host stands still."""
        full = overlay.free_bytes(self.qemu.disk) < _NOTHING
        self.qemu.process.kill()
        if full:
            return f"the host's disk is full: {overlay.ROOM}"
        return "" if self._channel.is_up else f"it was restored and said nothing: {self.qemu.process.said()}"

    async def _end(self) -> None:
        self._ended(self)
        self.qemu.process.kill()
        async with self._turn:  # what is being copied of it must not be closed
            await self.qemu.close()
