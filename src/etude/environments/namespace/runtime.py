"""`Runtime` of Linux namespaces: the kernel is shared with the host, everything else is private to a machine.

Machines are blank until a snapshot is loaded into them, so a few are kept ready in advance for whatever comes next.
A snapshot is a tree's bytes, kept by their digest; loading is a copy, which is right for repositories of megabytes.
Each image in use has a launcher of its own, whose root is that image; the least recently used ones are let go.
Knows nothing of tasks and rewards.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec

from etude.environments.agent.program import BUILT
from etude.environments.config import MachineLimits, require_bound
from etude.environments.images.store import ImageStore
from etude.environments.namespace.guest import wire
from etude.environments.namespace.guest.confine import user_of
from etude.environments.namespace.guest.overlay import COPIED, NUM_IDS
from etude.environments.namespace.guest.root import SHARED
from etude.environments.namespace.images import ImageMachine, State, launcher_facts, state_in
from etude.environments.namespace.launcher import Blank, LauncherProcess, abandon_blank
from etude.environments.namespace.machine import USERS, WITH_ROOT, NamespaceMachine
from etude.environments.namespace.snapshots import Snapshots
from etude.environments.namespace.starting import default_python
from etude.errors import MachineError
from etude.records.command import check_count
from etude.records.image import Image
from etude.seams import Machine, RuntimeInfo

_START_S = 20.0  # what an agent may take; fork has a deadline of its own
_SNAPSHOT_BYTES = 256 << 20  # of all prepared trees together
_MAX_IMAGES = 8  # with a launcher of their own
_IMAGE_SPARE = 2  # machines of each kept ready


class NamespaceRuntime:
    """Forks isolated machines in about a millisecond of CPU. Raises `MachineError` where namespaces are not to be had.

    `spare` machines are kept ready; at most `max_machines` are alive. `python` is the interpreter that machines see.
    With `images`, machines can be made from the images of that store. `with_agent` False does without the machine
    agent, as is done where it was not built.

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
        self._bounds = limits if limits is not None else MachineLimits()
        self._max_machines, self._spare = max_machines, min(spare, max_machines)
        self._python, self._prefix = python or default_python(), os.path.realpath(prefix or sys.base_prefix)
        self._agent = str(BUILT) if with_agent and BUILT.exists() else ""
        self._snapshots = Snapshots(max_bytes=_SNAPSHOT_BYTES)
        self._images = images
        self._alive: dict[tuple[int, int], NamespaceMachine] = {}  # by launcher and its number
        self._reserved = 0
        self._room = asyncio.Condition()
        self._closed = False
        self._pool = Pool(self._start, spare=self._spare)
        try:
            require_bound(self._bounds, self._pool.launcher.facts["cgroups"])
        except MachineError:
            self._pool.launcher.wait()
            raise
        self._image_pools: OrderedDict[bytes, Pool] = OrderedDict()  # least recently used first
        self._starting = asyncio.Lock()

    @property
    def info(self) -> RuntimeInfo:
        """See `Runtime.info`."""
        weaker = [f"{what}: {how}" for what, how in self.limits.items() if how.startswith(("per process", "none"))]
        if not self._pool.launcher.facts["agent"]:
            weaker.append("programs: each by the runner, slower than by the agent, which is not there")
        if self._pool.launcher.facts["root"] == SHARED:
            weaker.append("system files: one set of inodes for all machines, so siblings can meet at locks on them")
        copied = any(pool.launcher.facts["root"] == COPIED for pool in self._image_pools.values())
        if copied:
            weaker.append("images: this kernel mounts no overlay of them here, so every machine gets a copy in memory")
        images = self._images is not None
        return RuntimeInfo(
            name="namespace", isolation="shared kernel", users=self._users, images=images, notes=tuple(weaker)
        )

    @property
    def _users(self) -> tuple[str, ...]:
        facts = self._pool.launcher.facts
        return WITH_ROOT if facts["agent"] and facts["base"] is not None else USERS

    @property
    def limits(self) -> dict[str, str]:
        """What enforces each limit on this host: control groups where it has them, else limits per process."""
        facts = self._pool.launcher.facts
        groups = facts["cgroups"]
        alone = {
            "memory": f"per process only ({self._bounds.address_bytes} bytes of addresses) and sized file systems",
            "pids": "limit per user of the machine's own user namespace",
            "cpu": "none but each process's CPU seconds",
        }
        found = {name: f"cgroup v{groups[name]}" if name in groups else alone[name] for name in alone}
        users = "three of its own" if facts["base"] is not None else "that of this process"
        return {**found, "disk": "sized tmpfs", "users": users}

    def cpu_s(self) -> float:
        """CPU seconds so far of the launcher and of every machine that has ended."""
        return sum(pool.launcher.cpu_s() for pool in (self._pool, *self._image_pools.values()))

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        """See `Runtime.prepare`."""
        tree = self._snapshots.prepare(files)
        if image is None:
            return tree
        if self._images is None:
            raise MachineError(
                "this runtime has no images",
                hint="name the store: --images STORE, `images` in [machines], or NamespaceRuntime(images=...)",
            )
        await asyncio.to_thread(launcher_facts, self._images, image, self._bounds)  # raises for one that is not there
        return self._snapshots.keep(State(image, self._tree(tree) if files else b"", b"").pack())

    async def pack(self, snapshot: str, *, max_bytes: int) -> bytes:
        """See `Portable.pack`: the tree itself."""
        tree = self._tree(snapshot)
        if len(tree) > max_bytes:
            raise ValueError(f"the tree has {len(tree)} bytes, at most {max_bytes}")
        return tree

    async def unpack(self, packed: bytes) -> str:
        """See `Portable.unpack`."""
        state = state_in(packed)
        if state is None:
            return self._snapshots.adopt(packed)
        if state.tree:
            self._snapshots.adopt(state.tree)
        return self._snapshots.keep(packed)

    def hold(self, snapshot: str) -> int:
        """See `Holding.hold`."""
        return self._snapshots.hold(snapshot)

    def release(self, snapshot: str) -> None:
        """See `Holding.release`."""
        self._snapshots.release(snapshot)

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        """See `Runtime.fork`. Waits for others to be closed where `max_machines` are alive."""
        check_count(n)
        tree = self._tree(snapshot)
        state = state_in(tree)
        if n > self._max_machines:
            raise MachineError(f"{n} machines asked for", f"at most {self._max_machines}", hint="raise max_machines")
        waiting_for = "room among the live machines"
        try:
            async with asyncio.timeout(deadline_s):
                await self._reserve(n)
                waiting_for = "machines to start"
                return [*await self._fork(state or wire.unpack(tree).fields, n)]
        except TimeoutError:
            facts = f"waited {deadline_s:g} s for {waiting_for}; {len(self._alive)} are alive"
            hint = "close machines, or wait longer"
            raise MachineError(f"{n} machines could not be forked", facts, hint=hint) from None

    def _tree(self, snapshot: str) -> bytes:
        tree = self._snapshots.get(snapshot)
        if tree is None:
            raise MachineError(f"no snapshot {snapshot!r}", "this runtime does not hold it", hint="prepare it first")
        return tree

    async def _reserve(self, n: int) -> None:
        async with self._room:
            await self._room.wait_for(
                lambda: self._closed or len(self._alive) + self._reserved + n <= self._max_machines
            )
            if self._closed:
                raise MachineError("the runtime is closed", hint="make a new runtime")
            self._reserved += n

    async def _fork(self, start: State | list[bytes], n: int) -> list[NamespaceMachine]:
        """`start` is a state, or the fields of a tree."""
        try:
            pool = await self._pool_of(start.image) if isinstance(start, State) else self._pool
            launcher = pool.launcher
            if pool.revive():
                self._abandon_all(launcher)
            wakes = [asyncio.create_task(self._wake(pool, blank, start)) for blank in pool.take(n)]
            try:
                await asyncio.wait(wakes)
            finally:
                machines, errors = await _results(wakes)
                if len(machines) < n:
                    for machine in machines:
                        machine.abandon()
            if errors:
                raise errors[0]
            for machine in machines:
                self._alive[id(pool.launcher), machine.number] = machine
        finally:
            self._reserved -= n
            async with self._room:
                self._room.notify_all()
        pool.refill()
        return machines

    async def _pool_of(self, image: Image) -> Pool:
        """The machines of an image, started if there are none yet."""
        async with self._starting:
            key = msgspec.json.encode(image)
            if key not in self._image_pools:
                await self._make_room()
                self._image_pools[key] = await asyncio.to_thread(self._open_pool, image)
            self._image_pools.move_to_end(key)
            return self._image_pools[key]

    def _open_pool(self, image: Image) -> Pool:
        if self._images is None:
            raise MachineError(
                "this runtime has no images",
                hint="name the store: --images STORE, `images` in [machines], or NamespaceRuntime(images=...)",
            )
        start = partial(self._start, launcher_facts(self._images, image, self._bounds))
        held = ExitStack()
        held.enter_context(self._images.in_use(image.digest))  # not removed as long as machines lie on it
        try:
            pool = Pool(start, spare=min(_IMAGE_SPARE, self._spare), release=held.close)
        except BaseException:
            held.close()
            raise
        return pool

    async def _make_room(self) -> None:
        """Let go of the image that was used longest ago of those without a live machine."""
        busy = {launcher for launcher, _ in self._alive}
        idle = [key for key, pool in self._image_pools.items() if id(pool.launcher) not in busy]
        if len(self._image_pools) >= _MAX_IMAGES and idle:
            pool = self._image_pools.pop(idle[0])
            pool.hang_up()
            await pool.wait()

    async def _wake(self, pool: Pool, blank: Blank, start: State | list[bytes]) -> NamespaceMachine:
        """Load a blank machine."""
        try:
            made = await asyncio.shield(blank)
        except asyncio.CancelledError:
            pool.give_back(blank)
            raise
        launcher, base = pool.launcher, pool.launcher.facts["base"]
        common: dict[str, Any] = {
            "max_tree_bytes": self._bounds.work_bytes,
            "keep": self._snapshots.keep,
            "kill": partial(self._kill, launcher, made.number),
            "cores": self._bounds.cpus,
        }
        machine: NamespaceMachine
        if isinstance(start, State):
            first = 0 if base is None else base + made.slot * NUM_IDS
            machine = ImageMachine(made, launcher, start, first=first, **common)
            loaded = machine.restore(start)
        else:
            owner = None if base is None else user_of(base, made.slot)
            machine = NamespaceMachine(made, launcher, owner=owner, users=self._users, **common)
            loaded = machine.load(start)
        try:
            await machine.ready(_START_S)
            await loaded
        except (OSError, ValueError) as error:
            machine.abandon()
            raise MachineError("a tree does not fit into a machine", str(error), hint="see MachineLimits") from None
        except BaseException:
            machine.abandon()
            raise
        return machine

    async def _kill(self, launcher: LauncherProcess, number: int) -> None:
        try:
            await launcher.kill(number)
        finally:
            self._alive.pop((id(launcher), number), None)
            async with self._room:
                self._room.notify_all()

    def _abandon_all(self, launcher: LauncherProcess | None = None) -> None:
        """Let go of every machine, or of those of one launcher."""
        for key in [key for key in self._alive if launcher is None or key[0] == id(launcher)]:
            self._alive.pop(key).abandon()

    def _start(self, image: Mapping[str, Any] | None = None) -> LauncherProcess:
        slots = self._max_machines + self._spare
        return LauncherProcess(
            self._bounds,
            max_machines=slots,
            python=self._python,
            prefix=self._prefix,
            agent=self._agent if image is None or image["with_agent"] else "",
            image=image,
        )

    async def close(self) -> None:
        """See `Runtime.close`. When it returns, no process, mount or control group of this runtime is left."""
        self._closed = True
        pools = [self._pool, *self._image_pools.values()]
        for pool in pools:
            pool.hang_up()
        self._abandon_all()
        for pool in pools:
            await pool.wait()
        async with self._room:
            self._room.notify_all()


