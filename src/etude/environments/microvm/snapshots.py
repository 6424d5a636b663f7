"""Take snapshots of guests, and restore them into waiting QEMU processes.

A snapshot has the state of the devices, the memory pages that differ from the booted image, and the disk clusters that
differ from the image's filesystem. It is stored in memory and unnamed files, so it disappears with the last process
that uses it. The guest is stopped while it is copied.
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
    """The state of a guest, which never changes.

    `image`: name of the booted image, of which the snapshot stores only the differences. `devices`: QEMU's device
    state. `pages`: the memory pages that differ. `disk`: descriptor of the file with the disk writes, closed with this
    object.
    """

    def __init__(self, image: str, devices: bytes, pages: Pages, disk: int) -> None:
        self.image, self.devices, self.pages, self.disk = image, devices, pages, disk
        weakref.finalize(self, os.close, disk)

    @property
    def num_bytes(self) -> int:
        """Size in memory and on disk, in bytes."""
        return len(self.devices) + self.pages.num_bytes + os.fstat(self.disk).st_blocks * 512


async def take(guest: Qemu, image: str) -> Snapshot:
    """Take a snapshot of a running guest, which is stopped meanwhile. `image`: name of its booted image.

    Raises `MachineError` if QEMU has ended or the disk is full.
    """
    monitor = await guest.connect()
    disk = overlay.anonymous()
    try:
        stopping, saving = monitor.begin("stop"), guest.begin_saving(monitor)
        try:
            await monitor.answer(stopping)
            copying = asyncio.create_task(asyncio.to_thread(_copy, guest, disk))
            try:
                devices = await guest.saved(saving)  # in parallel with the copy
            finally:
                pages = await _await_uninterrupted(copying)
        finally:
            await monitor.execute("cont")
    except BaseException as error:
        os.close(disk)
        if isinstance(error, OSError):
            raise MachineError("no disk space for a snapshot", str(error), hint=overlay.SPACE_HINT) from None
        raise
    return Snapshot(image, devices, pages, disk)


def _copy(guest: Qemu, disk: int) -> Pages:
    overlay.copy(guest.disk, disk)
    return memory.written(guest.mapping())


async def _await_uninterrupted(task: asyncio.Task[T]) -> T:
    """Await a thread even if cancelled: the caller closes its descriptors afterwards, and their numbers are reused."""
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
    """Restore a snapshot into a waiting QEMU process and give the machine a new random seed, clock and host name.

    Returns the frame with which the agent confirms the new identity; it contains a random number. All bytes that the
    agent sends before this frame belong to the machine of the snapshot and must be ignored; they may begin in the
    middle of a frame. Raises `MachineError`.
    """
    try:
        await _await_uninterrupted(asyncio.create_task(asyncio.to_thread(_fill, guest, snapshot)))
    except OSError as error:
        raise MachineError("no disk space for a machine", str(error), hint=overlay.SPACE_HINT) from None
    await guest.load(snapshot.devices, deadline_s=_RESUME_S)
    number = secrets.randbits(32)
    identity = protocol.fields(secrets.token_bytes(32), time.time_ns().to_bytes(8, "little"), host_name.encode())
    guest.channel.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(guest.channel, protocol.frame(protocol.RENEW, number, identity))
    return protocol.frame(protocol.DONE, number)


def _fill(guest: Qemu, snapshot: Snapshot) -> None:
    overlay.copy(snapshot.disk, guest.disk)
    memory.write(guest.mapping(), snapshot.pages)
