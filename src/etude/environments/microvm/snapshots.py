"""A guest's whole state, and how a waiting QEMU becomes a guest in that state.

A snapshot is the state of its devices, the pages of memory that differ from its base, and the clusters of disk that
differ from its image: all of it in memory or in files without names, so it is gone with the last who holds it. Taking
one stops the guest for as long as it takes to copy that; the guest then goes on, unaware.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
import weakref
from typing import TypeVar

from etude.environments.agent import protocol
from etude.environments.microvm import memory, overlay
from etude.environments.microvm.memory import Pages
from etude.environments.microvm.qemu import Qemu
from etude.errors import MachineError

T = TypeVar("T")
_RESUME_S = 20.0


class Snapshot:
    """A guest's state, never changed. `image` names the booted image that its memory and disk differ from."""

    def __init__(self, image: str, devices: bytes, pages: Pages, disk: int) -> None:
        self.image, self.devices, self.pages, self.disk = image, devices, pages, disk
        weakref.finalize(self, os.close, disk)

    @property
    def num_bytes(self) -> int:
        """What it takes, of memory and of disk."""
        return len(self.devices) + self.pages.num_bytes + os.fstat(self.disk).st_blocks * 512


async def take(guest: Qemu, image: str) -> Snapshot:
    """The state of a running guest, which stands still meanwhile. `MachineError` when it is gone."""
    monitor = await guest.connect()
    disk = overlay.anonymous()
    try:
        stopping, saving = monitor.begin("stop"), guest.begin_saving(monitor)
        try:
            await monitor.answer(stopping)
            copying = asyncio.create_task(asyncio.to_thread(_copy, guest, disk))
            try:
                devices = await guest.saved(saving)  # meanwhile
            finally:
                pages = await _settled(copying)
        finally:
            await monitor.execute("cont")
    except BaseException as error:
        os.close(disk)
        if isinstance(error, OSError):
            raise MachineError("no room for a snapshot", str(error), hint=overlay.ROOM) from None
        raise
    return Snapshot(image, devices, pages, disk)


def _copy(guest: Qemu, disk: int) -> Pages:
    overlay.copy(guest.disk, disk)
    return memory.written(guest.mapping())


async def _settled(task: asyncio.Task[T]) -> T:
    """Wait for a thread's work even when cancelled: what it works on is closed afterwards, and its number reused."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return task.result()


async def restore(guest: Qemu, snapshot: Snapshot, *, host_name: str) -> bytes:
    """Make a waiting QEMU a guest in this state, and tell its agent that it is another machine now, with these random
    numbers, clock and name, before anything else is asked of it. Raises `MachineError`.

    What the agent sends first, maybe from the middle of a frame, was meant for the host of its past. The frame that is
    returned ends that: it carries a random number, and everything after it is ours.
    """
    try:
        await _settled(asyncio.create_task(asyncio.to_thread(_fill, guest, snapshot)))
    except OSError as error:
        raise MachineError("no room for a machine", str(error), hint=overlay.ROOM) from None
    await guest.load(snapshot.devices, deadline_s=_RESUME_S)
    number = secrets.randbits(32)
    identity = protocol.fields(secrets.token_bytes(32), time.time_ns().to_bytes(8, "little"), host_name.encode())
    guest.channel.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(guest.channel, protocol.frame(protocol.RENEW, number, identity))
    return protocol.frame(protocol.DONE, number)


def _fill(guest: Qemu, snapshot: Snapshot) -> None:
    overlay.copy(snapshot.disk, guest.disk)
    memory.write(guest.mapping(), snapshot.pages)
