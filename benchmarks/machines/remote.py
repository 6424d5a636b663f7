"""What a machine elsewhere costs beside one here: fork, `true`, a small file; by `etude machines serve` on loopback.

Both sides in one run, round after round in turn, over the same backend: machines of namespaces. The server is a process
of its own. `python -m benchmarks.machines.remote [--rounds N]`
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

from benchmarks.machines.server import served
from benchmarks.report import report
from etude.environments import NamespaceRuntime
from etude.environments.remote import RemoteRuntime
from etude.seams import Runtime

KEY = "e2b_" + "0123456789" * 4
QUOTA = f'[bench]\nkey = "{KEY}"\nmax_live = 256\ncreations_per_minute = 1000000\n'
PARALLEL = 16


class Side:
    """One of the two, and what its calls took, in ms."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.ms: dict[str, list[float]] = {}

    async def timed(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        started = time.perf_counter()
        await work()
        self.ms.setdefault(name, []).append((time.perf_counter() - started) * 1e3)

    async def round(self) -> None:
        """A machine, ten commands, ten commands at once, a file there and back, its end."""
        snapshot = await self.runtime.prepare({"a.txt": b"a" * 1000})
        started = time.perf_counter()
        [machine] = await self.runtime.fork(snapshot, 1)
        self.ms.setdefault("fork", []).append((time.perf_counter() - started) * 1e3)
        for number in range(10):
            await self.timed("exec_true", lambda n=number: machine.exec(["true"], key=f"t{n}", deadline_s=20))
        together = [machine.exec(["true"], key=f"p{number}", deadline_s=20) for number in range(PARALLEL)]
        await self.timed(f"exec_true_{PARALLEL}_at_once", lambda: asyncio.gather(*together))
        await self.timed("write", lambda: machine.write("b.txt", b"b" * 1000))
        await self.timed("read", lambda: machine.read("b.txt"))
        await self.timed("close", machine.close)

    def numbers(self) -> dict[str, dict[str, float]]:
        """p50 and p99 of each call."""
        return {
            name: {
                "ms_p50": round(statistics.median(all_ms), 3),
                "ms_p99": round(sorted(all_ms)[int(len(all_ms) * 0.99)], 3),
            }
            for name, all_ms in self.ms.items()
        }


async def measure(url: str, rounds: int) -> dict[str, object]:
    """Both sides, round after round in turn; the first of each is not counted."""
    here, there = Side(NamespaceRuntime()), Side(RemoteRuntime(url, key=KEY))
    try:
        for number in range(rounds + 1):
            if number == 1:
                here.ms, there.ms = {}, {}
            for side in (here, there):
                await side.round()
    finally:
        await there.runtime.close()
        await here.runtime.close()
    local, remote = here.numbers(), there.numbers()
    ratios = {name: round(remote[name]["ms_p50"] / local[name]["ms_p50"], 2) for name in local}
    return {"rounds": rounds, "here": local, "remote": remote, "remote_over_here_p50": ratios}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    with served(QUOTA) as url:
        numbers = asyncio.run(measure(url, rounds))
    report("machines_remote", numbers)


if __name__ == "__main__":
    main()
