"""What an image costs a machine: fork to ready, a command, a snapshot and its fork, beside machines without an image.

Both kinds take turns in one run, so a neighbour slows both. Each image machine is an overlay of its own; `root` says
whether its owners were mapped or the image was copied. `python -m benchmarks.machines.images IMAGE [--store DIR]`,
after `etude machines image build debian:bookworm --name IMAGE` for instance.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from benchmarks.report import report
from etude.environments import NamespaceRuntime
from etude.environments.images import ImageRecord, ImageStore, default_store
from etude.seams import Machine

GROUP, ROUNDS = 8, 12
T = TypeVar("T")


class Kind:
    """One kind of machine and what it was measured to cost, in milliseconds."""

    def __init__(self, runtime: NamespaceRuntime, snapshot: str) -> None:
        self.runtime, self.snapshot = runtime, snapshot
        self.ms: dict[str, list[float]] = {}

    async def round(self) -> None:
        """A group, from fork to close."""
        machines = await self._timed("fork_each", self.runtime.fork(self.snapshot, GROUP), share=GROUP)
        for number in range(4):
            await self._timed("exec_true", machines[0].exec(["true"], key=str(number), deadline_s=20))
        await machines[0].write("changed", bytes(10_000))
        saved = await self._timed("snapshot", machines[0].snapshot())
        [again] = await self._timed("fork_of_snapshot", self.runtime.fork(saved, 1))
        await self._timed("close_each", _close([*machines, again]), share=GROUP + 1)

    async def _timed(self, name: str, work: Awaitable[T], *, share: int = 1) -> T:
        started = time.perf_counter()
        result = await work
        self.ms.setdefault(name, []).append((time.perf_counter() - started) * 1e3 / share)
        return result

    def numbers(self) -> dict[str, float]:
        """Median and 95th percentile of each."""
        found = {}
        for name, values in self.ms.items():
            found[f"{name}_ms_p50"] = round(statistics.median(values), 2)
            found[f"{name}_ms_p95"] = round(statistics.quantiles(values, n=20)[-1], 2)
        return found


async def _close(machines: list[Machine]) -> None:
    await asyncio.gather(*(machine.close() for machine in machines))


async def measure(store: ImageStore, record: ImageRecord, sink: Callable[[dict[str, object]], None]) -> None:
    runtime = NamespaceRuntime(images=store, spare=0)
    try:
        plain = Kind(runtime, await runtime.prepare({}))
        image = Kind(runtime, await runtime.prepare({}, image=record.image))
        for kind in (plain, image):
            await kind.round()
            kind.ms.clear()
        for _ in range(ROUNDS):
            for kind in (plain, image):
                await kind.round()
        facts = {"num_files": record.num_files, "num_bytes": record.num_bytes, "notes": list(runtime.info.notes)}
        sink({"image": {**facts, **image.numbers()}, "plain": plain.numbers()})
    finally:
        await runtime.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", help="a name or digest")
    parser.add_argument("--store", type=Path, default=default_store())
    args = parser.parse_args()
    store = ImageStore(args.store)
    asyncio.run(measure(store, store.get(args.image), lambda numbers: report("machine_images", numbers)))


if __name__ == "__main__":
    main()
