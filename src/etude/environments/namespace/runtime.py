"""`Runtime` of Linux namespaces: machines share the host's kernel, everything else is private to a machine.

Machines start empty and a snapshot is then loaded into them, so a few are always created in advance. A snapshot is the
bytes of a file tree, and its id is their digest. Loading copies them, which suits repositories of megabytes. Each image
in use has a launcher process whose root is that image; the least recently used ones are closed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec

from etude.environments.agent.program import BUILT
from etude.environments.config import MachineLimits, check_memory_bound
from etude.environments.images.store import ImageStore
from etude.environments.namespace.guest import wire
from etude.environments.namespace.guest.confine import user_of
from etude.environments.namespace.guest.overlay import COPIED, NUM_IDS
from etude.environments.namespace.guest.root import SHARED
from etude.environments.namespace.images import ImageMachine, ImageState, image_settings, unpack_state
from etude.environments.namespace.launcher import LauncherProcess, PendingMachine, default_python, discard_pending
from etude.environments.namespace.machine import USERS, WITH_ROOT, NamespaceMachine
from etude.environments.namespace.snapshots import Snapshots
from etude.errors import MachineError
from etude.records.command import check_count
from etude.records.image import Image
from etude.seams import Machine, RuntimeInfo

_START_S = 20.0  # for an agent to start; fork has its own deadline
_END_S = 60.0  # to wait for the end of a killed machine; a host under load takes longer, and then nothing waits for it
_SNAPSHOT_BYTES = 256 << 20  # of all snapshots
_MAX_IMAGES = 8  # images with a launcher
_IMAGE_SPARE = 2  # machines of each image created in advance


class MachineWarning(UserWarning):
    """Warns that a machine still occupies its slot a minute after it was killed."""


class NamespaceRuntime:
    """A `Runtime` whose machines are made of Linux namespaces. A fork takes about a millisecond of CPU time per
    machine.

    - `limits`: the limits of each machine; None for the defaults
    - `max_machines`: the most machines that are alive at once
    - `spare`: machines that are created in advance
    - `python`, `prefix`: the interpreter inside the machines, and the folder where it is installed; None: this one
    - `images`: a store whose images machines can start from; None: no images
    - `with_agent`: False runs without the machine agent, as if it had not been built

    If the processes of a killed machine have not ended after a minute, the machine keeps its slot until they end.
    Closing it then gives a `MachineWarning`, or raises `MachineError` if half of the slots are kept in this way.

    The constructor raises `MachineError` on a host without namespaces.

    >>> async def main():
    ...     runtime = NamespaceRuntime()
    ...     [machine] = await runtime.fork(await runtime.prepare({"hi.py": b"print('hi')"}), 1)
    ...     result = await machine.exec(["python", "hi.py"], key="1", deadline_s=10)
    ...     await runtime.close()
    ...     return result.output
    >>> asyncio.run(main())
    b'hi\\n'
    """

    def __init__(
        self,
        limits: MachineLimits | None = None,
        *,
        max_machines: int = 512,
        spare: int = 8,
        python: str | None = None,
        prefix: str | None = None,
        images: ImageStore | None = None,
        with_agent: bool = True,
    ) -> None:
        self._limits = limits if limits is not None else MachineLimits()
        self._max_machines, self._spare = max_machines, min(spare, max_machines)
        self._python, self._prefix = python or default_python(), os.path.realpath(prefix or sys.base_prefix)
        self._agent = str(BUILT) if with_agent and BUILT.exists() else ""
        self._snapshots = Snapshots(max_bytes=_SNAPSHOT_BYTES)
        self._images = images
        self._alive: dict[tuple[int, int], NamespaceMachine] = {}  # by launcher and machine number
        self._ending: dict[tuple[int, int], asyncio.Task[None]] = {}  # of `_alive`: killed, and not gone after `_END_S`
        self._reserved = 0
        self._slots_changed = asyncio.Condition()
        self._closed = False
        self._pool = MachinePool(self._start, spare=self._spare)
        try:
            check_memory_bound(self._limits, self._pool.launcher.info["cgroups"])
        except MachineError:
            self._pool.launcher.wait()
            raise
        self._image_pools: OrderedDict[bytes, MachinePool] = OrderedDict()  # least recently used first
        self._starting = asyncio.Lock()

    @property
    def info(self) -> RuntimeInfo:
        """The runtime's name and capabilities. `notes` also has each limit that no control group enforces on this
        host."""
        weaker = [f"{what}: {how}" for what, how in self.limits.items() if how.startswith(("per process", "none"))]
        if not self._pool.launcher.info["agent"]:
            weaker.append("programs: each by the runner, slower than by the agent, which is not there")
        if self._pool.launcher.info["root"] == SHARED:
            weaker.append("system files: one set of inodes for all machines, so siblings can meet at locks on them")
        copied = any(pool.launcher.info["root"] == COPIED for pool in self._image_pools.values())
        if copied:
            weaker.append("images: this kernel mounts no overlay of them here, so every machine gets a copy in memory")
        images = self._images is not None
        return RuntimeInfo(
            name="namespace", isolation="shared kernel", users=self._users, images=images, notes=tuple(weaker)
        )

    @property
    def _users(self) -> tuple[str, ...]:
        host = self._pool.launcher.info
        return WITH_ROOT if host["agent"] and host["base"] is not None else USERS

    @property
    def limits(self) -> dict[str, str]:
        """The mechanism that enforces each limit on this host, as text: a control group where possible, else a weaker
        one.

        The keys are "memory", "pids", "cpu", "disk" and "users".
        """
        host = self._pool.launcher.info
        groups = host["cgroups"]
        fallback = {
            "memory": f"per process only ({self._limits.address_bytes} bytes of addresses) and sized file systems",
            "pids": "limit per user of the machine's own user namespace",
            "cpu": "none but each process's CPU seconds",
        }
        found = {name: f"cgroup v{groups[name]}" if name in groups else fallback[name] for name in fallback}
        users = "three of its own" if host["base"] is not None else "that of this process"
        return {**found, "disk": "sized tmpfs", "users": users}

    def cpu_s(self) -> float:
        """Return the CPU seconds so far of the launchers and of all machines that have ended."""
        return sum(pool.launcher.cpu_s() for pool in (self._pool, *self._image_pools.values()))

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        tree = self._snapshots.prepare(files)
        if image is None:
            return tree
        if self._images is None:
            raise MachineError(
                "this runtime has no images",
                hint="set the store: --images STORE, `images` in [machines], or NamespaceRuntime(images=...)",
            )
        await asyncio.to_thread(image_settings, self._images, image, self._limits)  # raises if the image is missing
        return self._snapshots.keep(ImageState(image, self._snapshots.require(tree) if files else b"", b"").pack())

    async def pack(self, snapshot: str, *, max_bytes: int) -> bytes:
        tree = self._snapshots.require(snapshot)
        if len(tree) > max_bytes:
            raise ValueError(f"the tree has {len(tree)} bytes, at most {max_bytes}")
        return tree

    async def unpack(self, packed: bytes) -> str:
        state = unpack_state(packed)
        if state is None:
            return self._snapshots.adopt(packed)
        if state.tree:
            self._snapshots.adopt(state.tree)
        return self._snapshots.keep(packed)

    def hold(self, snapshot: str) -> int:
        return self._snapshots.hold(snapshot)

    def release(self, snapshot: str) -> None:
        self._snapshots.release(snapshot)

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        """Create n machines in the snapshot's state, as `Runtime.fork` does.

        If `max_machines` are alive, wait until others are closed.
        """
        check_count(n)
        tree = self._snapshots.require(snapshot)
        state = unpack_state(tree)
        if n > self._max_machines:
            raise MachineError(
                f"{n} machines were requested",
                f"this runtime has at most {self._max_machines}",
                hint="raise max_machines",
            )
        waiting_for = "free slots among the live machines"
        try:
            async with asyncio.timeout(deadline_s):
                await self._reserve(n)
                waiting_for = "machines to start"
                return [*await self._fork(state or wire.unpack(tree).fields, n)]
        except TimeoutError:
            alive = f"{len(self._alive)} are alive, {len(self._ending)} of them killed"
            facts = f"waited {deadline_s:g} s for {waiting_for}; {alive}"
            hint = "close machines, or wait longer"
            raise MachineError(f"{n} machines could not be forked", facts, hint=hint) from None

    async def _reserve(self, n: int) -> None:
        async with self._slots_changed:
            await self._slots_changed.wait_for(
                lambda: self._closed or len(self._alive) + self._reserved + n <= self._max_machines
            )
            if self._closed:
                raise MachineError("the runtime is closed", hint="make a new runtime")
            self._reserved += n

    async def _fork(self, start: ImageState | list[bytes], n: int) -> list[NamespaceMachine]:
        """Fork n machines from an image's state or from the fields of a tree."""
        try:
            pool = await self._pool_of(start.image) if isinstance(start, ImageState) else self._pool
            launcher = pool.launcher
            if pool.restart_if_dead():
                self._abandon_all(launcher)
            loads = [asyncio.create_task(self._load_machine(pool, pending, start)) for pending in pool.take(n)]
            try:
                await asyncio.wait(loads)
            finally:
                machines, errors = await _results(loads)
                if len(machines) < n:
                    for machine in machines:
                        machine.abandon()
            if errors:
                raise errors[0]
            for machine in machines:
                self._alive[id(pool.launcher), machine.number] = machine
        finally:
            self._reserved -= n
            async with self._slots_changed:
                self._slots_changed.notify_all()
        pool.refill()
        return machines

    async def _pool_of(self, image: Image) -> MachinePool:
        async with self._starting:
            key = msgspec.json.encode(image)
            if key not in self._image_pools:
                await self._evict_idle_image()
                self._image_pools[key] = await asyncio.to_thread(self._open_pool, image)
            self._image_pools.move_to_end(key)
            return self._image_pools[key]

    def _open_pool(self, image: Image) -> MachinePool:
        if self._images is None:
            raise MachineError(
                "this runtime has no images",
                hint="set the store: --images STORE, `images` in [machines], or NamespaceRuntime(images=...)",
            )
        start = partial(self._start, image_settings(self._images, image, self._limits))
        held = ExitStack()
        held.enter_context(self._images.in_use(image.digest))  # not removed while machines use it
        try:
            pool = MachinePool(start, spare=min(_IMAGE_SPARE, self._spare), release=held.close)
        except BaseException:
            held.close()
            raise
        return pool

    async def _evict_idle_image(self) -> None:
        """Close the least recently used image pool without live machines if there are too many pools."""
        busy = {launcher for launcher, _ in self._alive}
        idle = [key for key, pool in self._image_pools.items() if id(pool.launcher) not in busy]
        if len(self._image_pools) >= _MAX_IMAGES and idle:
            pool = self._image_pools.pop(idle[0])
            pool.shut_down()
            await pool.wait()

    async def _load_machine(
        self, pool: MachinePool, pending: PendingMachine, start: ImageState | list[bytes]
    ) -> NamespaceMachine:
        try:
            handle = await asyncio.shield(pending)
        except asyncio.CancelledError:
            pool.put_back(pending)
            raise
        launcher, base = pool.launcher, pool.launcher.info["base"]
        common: dict[str, Any] = {
            "max_tree_bytes": self._limits.work_bytes,
            "keep": self._snapshots.keep,
            "kill": partial(self._kill, launcher, handle.number),
            "cores": self._limits.cpus,
        }
        machine: NamespaceMachine
        if isinstance(start, ImageState):
            first = 0 if base is None else base + handle.slot * NUM_IDS
            machine = ImageMachine(handle, launcher, start, first=first, **common)
            loaded = machine.restore(start)
        else:
            owner = None if base is None else user_of(base, handle.slot)
            machine = NamespaceMachine(handle, launcher, owner=owner, users=self._users, **common)
            loaded = machine.load(start)
        try:
            await machine.ready(_START_S)
            await loaded
        except (OSError, ValueError) as error:
            machine.abandon()
            raise MachineError(
                "the task's files do not fit into a machine",
                str(error),
                hint="raise the size limits in [machines] (MachineLimits)",
            ) from None
        except BaseException:
            machine.abandon()
            raise
        return machine

    async def _kill(self, launcher: LauncherProcess, number: int) -> None:
        """Kill a machine, wait for its end and free its slot; after `_END_S` this goes on in the background."""
        key = id(launcher), number
        if await launcher.kill(number, deadline_s=_END_S):
            await self._free_slot(key)
            return
        is_new = key not in self._ending
        if is_new:
            self._ending[key] = asyncio.create_task(self._kill_again(launcher, number), name="end a machine")
        what = f"machine {number} has not ended {_END_S:g} s after it was killed"
        facts = f"killed machines occupy {len(self._ending)} of {self._max_machines} slots"
        if 2 * len(self._ending) > self._max_machines:
            hint = "the kernel does not end their processes: ps shows them in state D or Z; check the host's load"
            raise MachineError(what, facts, hint=hint)
        if is_new:
            until = "its slot is free when its processes are gone"
            warnings.warn(MachineWarning(f"{what}; {until}; {facts}"), stacklevel=1)

    async def _kill_again(self, launcher: LauncherProcess, number: int) -> None:
        while not await launcher.kill(number, deadline_s=_END_S):  # ends at the latest with the runtime
            pass
        key = id(launcher), number
        del self._ending[key]
        await self._free_slot(key)

    async def _free_slot(self, key: tuple[int, int]) -> None:
        self._alive.pop(key, None)
        async with self._slots_changed:
            self._slots_changed.notify_all()

    def _abandon_all(self, launcher: LauncherProcess | None = None) -> None:
        """Discard all machines, or those of one launcher."""
        for key in [key for key in self._alive if launcher is None or key[0] == id(launcher)]:
            self._alive.pop(key).abandon()

    def _start(self, image: Mapping[str, Any] | None = None) -> LauncherProcess:
        slots = self._max_machines + self._spare
        return LauncherProcess(
            self._limits,
            max_machines=slots,
            python=self._python,
            prefix=self._prefix,
            agent=self._agent if image is None or image["with_agent"] else "",
            image=image,
        )

    async def close(self) -> None:
        self._closed = True
        pools = [self._pool, *self._image_pools.values()]
        for pool in pools:
            pool.shut_down()
        self._abandon_all()
        await asyncio.gather(*self._ending.values())  # their launchers have ended
        try:
            ends = await asyncio.gather(*(pool.wait() for pool in pools), return_exceptions=True)
        finally:
            async with self._slots_changed:
                self._slots_changed.notify_all()
        for error in ends:  # each pool has been waited for, also if one does not end
            if isinstance(error, BaseException):
                raise error


