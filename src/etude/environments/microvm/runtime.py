"""A `Runtime` of virtual machines, each with its own kernel, forked from snapshots that include their memory.

An image boots once. `prepare` loads the files into a machine and takes a snapshot, so a fork is ready as soon as its
memory and devices are restored. A snapshot of a running machine includes its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.environments.agent import AgentMachine, Channel, program
from etude.environments.agent.channel import ChannelLost
from etude.environments.config import MachineLimits
from etude.environments.lru_cache import LruCache
from etude.environments.microvm import overlay, snapshots
from etude.environments.microvm import packed as packing
from etude.environments.microvm.base import Base, boot
from etude.environments.microvm.guests import GuestImage, boot_config_of, users_of
from etude.environments.microvm.image import find
from etude.environments.microvm.probe import Accelerator, probe
from etude.environments.microvm.qemu import NUDGE_S, Qemu, require_qemu
from etude.environments.microvm.snapshots import Snapshot
from etude.environments.namespace.snapshots import tree
from etude.errors import MachineError
from etude.records.command import check_count
from etude.records.image import Image
from etude.seams import Machine, RuntimeInfo

_SNAPSHOT_BYTES = 4 << 30
_LOOK_S, _LOW_BYTES = 1.0, 64 << 20  # interval of checks of the host's disk, and the free bytes that are too few
_ENVIRONMENT = {"LANG": "C.UTF-8"}


class MicroVMRuntime:
    """A `Runtime` whose machines are QEMU virtual machines.

    - `limits`: memory, processors, processes and open files of each machine; None for the defaults
    - `max_machines`: the most machines that are alive at once
    - `spare`: number of QEMU processes per image that are started in advance
    - `folder`: the cache with the guest image; None: the default one
    - `roots`: returns the folder of an image's root filesystem by the image's digest (`ImageStore.root`); None:
      machines have the guest image only

    The constructor raises `MachineError` if QEMU, the agent or the guest image is missing (build the image with `etude
    machines image microvm`).
    """

    def __init__(
        self,
        limits: MachineLimits | None = None,
        *,
        max_machines: int = 64,
        spare: int = 2,
        folder: Path | None = None,
        roots: Callable[[str], Path] | None = None,
    ) -> None:
        self._qemu, self._agent, self._image = require_qemu(), program(), find(folder)
        self._bases = self._image.disk.parent.parent / "booted"
        self._limits = limits if limits is not None else MachineLimits()
        self._max_machines, self._spare, self._roots = max_machines, spare, roots
        self._snapshots = LruCache[Snapshot](lambda snapshot: snapshot.num_bytes, max_bytes=_SNAPSHOT_BYTES)
        self._booting: dict[str, asyncio.Task[Spares]] = {}  # by image
        self._booted: dict[str, tuple[Spares, Image | None]] = {}  # by image
        self._preparing: dict[str, asyncio.Task[str]] = {}
        self._guests: set[Guest] = set()
        self._num_coming = 0
        self._watching: asyncio.Task[None] | None = None
        self._accelerator: Accelerator | None = None
        self._closed = False

    @property
    def info(self) -> RuntimeInfo:
        notes = ["the disk limit of a machine includes its system files, not only the working directory"]
        if self._accelerator is not None and self._accelerator.why:
            notes.append(f"processors are emulated, ten times slower or more: {self._accelerator.why}")
        return RuntimeInfo(
            name="microvm",
            isolation="own kernel",
            users=users_of(None),
            images=self._roots is not None,
            forks_memory=True,
            notes=tuple(notes),
        )

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        """Prepare a snapshot, as `Runtime.prepare` does. The first call for an image boots it, which takes seconds."""
        self._require_open()
        packed = tree(files)
        guest_image = GuestImage.of(image, self._image, self._roots)
        name = hashlib.sha256(f"{guest_image.name}\n".encode() + packed).hexdigest()
        if self._snapshots.get(name) is not None:
            return name
        preparing = self._preparing.get(name)
        if preparing is None:
            preparing = self._preparing[name] = asyncio.create_task(self._prepare(name, packed, guest_image))
            preparing.add_done_callback(lambda _: self._preparing.pop(name, None))
        return await asyncio.shield(preparing)

    async def _prepare(self, name: str, packed: bytes, image: GuestImage) -> str:
        spares = await self._spares(image)
        guest = await self._guest(image.name, spares.base.start)
        try:
            await guest.machine.load(packed)
            return self._snapshots.put(name, await guest.take())
        except (FileNotFoundError, ChannelLost) as gone:
            raise MachineError("a snapshot could not be prepared", str(gone), hint="prepare it again") from None
        except OSError as full:
            raise ValueError(f"the files do not fit into a machine: {full}") from None
        finally:
            await guest.machine.close()
            spares.fill()

    async def _spares(self, image: GuestImage) -> Spares:
        booting = self._booting.get(image.name)
        if booting is None or (booting.done() and (booting.cancelled() or booting.exception())):
            booting = self._booting[image.name] = asyncio.create_task(self._boot(image))
        return await asyncio.shield(booting)

    async def _boot(self, image: GuestImage) -> Spares:
        if self._accelerator is None:
            self._accelerator = await probe(self._image)
        booting = await boot_config_of(image, self._image, self._agent, self._limits, self._accelerator.name)
        base = await boot(booting, qemu=self._qemu, kept=self._bases)
        spares = Spares(base, self._spare)
        self._booted[image.name] = spares, image.record
        spares.fill()
        return spares

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        check_count(n)
        self._require_open()
        found = self._snapshots.require(snapshot)
        if len(self._guests) + self._num_coming + n > self._max_machines:
            facts = f"{len(self._guests) + self._num_coming} machines are alive, {n} more were requested"
            raise MachineError(
                f"more than {self._max_machines} machines were requested",
                facts,
                hint="close some, or raise max_machines",
            )
        self._num_coming += n
        self._watching = self._watching or asyncio.create_task(self._watch())
        spares, _ = self._booted[found.image]
        forking = [asyncio.create_task(self._guest(found.image, found)) for _ in range(n)]
        try:
            async with asyncio.timeout(deadline_s):
                guests = await asyncio.gather(*forking)
        except BaseException as error:
            await _close_all(forking)
            if isinstance(error, TimeoutError):
                facts = f"{n} machines were not ready after {deadline_s:g} s"
                raise MachineError(
                    "machines could not be forked in time", facts, hint="fork fewer at once, or increase the deadline"
                ) from None
            raise
        finally:
            self._num_coming -= n
            spares.fill()  # not earlier: starting QEMU processes slows the restores down
        return [guest.machine for guest in guests]

    async def pack(self, snapshot: str, *, max_bytes: int) -> bytes:
        """Serialise a snapshot, as `Portable.pack` does. Only runtimes of the same user on the same host can unpack
        it."""
        self._require_open()
        found = self._snapshots.require(snapshot)
        spares, image = self._booted[found.image]
        key = await asyncio.to_thread(packing.key_in, self._bases)
        base = spares.base
        return await asyncio.to_thread(
            packing.pack, found, base=base.name, boot=base.boot, image=image, key=key, max_bytes=max_bytes
        )

    async def unpack(self, packed: bytes) -> str:
        """Load a packed snapshot, as `Portable.unpack` does.

        Raises `MachineError` if the booted image, of which the snapshot stores only the differences, is not on this
        host: the snapshot was packed on another host, by another user, or with another image or other limits.
        """
        self._require_open()
        key = await asyncio.to_thread(packing.key_in, self._bases)
        head = await asyncio.to_thread(packing.head_of, packed, key)
        image = GuestImage.of(head.image, self._image, self._roots)
        base = (await self._spares(image)).base
        if (base.name, base.boot) != (head.base, head.boot):
            facts = (
                "a snapshot contains only differences to its base, which had other limits or was deleted from the cache"
            )
            raise MachineError(
                "the base machine of the snapshot is missing",
                facts,
                hint="use the same limits and cache as for the snapshot",
            )
        name = hashlib.sha256(packed).hexdigest()
        return self._snapshots.put(name, await asyncio.to_thread(packing.unpack, packed, head, image=image.name))

    def hold(self, snapshot: str) -> int:
        return self._snapshots.hold(snapshot)

    def release(self, snapshot: str) -> None:
        self._snapshots.release(snapshot)

    async def _guest(self, image: str, snapshot: Snapshot) -> Guest:
        spares, record = self._booted[image]
        qemu = await spares.take()
        try:
            after = await snapshots.restore(qemu, snapshot, host_name=secrets.token_hex(6))
            self._require_open()
        except BaseException:
            await qemu.close()
            raise
        guest = Guest(
            qemu,
            image,
            after=after,
            env=_ENVIRONMENT if record is None else {**_ENVIRONMENT, **record.env},
            users=users_of(record),
            keep=self._add_snapshot,
            ended=self._guests.discard,
        )
        self._guests.add(guest)
        return guest

    async def _watch(self) -> None:
        """Resume guests that QEMU has stopped because the host's disk was full, once there is space."""
        was_low = False
        while True:
            await asyncio.sleep(_LOOK_S)
            low = overlay.free_bytes() < _LOW_BYTES
            if low or was_low:
                await asyncio.gather(*(guest.resume_if_stopped() for guest in list(self._guests)))
            was_low = low

    def _add_snapshot(self, snapshot: Snapshot) -> str:
        return self._snapshots.put(secrets.token_hex(32), snapshot)

    async def ready(self) -> None:
        """Wait until all spare QEMU processes are started."""
        await asyncio.gather(*(spares.filled() for spares, _ in self._booted.values()))

    def pids(self) -> list[int]:
        """Return the process ids of all running machines."""
        return [guest.qemu.process.pid for guest in self._guests]

    async def close(self) -> None:
        self._closed = True
        under_way: list[asyncio.Task[Any]] = [self._watching] if self._watching is not None else []
        under_way += [*self._preparing.values(), *self._booting.values()]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await asyncio.gather(*(guest.machine.close() for guest in list(self._guests)))
        await asyncio.gather(*(spares.close() for spares, _ in self._booted.values()))
        self._booting.clear()
        self._booted.clear()
        self._snapshots.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise MachineError("the runtime is closed", hint="make a new runtime")


