"""Callers that fork, wait, cancel and close at random leave nothing behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from etude.environments.burst import Capacity, FleetHost, FleetRuntime, Need
from etude.errors import MachineError
from etude.seams import Machine, Runtime, RuntimeInfo
from etude.testing import MemoryRuntime


class Flaky:
    """Memory machines whose forks take a few turns of the loop, and fail at times."""

    def __init__(self, rng: random.Random) -> None:
        self.inner, self.rng = MemoryRuntime(), rng
        self.info: RuntimeInfo = self.inner.info
        self.prepare, self.close = self.inner.prepare, self.inner.close

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        if self.rng.random() < 0.1:
            raise MachineError("not now", hint="again")
        return await self.inner.fork(snapshot, n)

    def alive(self) -> int:
        return sum(not machine.closed for machine in self.inner._machines)


async def customer(runtime: Runtime, snapshots: list[str], rng: random.Random) -> None:
    """Asks for machines, sometimes without patience, and closes what it gets."""
    for _ in range(12):
        asking = asyncio.create_task(runtime.fork(rng.choice(snapshots), rng.randrange(1, 6), deadline_s=60))
        if rng.random() < 0.3:
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            asking.cancel()
        try:
            machines = await asking
        except (MachineError, asyncio.CancelledError):
            continue
        for machine in machines:
            await asyncio.sleep(0)
            await machine.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_fleets_forks_are_all_accounted_for(seed):
    async def main():
        hosts = {name: Flaky(random.Random(f"{seed}{name}")) for name in "abc"}
        capacity = Capacity(cores=0.8, memory_bytes=1 << 30)
        fleet = FleetRuntime(
            {name: FleetHost(host, capacity) for name, host in hosts.items()},
            need=Need(cores=0.1, memory_bytes=1 << 20),
            seed=seed,
            beat_s=0.05,
            lease_s=1e6,
        )
        snapshots = [await fleet.prepare({name: b""}) for name in "ab"]
        async with asyncio.timeout(200):
            await asyncio.gather(
                *(customer(fleet, snapshots, random.Random(100 * seed + i)) for i in range(8)), return_exceptions=True
            )
            while any(host.cores > 1e-9 for host in fleet._placement.hosts):  # noqa: ASYNC110 - given up, and closing
                await asyncio.sleep(0)
        assert fleet.placed == {"a": 0, "b": 0, "c": 0}
        assert {name: host.alive() for name, host in hosts.items()} == {"a": 0, "b": 0, "c": 0}
        await fleet.close()

    asyncio.run(main())
