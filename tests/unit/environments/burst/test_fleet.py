from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.here import needs

from etude.environments import NamespaceRuntime
from etude.environments.burst import Capacity, FleetHost, FleetRuntime, Need
from etude.errors import MachineError
from etude.seams import Machine, Runtime
from etude.testing import MemoryRuntime

FILES = {"hi.py": b"print('hi')\n"}
EIGHT = Capacity(cores=0.8, memory_bytes=1 << 30)


class Fleet:
    """Two hosts and a clock; rounds of care are made by hand."""

    def __init__(self, make: Callable[[], Runtime]) -> None:
        self.now_s = 0.0
        self.hosts = {name: make() for name in "ab"}
        self.fleet = FleetRuntime(
            {name: FleetHost(runtime, EIGHT) for name, runtime in self.hosts.items()},
            need=Need(cores=0.1, memory_bytes=1 << 20),
            beat_s=1e6,
            clock=lambda: self.now_s,
        )

    async def after(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now_s += 1.0
            await self.fleet.beat()


def on(test: Callable[[Fleet], Awaitable[None]], make: Callable[[], Runtime] = MemoryRuntime) -> None:
    async def main() -> None:
        fleet = Fleet(make)
        try:
            await test(fleet)
        finally:
            await fleet.fleet.close()

    asyncio.run(main())


async def exits(machine: Machine, key: str = "1") -> bytes:
    return (await machine.exec(["python", "hi.py"], key=key, deadline_s=20)).output


def namespaces() -> Runtime:
    return NamespaceRuntime(max_machines=16, spare=0)


def on_real_hosts(test: Callable[[Fleet], Awaitable[None]]) -> None:
    needs("namespace")
    on(test, namespaces)


def test_a_request_larger_than_a_host_is_forked_on_both():
    async def test(fleet):
        machines = await fleet.fleet.fork(await fleet.fleet.prepare(FILES), 16)
        assert [await exits(machine) for machine in machines] == [b"hi\n"] * 16
        assert fleet.fleet.placed == {"a": 8, "b": 8}
        await asyncio.gather(*(machine.close() for machine in machines))
        assert fleet.fleet.placed == {"a": 0, "b": 0}

    on_real_hosts(test)


def test_machines_of_a_host_that_died_are_lost_and_new_ones_are_made_on_the_other():
    async def test(fleet):
        snapshot = await fleet.fleet.prepare(FILES)
        machines = await fleet.fleet.fork(snapshot, 12)
        held = {name: [m for m in machines if m._batch.host == name] for name in "ab"}
        await fleet.hosts["b"].close()
        for machine in held["a"]:
            await machine.close()
        again = await fleet.fleet.fork(snapshot, 8)  # "b" is tried in vain, or not at all
        assert {machine._batch.host for machine in again} == {"a"}
        assert [await exits(machine) for machine in again] == [b"hi\n"] * 8
        fleet.fleet._suspects.add("b")  # whoever was forked there last failed
        await fleet.after(12)
        assert fleet.fleet.lost == ("b",)
        with pytest.raises(MachineError, match="host of the machine was lost"):
            await exits(held["b"][0])
        await held["b"][0].close()
        assert fleet.fleet.placed == {"a": 8, "b": 0}

    on_real_hosts(test)


def test_a_host_that_comes_back_begins_empty_and_its_old_machines_stay_lost():
    async def test(fleet):
        class Cut(MemoryRuntime):
            cut = False

            async def prepare(self, files, *, image=None):
                if self.cut:
                    raise MachineError("no route to the host", hint="wait")
                return await super().prepare(files, image=image)

        host = Cut()
        fleet.fleet._hosts["b"].runtime = host
        snapshot = await fleet.fleet.prepare(FILES)
        machines = await fleet.fleet.fork(snapshot, 16)
        old = [machine for machine in machines if machine._batch.host == "b"]
        host.cut = True
        await fleet.after(12)
        assert fleet.fleet.lost == ("b",)
        host.cut = False
        await fleet.after(1)
        assert fleet.fleet.lost == ()
        assert all(machine.closed for machine in host._machines)
        with pytest.raises(MachineError, match="host of the machine was lost"):
            await old[0].read("hi.py")
        assert len(await fleet.fleet.fork(snapshot, 8)) == 8
        assert fleet.fleet.placed == {"a": 8, "b": 8}

    on(test)


def test_a_caller_that_waits_for_capacity_is_informed_and_continues_when_there_is_some():
    async def test(fleet):
        snapshot = await fleet.fleet.prepare(FILES)
        held = await fleet.fleet.fork(snapshot, 16)
        with pytest.raises(MachineError, match=r"waited 0\.01 s for free slots on a host; 16 are alive on 2 hosts"):
            await fleet.fleet.fork(snapshot, 1, deadline_s=0.01)
        waiting = asyncio.create_task(fleet.fleet.fork(snapshot, 2))
        await asyncio.sleep(0)
        await held[0].close()
        await held[1].close()
        more = [m for m in held if m._batch.host == held[0]._batch.host][:2]
        await asyncio.gather(*(machine.close() for machine in more))
        assert len(await waiting) == 2

    on(test)


def test_callers_wait_in_the_order_of_their_arrival():
    async def test(fleet):
        snapshot = await fleet.fleet.prepare(FILES)
        held = await fleet.fleet.fork(snapshot, 16)
        on_a = [machine for machine in held if machine._batch.host == "a"]
        many = asyncio.create_task(fleet.fleet.fork(snapshot, 4))
        await asyncio.sleep(0)
        one = asyncio.create_task(fleet.fleet.fork(snapshot, 1))
        await on_a[0].close()  # room for one
        for _ in range(50):
            await asyncio.sleep(0)
        assert not one.done()
        await asyncio.gather(*(machine.close() for machine in on_a[1:4]))
        assert len(await many) == 4
        assert not one.done()
        await on_a[4].close()
        assert len(await one) == 1

    on(test)


def test_a_snapshot_of_a_machine_in_use_is_forked_on_its_host_and_lost_with_it():
    async def test(fleet):
        [machine] = await fleet.fleet.fork(await fleet.fleet.prepare(FILES), 1)
        await machine.write("hi.py", b"print('ho')\n")
        snapshot = await machine.snapshot()
        [child] = await fleet.fleet.fork(snapshot, 1)
        assert await child.read("hi.py") == b"print('ho')\n"
        host = machine._batch.host
        assert child._batch.host == host

        async def cut(files, *, image=None):
            raise MachineError("no route to the host", hint="wait")

        fleet.fleet._hosts[host].runtime.prepare = cut
        await fleet.after(12)
        with pytest.raises(MachineError, match="host of the snapshot was lost"):
            await fleet.fleet.fork(snapshot, 1)

    on(test)


def test_a_fleet_in_which_every_host_fails_says_what_the_last_one_said():
    async def test(fleet):
        snapshot = await fleet.fleet.prepare(FILES)

        async def broken(snapshot, n, *, deadline_s=30.0):
            raise MachineError("the disk is full", hint="make room")

        for runtime in fleet.hosts.values():
            runtime.fork = broken
        with pytest.raises(MachineError, match="the disk is full"):
            await fleet.fleet.fork(snapshot, 1)
        assert all(host.cores == 0 for host in fleet.fleet._placement.hosts)

    on(test)


def test_a_fork_that_is_given_up_leaves_nothing_behind():
    async def test(fleet):
        snapshot = await fleet.fleet.prepare(FILES)
        began, go_on = asyncio.Event(), asyncio.Event()

        async def slow(snapshot, n, *, deadline_s=30.0):
            began.set()
            await go_on.wait()
            return await MemoryRuntime.fork(runtime, snapshot, n)

        for runtime in fleet.hosts.values():
            runtime.fork = slow
        asking = asyncio.create_task(fleet.fleet.fork(snapshot, 2))
        await asyncio.wait_for(began.wait(), 20)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        go_on.set()
        await asyncio.gather(*fleet.fleet._tasks - {fleet.fleet._beating})
        assert fleet.fleet.placed == {"a": 0, "b": 0}
        assert all(host.cores == 0 for host in fleet.fleet._placement.hosts)

    on(test)
