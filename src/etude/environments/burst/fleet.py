"""A `Runtime` over several others, one per host, such as several remote runtimes. `Placement` chooses the hosts.

A snapshot is remembered as the files that it was prepared from, and is prepared on another host when machines are to
start there. The state of a machine exists only on its own host and is forked there.

Hosts are checked by heartbeats. A host that has been silent for longer than `lease_s` is lost. Its machines raise
`MachineError` from then on, even if the host comes back, and forks in progress there are repeated on another host. Lost
machines are not replaced silently, since their state is gone: the caller forks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import msgspec

from etude.environments.burst.choice import Costs
from etude.environments.burst.hosts import Capacity, Need
from etude.environments.burst.placement import Batch, Placement
from etude.errors import MachineError
from etude.records.command import ExecOptions, ExecResult, check_count
from etude.records.image import Image
from etude.seams import Machine, Portable, Runtime, RuntimeInfo


def require_portable(runtime: Runtime) -> Portable:
    """Return the runtime, typed as `Portable`. Raises `MachineError` if it is not: then its snapshots cannot be
    packed."""
    if not isinstance(runtime, Portable):
        facts = f"snapshots of {runtime.info.name} machines cannot be moved to another host"
        raise MachineError("this runtime cannot export snapshots", facts, hint="use a runtime that is `Portable`")
    return runtime


async def close_quietly(machine: Machine) -> None:
    """Close a machine and ignore a `MachineError`."""
    with contextlib.suppress(MachineError):
        await machine.close()


@dataclass
class FleetHost:
    """A host of a fleet: the runtime that makes its machines, and its capacity.

    `pressure`: called at each heartbeat; returns the host's load from 0 to 1.
    """

    runtime: Runtime
    capacity: Capacity
    pressure: Callable[[], float] = lambda: 0.0


@dataclass
class _PendingGroup:
    machines: asyncio.Future[list[Machine]]
    until_s: float  # of the event loop's clock


class FleetRuntime:
    """A `Runtime` that forks machines on several hosts, whose runtimes all make the same kind of machine.

    - `hosts`: host name to host
    - `need`: resources that one machine takes on average
    - `seed`: the seed for the random choice of hosts
    - `lease_s`: how many seconds a host may be silent before it counts as lost
    - `beat_s`: seconds between heartbeats
    - `costs`: expected durations of forks and copies
    - `late_s`: a fork that takes this many seconds longer than expected is also tried on another host
    - `max_waiting`: the most callers that may wait for free slots
    - `clock`: returns the time in seconds; replaced in tests

    >>> from etude.testing import MemoryRuntime
    >>> async def main():
    ...     hosts = {name: FleetHost(MemoryRuntime(), Capacity(cores=1, memory_bytes=1 << 30)) for name in "ab"}
    ...     fleet = FleetRuntime(hosts, need=Need(cores=0.1, memory_bytes=1 << 20))
    ...     machines = await fleet.fork(await fleet.prepare({"hi.py": b""}), 16)
    ...     await fleet.close()
    ...     return len(machines), fleet.placed
    >>> asyncio.run(main())
    (16, {'a': 6, 'b': 10})
    """

    def __init__(
        self,
        hosts: Mapping[str, FleetHost],
        *,
        need: Need | None = None,
        seed: int = 0,
        lease_s: float = 10.0,
        beat_s: float = 0.5,
        costs: Costs | None = None,
        late_s: float = 5.0,
        max_waiting: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not hosts:
            raise ValueError("a fleet has at least one host")
        self._hosts, self._need = dict(hosts), need if need is not None else Need()
        self._beat_s, self._clock = beat_s, clock
        self._placement = Placement(seed=seed, costs=costs, lease_s=lease_s, suspect_s=3 * beat_s, grace_s=late_s)
        self._recipes = Recipes()
        self._groups: dict[int, _PendingGroup] = {}
        self._machines: dict[str, set[_FleetMachine]] = {name: set() for name in hosts}
        self._orphans: dict[str, list[Machine]] = {name: [] for name in hosts}  # of hosts that are lost
        self._suspects: set[str] = set()  # hosts whose last fork failed
        self._fifo_lock, self._freed = asyncio.Lock(), asyncio.Condition()
        self._num_waiting, self._max_waiting = 0, max_waiting
        self._tasks: set[asyncio.Task[Any]] = set()
        self._beating: asyncio.Task[None] | None = None
        self._closed = False
        for name, host in self._hosts.items():
            self._placement.join(name, host.capacity, clock())

    @property
    def info(self) -> RuntimeInfo:
        """Name and capabilities of the first host's runtime; `notes` also has the number of hosts."""
        info = next(iter(self._hosts.values())).runtime.info
        return msgspec.structs.replace(info, notes=(*info.notes, f"{len(self._hosts)} hosts"))

    @property
    def placed(self) -> dict[str, int]:
        """Number of live machines by host name."""
        return {name: len(machines) for name, machines in self._machines.items()}

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of the hosts that are lost."""
        return tuple(name for name in self._hosts if self._placement.hosts.get(name) is None)

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        """Prepare a snapshot on one host, as `Runtime.prepare` does. Other hosts prepare it when machines are to start
        there."""
        self._require_open()
        parts = msgspec.msgpack.encode([sorted(files.items()), image])
        snapshot = hashlib.sha256(parts).hexdigest()
        recipe = self._recipes.get(snapshot) or self._recipes.put(snapshot, Recipe(dict(files), image))
        if not self._placement.hosts_with(snapshot):
            recipe.id_by_host.clear()
            try:
                await self._prepare_somewhere(snapshot, recipe)
            except BaseException:
                self._recipes.drop(snapshot)
                raise
        self._forget_oldest()
        return snapshot

    async def _prepare_somewhere(self, snapshot: str, recipe: Recipe) -> None:
        failure: MachineError | None = None
        for name in self._placement.choose_homes(3):
            try:
                recipe.id_by_host[name] = await self._hosts[name].runtime.prepare(recipe.files, image=recipe.image)
            except MachineError as error:
                failure = error
                continue
            self._placement.add_snapshot(snapshot, name, self._clock(), need=self._need)
            return
        raise failure or MachineError(
            "no host can prepare a snapshot", self._facts(), hint="see the logs of the lost hosts"
        )

    def _forget_oldest(self) -> None:
        for snapshot in self._recipes.surplus():
            for name in self._placement.hosts_with(snapshot):
                self._placement.remove_snapshot(snapshot, name)

    async def pack(self, snapshot: str, *, max_bytes: int) -> bytes:
        """Serialise a snapshot, as `Portable.pack` does. Raises `MachineError` also if the host's runtime is not
        `Portable`."""
        recipe = self._recipe_of(snapshot)
        if not recipe.id_by_host:
            await self._prepare_again(snapshot, recipe)
        host, there = next(iter(recipe.id_by_host.items()))
        packed = await require_portable(self._hosts[host].runtime).pack(there, max_bytes=max_bytes)
        return msgspec.msgpack.encode((host, packed))

    async def unpack(self, packed: bytes) -> str:
        """Load a packed snapshot on one of the emptiest hosts, as `Portable.unpack` does.

        If these hosts fail, the host where it was packed is tried. Raises `MachineError` if no host can load it.
        """
        try:
            origin, state = msgspec.msgpack.decode(packed, type=tuple[str, bytes])
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a packed state: {error}") from None
        failure = MachineError("no host can restore a snapshot", self._facts(), hint="see the logs of the lost hosts")
        for name in dict.fromkeys([*self._placement.choose_homes(2), *({origin} & self._hosts.keys() - {*self.lost})]):
            try:
                return self._register_state(name, await require_portable(self._hosts[name].runtime).unpack(state))
            except MachineError as error:
                failure = error
        raise failure

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        """Fork n machines on one or more hosts, as `Runtime.fork` does.

        If no host has free slots, wait for them until the deadline. Raises `MachineError` also if too many callers wait
        already.
        """
        check_count(n)
        self._require_open()
        recipe = self._recipe_of(snapshot)
        if self._beating is None:
            self._beating = self._spawn(self._beat_always())
        waiting_for, groups = "free slots on a host", dict[int, _PendingGroup]()
        loop = asyncio.get_running_loop()
        until_s = loop.time() + deadline_s
        try:
            async with asyncio.timeout_at(until_s):
                if not self._placement.hosts_with(snapshot):
                    await self._prepare_again(snapshot, recipe)
                batches = await self._place(snapshot, n)
                waiting_for = f"machines to start on {', '.join(sorted({batch.host for batch in batches}))}"
                for batch in batches:
                    groups[batch.group] = self._groups[batch.group] = _PendingGroup(loop.create_future(), until_s)
                    self._spawn(self._start(batch))
                started = await asyncio.gather(*(group.machines for group in groups.values()))
        except BaseException as error:
            self._abandon_groups(groups)
            if isinstance(error, TimeoutError):
                facts = f"waited {deadline_s:g} s for {waiting_for}; {self._facts()}"
                hint = "close machines, add hosts, or wait longer"
                raise MachineError(f"{n} machines could not be forked", facts, hint=hint) from None
            raise
        for group in groups:
            del self._groups[group]
        return [machine for machines in started for machine in machines]

    def _recipe_of(self, snapshot: str) -> Recipe:
        recipe = self._recipes.get(snapshot)
        if recipe is None:
            raise MachineError(f"no snapshot {snapshot!r}", "no host of this fleet has it", hint="prepare it first")
        return recipe

    async def _prepare_again(self, snapshot: str, recipe: Recipe) -> None:
        if recipe.of_machine:
            self._recipes.drop(snapshot)
            facts = "no other host has this state of a machine"
            raise MachineError("the host of the snapshot was lost", facts, hint="start again from a prepared snapshot")
        await self._prepare_somewhere(snapshot, recipe)

    async def _place(self, snapshot: str, n: int) -> list[Batch]:
        """Place n machines. Callers wait for free slots in the order of their calls."""
        if self._num_waiting >= self._max_waiting:
            facts = f"{self._num_waiting} callers wait; {self._facts()}"
            raise MachineError("too many callers wait for machines", facts, hint="retry later, or fork fewer at once")
        self._num_waiting += 1
        try:
            async with self._fifo_lock, self._freed:
                while n > 0:
                    self._require_open()
                    batches = self._placement.place(snapshot, n, self._clock())
                    if batches:
                        return batches
                    await self._freed.wait()
                return []
        finally:
            self._num_waiting -= 1

    async def _start(self, batch: Batch) -> None:
        """Execute a batch. The first successful attempt resolves the group's future."""
        host, group = self._hosts[batch.host], self._groups.get(batch.group)
        if group is None:  # cancelled meanwhile
            await self._ended(batch.id, batch.n)
            return
        left_s = group.until_s - asyncio.get_running_loop().time()
        try:
            recipe = self._recipe_of(batch.snapshot)
            if batch.host not in recipe.id_by_host and not recipe.of_machine:
                recipe.id_by_host[batch.host] = await host.runtime.prepare(recipe.files, image=recipe.image)
            machines = await host.runtime.fork(recipe.id_by_host[batch.host], batch.n, deadline_s=max(0.001, left_s))
        except (MachineError, OSError, KeyError, ValueError) as error:
            await self._failed(batch, error)
            return
        self._suspects.discard(batch.host)
        if not self._placement.started(batch.id, self._clock()) or group.machines.done():
            await asyncio.gather(*map(close_quietly, machines))
            await self._ended(batch.id, batch.n)
            return
        placed = [_FleetMachine(machine, self, batch) for machine in machines]
        self._machines[batch.host].update(placed)
        group.machines.set_result([*placed])

    async def _failed(self, batch: Batch, error: Exception) -> None:
        self._suspects.add(batch.host)
        recipe = self._recipes.get(batch.snapshot)
        if recipe is not None and not recipe.of_machine:
            recipe.id_by_host.pop(batch.host, None)  # the host may have evicted it
        group = self._groups.get(batch.group)
        if group is None or group.machines.done():
            self._placement.cancel(batch.group)
        following = self._placement.failed(batch.id, self._clock())
        if following is None:
            async with self._freed:
                self._freed.notify_all()
        elif group is not None and following.attempt <= len(self._hosts) + 2:
            self._spawn(self._start(following))
        elif group is not None:
            if not isinstance(error, MachineError):
                error = MachineError("a host could not prepare a snapshot", str(error), hint="prepare it again")
            group.machines.set_exception(error)
            await self._ended(following.id, following.n)

    def _abandon_groups(self, groups: Mapping[int, _PendingGroup]) -> None:
        for group_id, wanted in groups.items():
            group = wanted.machines
            self._placement.cancel(group_id)
            self._groups.pop(group_id, None)
            if group.done() and not group.cancelled() and group.exception() is None:
                for machine in group.result():
                    self._spawn(close_quietly(machine))
            else:
                group.cancel()

    async def _ended(self, batch_id: int, n: int) -> None:
        self._placement.ended(batch_id, n)
        async with self._freed:
            self._freed.notify_all()

    def _register_state(self, host: str, there: str) -> str:
        snapshot = hashlib.sha256(f"{host}\0{there}".encode()).hexdigest()
        self._recipes.put(snapshot, Recipe(id_by_host={host: there}, of_machine=True))
        self._placement.add_snapshot(snapshot, host, self._clock(), need=self._need, copyable=False)
        self._forget_oldest()
        return snapshot

    async def _beat_always(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            await self.beat()

    async def beat(self) -> None:
        """Do one round of heartbeats: check all hosts, and mark those as lost that have not responded for too long.

        It is called automatically every `beat_s` seconds after the first fork.
        """
        await asyncio.gather(*map(self._heartbeat, self._hosts))
        review = self._placement.review(self._clock())
        for name in review.hosts:
            for recipe in self._recipes:
                recipe.id_by_host.pop(name, None)
            for machine in self._machines[name]:
                machine.mark_lost(name)
                self._orphans[name].append(machine.inner)
            self._machines[name].clear()
        for batch in review.batches:
            self._spawn(self._start(batch))
        async with self._freed:
            self._freed.notify_all()  # a host may be back, or less loaded

    async def _heartbeat(self, name: str) -> None:
        """Check one host. A host whose last fork failed must also fork a machine."""
        host = self._hosts[name]
        try:
            async with asyncio.timeout(2 * self._beat_s):
                empty = await host.runtime.prepare({})
                if name in self._suspects:
                    [machine] = await host.runtime.fork(empty, 1, deadline_s=2 * self._beat_s)
                    await close_quietly(machine)
                    self._suspects.discard(name)
                if name in self.lost:  # it is back: end what ran there before
                    await asyncio.gather(*map(close_quietly, self._orphans[name]))
                    self._orphans[name].clear()
        except (MachineError, OSError, TimeoutError):
            return
        if not self._placement.heartbeat(name, self._clock(), pressure=host.pressure()):
            self._placement.join(name, host.capacity, self._clock())

    def _facts(self) -> str:
        lost = f"; lost: {', '.join(self.lost)}" if self.lost else ""
        return f"{sum(self.placed.values())} are alive on {len(self._hosts) - len(self.lost)} hosts{lost}"

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _require_open(self) -> None:
        if self._closed:
            raise MachineError("the runtime is closed", hint="make a new runtime")

    async def close(self) -> None:
        """Close the runtimes of all hosts, as `Runtime.close` does."""
        self._closed = True
        for group in self._groups.values():
            if not group.machines.done():
                group.machines.set_exception(MachineError("the runtime was closed", hint="make a new runtime"))
        async with self._freed:
            self._freed.notify_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(host.runtime.close() for host in self._hosts.values()), return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _FleetMachine:
    """A `Machine` on a host, by that host's machine `inner`. It is lost with the host, permanently."""

    def __init__(self, machine: Machine, fleet: FleetRuntime, batch: Batch) -> None:
        self.inner, self._fleet, self._batch = machine, fleet, batch
        self._has_ended, self._lost = False, ""

    async def exec(
        self, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        return await self._require_host().exec(argv, key=key, deadline_s=deadline_s, **options)

    async def read(self, path: str, *, max_bytes: int = 1_048_576) -> bytes:
        return await self._require_host().read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await self._require_host().write(path, data)

    async def freeze(self) -> None:
        await self._require_host().freeze()

    async def snapshot(self) -> str:
        """Take a snapshot, which can be forked on this machine's host only."""
        return self._fleet._register_state(self._batch.host, await self._require_host().snapshot())

    async def close(self) -> None:
        try:
            if not self._lost:
                await self.inner.close()
        finally:
            if not self._has_ended:
                self._has_ended = True
                self._fleet._machines[self._batch.host].discard(self)
                self._fleet._spawn(self._fleet._ended(self._batch.id, 1))

    def mark_lost(self, host: str) -> None:
        """Make every later call raise `MachineError`, even if the host comes back."""
        self._lost = host

    def _require_host(self) -> Machine:
        if self._lost:
            facts = f"host {self._lost} has not responded for longer than its lease"
            raise MachineError("the host of the machine was lost", facts, hint="fork another one, as a new attempt")
        return self.inner


# ----------------------------------------------------------------------------------- what snapshots were prepared from


MAX_BYTES = 256 << 20  # of all files
MAX_RECIPES = 16_384


@dataclass
class Recipe:
    """The files and the image from which one snapshot of the fleet was prepared, so that further hosts can prepare it.

    `files`: path to content. `id_by_host`: host name to the snapshot's id in that host's runtime. `of_machine`: it is
    the state of a used machine, so it has no files and no image and exists on one host only.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    image: Image | None = None
    id_by_host: dict[str, str] = field(default_factory=dict)
    of_machine: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of all files, in bytes."""
        return sum(map(len, self.files.values()))


class Recipes:
    """Recipes by the fleet's snapshot ids. They are limited in number and bytes; the least recently used are dropped
    first."""

    def __init__(self) -> None:
        self._recipes: OrderedDict[str, Recipe] = OrderedDict()
        self._num_bytes = 0

    def __iter__(self) -> Iterator[Recipe]:
        return iter(self._recipes.values())

    def get(self, snapshot: str) -> Recipe | None:
        """Return the recipe of a snapshot and mark it as used now; None if there is none."""
        if snapshot in self._recipes:
            self._recipes.move_to_end(snapshot)
        return self._recipes.get(snapshot)

    def put(self, snapshot: str, recipe: Recipe) -> Recipe:
        """Add or replace the recipe of a snapshot. Returns the recipe."""
        self.drop(snapshot)
        self._recipes[snapshot] = recipe
        self._num_bytes += recipe.num_bytes
        return recipe

    def drop(self, snapshot: str) -> None:
        """Remove the recipe of a snapshot. Does nothing if there is none."""
        if (recipe := self._recipes.pop(snapshot, None)) is not None:
            self._num_bytes -= recipe.num_bytes

    def surplus(self) -> Iterator[str]:
        """Drop the least recently used recipes until the limits are met. Yields the snapshot ids of those dropped."""
        while len(self._recipes) > 1 and (len(self._recipes) > MAX_RECIPES or self._num_bytes > MAX_BYTES):
            snapshot = next(iter(self._recipes))
            self.drop(snapshot)
            yield snapshot