async def _close_all(forking: list[asyncio.Task[Guest]]) -> None:
    for task in forking:
        task.cancel()
    for result in await asyncio.gather(*forking, return_exceptions=True):
        if isinstance(result, Guest):
            with contextlib.suppress(MachineError):
                await result.machine.close()


class Spares:
    """A pool of `count` waiting QEMU processes for one booted image, refilled in the background."""

    def __init__(self, base: Base, count: int) -> None:
        self.base, self._count = base, count
        self._waiting: deque[Qemu] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._closed = False

    async def take(self) -> Qemu:
        """Return a waiting process, or start one. The caller owns it. Raises `MachineError`."""
        while self._waiting:
            guest = self._waiting.popleft()
            if guest.process.is_alive:
                return guest
            await guest.close()
        return await self._spawn()

    def fill(self) -> None:
        """Start the missing processes in the background."""
        if not self._closed and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(self._fill())

    async def filled(self) -> None:
        """Wait until the pool is full."""
        self.fill()
        if self._filling is not None:
            await asyncio.shield(self._filling)

    async def _fill(self) -> None:
        with contextlib.suppress(MachineError):  # the next `take` reports the error
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
        """End all waiting processes. Idempotent."""
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        waiting, self._waiting = self._waiting, deque()
        await asyncio.gather(*(guest.close() for guest in waiting))