async def _results(loads: list[asyncio.Task[NamespaceMachine]]) -> tuple[list[NamespaceMachine], list[BaseException]]:
    for load in loads:
        load.cancel()  # no effect on finished tasks
    results = await asyncio.gather(*loads, return_exceptions=True)
    machines = [r for r in results if isinstance(r, NamespaceMachine)]
    return machines, [r for r in results if isinstance(r, BaseException)]


def probe() -> None:
    """Create one machine and run Python in it, to test this host. Raises `MachineError`, with a hint, if that fails."""

    async def try_one() -> None:
        runtime = NamespaceRuntime(max_machines=1, spare=0)
        try:
            [machine] = await runtime.fork(await runtime.prepare({}), 1)
            result = await machine.exec(["python", "-c", "print(6 * 7)"], key="probe", deadline_s=20)
            if result.output != b"42\n":
                facts = f"exit code {result.exit_code}, output {result.output[:200]!r}"
                raise MachineError(
                    "a machine cannot run Python", facts, hint="set an interpreter that machines can read"
                )
        finally:
            await runtime.close()

    asyncio.run(try_one())


# -------------------------------------------------------------------------------------- a pool of machines of one kind


class MachinePool:
    """Empty machines of one launcher, which is restarted after it has died.

    `start`: starts a launcher, the process that creates machines. `spare`: the most machines that are created in
    advance. `release`: called when the pool has ended.
    """

    def __init__(
        self, start: Callable[[], LauncherProcess], *, spare: int, release: Callable[[], None] = lambda: None
    ) -> None:
        self._start, self._spare, self._release = start, spare, release
        self._ready: deque[PendingMachine] = deque()
        self.launcher = start()

    def restart_if_dead(self) -> bool:
        """Start a new launcher if the current one has ended.

        Returns True if so; then all machines of the old launcher are gone.
        """
        if self.launcher.failure is None:
            return False
        self._abandon()
        self.launcher.wait()
        self.launcher = self._start()
        return True

    def take(self, n: int) -> list[PendingMachine]:
        """Return futures of n machines of the current launcher."""
        missing = n - len(self._ready)
        if missing > 0:
            self._ready.extend(self.launcher.spawn(missing))
        return [self._ready.popleft() for _ in range(n)]

    def put_back(self, pending: PendingMachine) -> None:
        """Return a machine that was taken and not used."""
        self._ready.append(pending)

    def refill(self) -> None:
        """Request machines until `spare` are ready."""
        missing = self._spare - len(self._ready)
        if missing > 0:
            self._ready.extend(self.launcher.spawn(missing))

    def shut_down(self) -> None:
        """Start to end all machines, without waiting until they have ended; `wait` waits for it."""
        self.launcher.shut_down()
        self._abandon()

    async def wait(self) -> None:
        """Wait, after `shut_down`, until no process, mount or control group is left; then call `release`."""
        await asyncio.to_thread(self.launcher.wait)
        self._release()

    def _abandon(self) -> None:
        for pending in self._ready:
            discard_pending(pending)
        self._ready.clear()