async def _results(
    wakes: list[asyncio.Task[NamespaceMachine]],
) -> tuple[list[NamespaceMachine], list[BaseException]]:
    for wake in wakes:
        wake.cancel()  # no effect on those that are done
    results = await asyncio.gather(*wakes, return_exceptions=True)
    machines = [r for r in results if isinstance(r, NamespaceMachine)]
    return machines, [r for r in results if isinstance(r, BaseException)]


def probe() -> None:
    """Make one machine and let go of it. Raises `MachineError`, with what to do, where that cannot be done."""

    async def try_one() -> None:
        runtime = NamespaceRuntime(max_machines=1, spare=0)
        try:
            [machine] = await runtime.fork(await runtime.prepare({}), 1)
            result = await machine.exec(["python", "-c", "print(6 * 7)"], key="probe", deadline_s=20)
            if result.output != b"42\n":
                facts = f"exit code {result.exit_code}, output {result.output[:200]!r}"
                raise MachineError("a machine cannot run Python", facts, hint="name an interpreter that is readable")
        finally:
            await runtime.close()

    asyncio.run(try_one())


# -------------------------------------------------------------------------------------- a pool of machines of one kind


class Pool:
    """Blank machines from one launcher, which is started again after it has died. At most `spare` are kept ready."""

    def __init__(
        self, start: Callable[[], LauncherProcess], *, spare: int, release: Callable[[], None] = lambda: None
    ) -> None:
        self._start, self._spare, self._release = start, spare, release
        self._ready: deque[Blank] = deque()
        self.launcher = start()

    def revive(self) -> bool:
        """Have a living launcher; True when it is a new one, and every machine of the old one is gone."""
        if self.launcher.failure is None:
            return False
        self._abandon()
        self.launcher.wait()
        self.launcher = self._start()
        return True

    def take(self, n: int) -> list[Blank]:
        """n machines to be, of the launcher there is now."""
        missing = n - len(self._ready)
        if missing > 0:
            self._ready.extend(self.launcher.spawn(missing))
        return [self._ready.popleft() for _ in range(n)]

    def give_back(self, blank: Blank) -> None:
        """A machine that was taken and not used."""
        self._ready.append(blank)

    def refill(self) -> None:
        """Have machines made for whatever comes next."""
        missing = self._spare - len(self._ready)
        if missing > 0:
            self._ready.extend(self.launcher.spawn(missing))

    def hang_up(self) -> None:
        """End every machine; `wait` tells when they are gone."""
        self.launcher.hang_up()
        self._abandon()

    async def wait(self) -> None:
        """Wait, after `hang_up`, until no process, mount and control group is left; then `release`."""
        await asyncio.to_thread(self.launcher.wait)
        self._release()

    def _abandon(self) -> None:
        for blank in self._ready:
            abandon_blank(blank)
        self._ready.clear()