_QUIET_S = 20.0
_DISK_FULL_BYTES = 1 << 20  # with fewer free bytes the disk is full


class Guest:
    """A running guest: its QEMU process, and its `machine`. Closing the machine ends the guest.

    - `image`: name of the booted image
    - `after`: the agent may first send the rest of the output of the guest that was saved in the snapshot; the output
      of this guest begins after these bytes (`snapshots.restore`)
    - `env`, `users`: environment variables and users of commands
    - `keep`: a function that stores a snapshot and returns its id
    - `ended`: called when the machine is closed
    """

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
        self.qemu, self._image, self._add_snapshot, self._ended = qemu, image, keep, ended
        self._channel = Channel(os.dup(qemu.channel.fileno()), after=after, nudge_s=NUDGE_S)
        self._lock = asyncio.Lock()
        self.machine = AgentMachine(
            self._channel, env=env, users=users, snapshot=self._snapshot, end=self._end, blame=self._blame, used=True
        )

    async def take(self) -> Snapshot:
        """Take a snapshot of the guest between two frames of its agent's channel.

        Raises `ChannelLost` if the agent does not respond, `MachineError` if QEMU fails.
        """
        async with self._lock, self._channel.paused(_QUIET_S):
            return await snapshots.take(self.qemu, self._image)

    async def resume_if_stopped(self) -> None:
        """Resume a guest that QEMU stopped because the host's disk was full. Does nothing for other guests."""
        async with self._lock:
            with contextlib.suppress(MachineError):
                await (await self.qemu.connect()).execute("cont")

    async def _snapshot(self, machine: AgentMachine) -> str:
        return self._add_snapshot(await self.take())

    def _blame(self) -> str:
        """Return why a guest does not respond, if the host is the cause: a full disk, or a failed restore. A guest can
        also hang because of the programs in it; it is killed in each case."""
        full = overlay.free_bytes(self.qemu.disk) < _DISK_FULL_BYTES
        self.qemu.process.kill()
        if full:
            return f"the host's disk is full: {overlay.SPACE_HINT}"
        return "" if self._channel.is_up else f"it did not respond after its restore: {self.qemu.process.log_tail()}"

    async def _end(self) -> None:
        self._ended(self)
        self.qemu.process.kill()
        async with self._lock:  # wait for a copy in progress
            await self.qemu.close()
