from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.here import opened

from etude.environments import NamespaceRuntime
from etude.environments.burst import Forecast, WarmRuntime
from etude.environments.burst.pressure import MIB, Pressure
from etude.errors import MachineError
from etude.testing import MemoryRuntime

IDLE = Pressure(load_per_core=0.1, available_bytes=1 << 40, processes=0.01, cpu_stalled=0.0, memory_stalled=0.0)
NEVER_S = 1e6  # rounds of care are made by hand


class Host:
    """A clock and a pressure that a test sets, and machines that count."""

    def __init__(self, **options: Any) -> None:
        self.now_s, self.pressure = 0.0, IDLE
        self.inner = MemoryRuntime()
        self.warm = WarmRuntime(
            self.inner,
            forecast=Forecast(quantile=0.9, lead_s=1.0, memory_s=30.0),
            read=lambda: self.pressure,
            clock=lambda: self.now_s,
            tick_s=options.pop("tick_s", NEVER_S),
            **options,
        )

    async def routine(self, snapshot: str, n: int, times: int = 4) -> None:
        """Ask for n machines every other second, and close them."""
        for _ in range(times):
            for machine in await self.warm.fork(snapshot, n):
                await machine.close()
            self.now_s += 2.0


def on(test: Callable[[Host], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        host = Host(**options)
        try:
            await test(host)
        finally:
            await host.warm.close()

    asyncio.run(main())


def test_what_is_asked_for_again_and_again_is_ready_before_it_is_asked_for():
    async def test(host):
        snapshot = await host.warm.prepare({"a": b"1"})
        await host.routine(snapshot, 4)
        await host.warm.tend()
        assert host.warm.counts.spare == 4
        machines = await host.warm.fork(snapshot, 6)
        assert (host.warm.counts.warm, host.warm.counts.cold) == (4, 16 + 2)
        assert [await machine.read("a") for machine in machines] == [b"1"] * 6

    on(test)


def test_spares_are_let_go_when_the_forecast_falls():
    async def test(host):
        snapshot = await host.warm.prepare({"a": b"1"})
        await host.routine(snapshot, 4)
        await host.warm.tend()
        host.now_s += 300.0
        await host.warm.tend()
        assert (host.warm.counts.spare, host.warm.counts.let_go) == (0, 4)

    on(test)


def test_nothing_is_made_ahead_on_a_busy_host_but_callers_are_served():
    async def test(host):
        host.pressure = replace(IDLE, cpu_stalled=0.9)
        snapshot = await host.warm.prepare({"a": b"1"})
        await host.routine(snapshot, 4)
        await host.warm.tend()
        assert (host.warm.counts.spare, host.warm.counts.cold) == (0, 16)

    on(test, tick_s=1.0)


def test_spares_go_when_memory_gets_short_and_callers_wait_and_are_told_why():
    async def test(host):
        snapshot = await host.warm.prepare({"a": b"1"})
        await host.routine(snapshot, 4)
        await host.warm.tend()
        host.pressure = replace(IDLE, available_bytes=100 * MIB)
        host.now_s += 2.0
        await host.warm.tend()
        assert host.warm.counts.spare == 0
        with pytest.raises(MachineError, match=r"less pressed \(memory: 100 MiB are available"):
            await host.warm.fork(snapshot, 1, deadline_s=0.01)
        host.pressure = IDLE
        host.now_s += 2.0
        assert len(await host.warm.fork(snapshot, 1)) == 1

    on(test, tick_s=1.0)


def test_callers_wait_in_the_order_they_came_and_nobody_overtakes():
    async def test(host):
        snapshot = await host.warm.prepare({})
        held = await host.warm.fork(snapshot, 4)
        order: list[str] = []

        async def ask(name: str, n: int) -> None:
            await host.warm.fork(snapshot, n)
            order.append(name)

        large, small = asyncio.create_task(ask("large", 3)), asyncio.create_task(ask("small", 1))
        await until(lambda: host.warm.counts.waiting == 2)
        await held[0].close()  # enough for the small one
        assert (order, host.warm.counts.waiting) == ([], 2)
        await held[1].close()
        await held[2].close()
        await large
        await held[3].close()
        await small
        assert order == ["large", "small"]

    on(test, max_machines=4)


def test_a_deadline_names_what_was_waited_for_and_the_line_goes_on():
    async def test(host):
        snapshot = await host.warm.prepare({})
        held = await host.warm.fork(snapshot, 2)
        with pytest.raises(MachineError, match=r"waited 0\.01 s for room among 2 machines"):
            await host.warm.fork(snapshot, 2, deadline_s=0.01)
        assert host.warm.counts.waiting == 0
        await held[0].close()
        assert len(await host.warm.fork(snapshot, 1)) == 1

    on(test, max_machines=2)


def test_a_caller_that_gives_up_gives_its_place_and_its_room_back():
    async def test(host):
        snapshot = await host.warm.prepare({})
        [held] = await host.warm.fork(snapshot, 1)
        first, second = (asyncio.create_task(host.warm.fork(snapshot, 1)) for _ in range(2))
        await until(lambda: host.warm.counts.waiting == 2)
        first.cancel()
        await held.close()
        [machine] = await second
        await machine.close()
        assert host.warm.counts.alive == 0

    on(test, max_machines=1)


def test_the_line_is_bounded():
    async def test(host):
        snapshot = await host.warm.prepare({})
        [held] = await host.warm.fork(snapshot, 1)
        waiting = asyncio.create_task(host.warm.fork(snapshot, 1))
        await until(lambda: host.warm.counts.waiting == 1)
        with pytest.raises(MachineError, match="line for machines is full"):
            await host.warm.fork(snapshot, 1)
        await held.close()
        await waiting

    on(test, max_machines=1, max_waiting=1)


def test_spares_make_room_for_what_somebody_waits_for():
    async def test(host):
        often, other = await host.warm.prepare({"a": b"1"}), await host.warm.prepare({"b": b"1"})
        await host.routine(often, 4)
        await host.warm.tend()
        assert host.warm.counts.spare == 4
        assert len(await host.warm.fork(other, 3)) == 3
        assert (host.warm.counts.spare, host.warm.counts.let_go) == (1, 3)

    on(test, max_machines=4)


def test_a_spare_that_has_died_is_not_handed_out():
    async def test(host):
        snapshot = await host.warm.prepare({"a": b"1"})
        await host.routine(snapshot, 2)
        await host.warm.tend()
        for machine in host.inner._machines:
            await machine.close()
        machines = await host.warm.fork(snapshot, 2)
        assert [await machine.read("a") for machine in machines] == [b"1"] * 2
        assert host.warm.counts.dead == 2

    on(test)


def test_a_snapshot_that_cannot_be_forked_ahead_is_not_tried_again_until_it_is_asked_for():
    async def test(host):
        snapshot = await host.warm.prepare({"a": b"1"})
        await host.routine(snapshot, 2)
        host.inner._snapshots.clear()
        await host.warm.tend()
        with pytest.raises(MachineError, match="prepare it first"):
            await host.warm.fork(snapshot, 2)
        assert host.warm.counts.alive == 0
        assert await host.inner.prepare({"a": b"1"}) == snapshot
        await host.warm.tend()
        assert host.warm.counts.spare == 2

    on(test)


def test_who_waits_is_told_when_the_runtime_is_closed():
    async def test(host):
        snapshot = await host.warm.prepare({})
        await host.warm.fork(snapshot, 1)
        waiting = asyncio.create_task(host.warm.fork(snapshot, 1))
        await until(lambda: host.warm.counts.waiting == 1)
        await host.warm.close()
        with pytest.raises(MachineError, match="was closed"):
            await waiting
        with pytest.raises(MachineError, match="is closed"):
            await host.warm.fork(snapshot, 1)

    on(test, max_machines=1)


def test_real_machines_are_forked_ahead_given_out_and_used():
    async def main():
        inner = opened("namespace", lambda: NamespaceRuntime(max_machines=16, spare=0))
        now_s = 0.0
        warm = WarmRuntime(
            inner,
            max_machines=16,
            clock=lambda: now_s,
            read=lambda: IDLE,
            tick_s=NEVER_S,
            forecast=Forecast(lead_s=1.0),
        )
        try:
            snapshot = await warm.prepare({"hi.py": b"print('hi')\n"})
            for _ in range(3):
                for machine in await warm.fork(snapshot, 3):
                    await machine.close()
                now_s += 2.0
            await warm.tend()
            machines = await warm.fork(snapshot, 3)
            results = [await m.exec(["python", "hi.py"], key="1", deadline_s=20) for m in machines]
            assert [result.output for result in results] == [b"hi\n"] * 3
            assert warm.counts.warm == 3
            assert warm.info.name == "namespace"
        finally:
            await warm.close()

    asyncio.run(main())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)
