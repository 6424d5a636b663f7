"""What a virtual machine costs here: boot, snapshot, restore into a waiting QEMU, first command, memory of each.

``python -m benchmarks.machines.microvm --forks 20 --alive 8``; the image must be built (``etude machines image
microvm``).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import report
from etude.environments import MachineLimits
from etude.environments.agent import program
from etude.environments.microvm import MicroVMRuntime, find, probe
from etude.environments.microvm.base import boot
from etude.environments.microvm.guests import GuestImage, boot_config_of
from etude.environments.microvm.qemu import require_qemu
from etude.seams import Machine

FILES = {f"pkg/m{i}.py": b"x = 1\n" * 200 for i in range(50)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--forks", type=int, default=20, help="restores that are timed, one after another")
    parser.add_argument("--alive", type=int, default=8, help="machines forked at once and kept")
    args = parser.parse_args()
    report("microvm", asyncio.run(measure(args.forks, args.alive)))


async def measure(num_forks: int, num_alive: int) -> dict[str, Any]:
    boot_s = await _boot_s()
    runtime = MicroVMRuntime(max_machines=num_alive + 4, spare=2)
    try:
        prepare_s, snapshot = await _timed(lambda: runtime.prepare(FILES))
        return {
            "accelerator": (await probe(find())).name,
            "boot_s": round(boot_s, 2),
            "first_prepare_ms": round(1e3 * prepare_s, 1),
            **await _one_by_one(runtime, snapshot, num_forks),
            **await _at_once(runtime, snapshot, num_alive),
            **await _in_use(runtime, snapshot),
        }
    finally:
        await runtime.close()


async def _boot_s() -> float:
    """From nothing to a base: boot, what is run first, and keeping it."""
    own = find()
    kind = (await probe(own)).name
    booting = await boot_config_of(GuestImage.of(None, own, None), own, program(), MachineLimits(), kind)
    with tempfile.TemporaryDirectory() as kept:
        seconds, _ = await _timed(lambda: boot(booting, qemu=require_qemu(), kept=Path(kept)))
    return seconds


async def _one_by_one(runtime: MicroVMRuntime, snapshot: str, count: int) -> dict[str, Any]:
    """Each fork finds a QEMU that waits."""
    forks, firsts, commands, closes = [], [], [], []
    for _ in range(count):
        await runtime.ready()
        fork_s, [machine] = await _timed(lambda: runtime.fork(snapshot, 1))
        firsts.append((await _timed(lambda m=machine: _run(m, "true", "0")))[0])
        commands += [(await _timed(lambda m=machine, k=str(i): _run(m, "true", k)))[0] for i in range(1, 6)]
        closes.append((await _timed(machine.close))[0])
        forks.append(fork_s)
    return {
        **_quantiles("restore", forks),
        **_quantiles("first_exec", firsts),
        **_quantiles("exec", commands),
        **_quantiles("close", closes),
    }


async def _at_once(runtime: MicroVMRuntime, snapshot: str, count: int) -> dict[str, Any]:
    """A batch, most of which finds no QEMU that waits; then what each holds."""
    await runtime.ready()
    seconds, machines = await _timed(lambda: runtime.fork(snapshot, count, deadline_s=120.0))
    idle = _memory_bytes(runtime)
    for machine in machines:
        await machine.exec(["python", "-c", "print(1)"], key="1", deadline_s=60.0)
    used = _memory_bytes(runtime)
    for machine in machines:
        await machine.close()
    return {
        "forked_at_once": count,
        "forks_per_s": round(count / seconds, 1),
        "pss_mib_each": round(idle / count / 2**20, 1),
        "pss_mib_each_after_python": round(used / count / 2**20, 1),
    }


async def _in_use(runtime: MicroVMRuntime, snapshot: str) -> dict[str, Any]:
    """Snapshots of a machine in which something runs, and forks of them."""
    [machine] = await runtime.fork(snapshot, 1)
    await machine.exec(
        ["sh", "-c", "while :; do echo x > f; sleep 0.1; done > /dev/null & :"], key="1", deadline_s=60.0
    )
    takes, forks = [], []
    for _ in range(10):
        take_s, taken = await _timed(machine.snapshot)
        await runtime.ready()
        fork_s, [child] = await _timed(lambda t=taken: runtime.fork(t, 1))
        await child.close()
        takes.append(take_s)
        forks.append(fork_s)
    pack_s, packed = await _timed(lambda: runtime.pack(taken, max_bytes=256 << 20))
    unpack_s, _ = await _timed(lambda: runtime.unpack(packed))
    return {
        **_quantiles("snapshot", takes),
        **_quantiles("restore_in_use", forks),
        "pack_ms": round(1e3 * pack_s, 1),
        "unpack_ms": round(1e3 * unpack_s, 1),
        "packed_mib": round(len(packed) / 2**20, 1),
    }


async def _run(machine: Machine, program: str, key: str) -> None:
    assert (await machine.exec([program], key=key, deadline_s=60.0)).exit_code == 0


async def _timed(work: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = await work()
    return time.perf_counter() - began, result


def _quantiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {f"{name}_ms_p50": round(1e3 * statistics.median(ordered), 1), f"{name}_ms_p99": round(1e3 * p99, 1)}


def _memory_bytes(runtime: MicroVMRuntime) -> int:
    """Proportional share of all machines' memory."""
    total = 0
    for pid in runtime.pids():
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


if __name__ == "__main__":
    main()
