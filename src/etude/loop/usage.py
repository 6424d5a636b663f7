"""CPU time and memory of the run's processes, read from the kernel: CPU seconds every second, memory every 15 seconds.

The CPU time of a child includes its running and ended descendants (a worker's machines), so that shares add up to the
machine. One pass over /proc serves all children; a walk per child would cost the conductor a tenth of a core. Memory is
the proportional set size (PSS), which counts shared pages once; the kernel needs half a millisecond per process for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from etude.environments.fair_time import run_queue_waits
from etude.telemetry import Telemetry

EVERY_S, MEMORY_EVERY = 1.0, 15
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class Processes:
    """The parents and CPU times of all processes of this machine, at the time when this object was created."""

    def __init__(self) -> None:
        self._children: dict[int, list[int]] = {}
        self._cpu_s: dict[int, float] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                self._read(int(name))

    def _read(self, pid: int) -> None:
        try:
            stat = _read_bytes(f"/proc/{pid}/stat")
        except OSError:
            return  # it ended meanwhile
        fields = stat[stat.rindex(b")") + 2 :].split()  # after the name, which may contain spaces
        self._children.setdefault(int(fields[1]), []).append(pid)
        self._cpu_s[pid] = sum(map(int, fields[11:15])) * _TICK_S  # user and system, with those of ended children

    def tree(self, pid: int) -> Iterable[int]:
        """Yield the pids of a process and its descendants."""
        waiting = [pid]
        while waiting:
            at = waiting.pop()
            yield at
            waiting += self._children.get(at, ())

    def cpu_s(self, pid: int) -> float:
        """Return the CPU seconds of a process and its descendants, including those that have ended."""
        return sum(self._cpu_s.get(p, 0.0) for p in self.tree(pid))

    def own_cpu_s(self, pid: int) -> float:
        """Return the CPU seconds of a process without its running descendants."""
        times = os.times()
        return times.user + times.system if pid == os.getpid() else self._cpu_s.get(pid, 0.0)


def pss_bytes(pids: Iterable[int]) -> int:
    """Sum the proportional set sizes of processes. Processes that have ended or cannot be read count as 0."""
    total = 0
    for pid in pids:
        try:
            lines = _read_bytes(f"/proc/{pid}/smaps_rollup").splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"Pss:"))
    return total


def queued_s(pid: int) -> dict[int, float]:
    """Return for each thread of a process how many seconds it has waited for a core since its start, by thread id.

    {} when the process has ended, and where the kernel does not count them."""
    try:
        return run_queue_waits(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return {}


def _read_bytes(path: str) -> bytes:
    """Read a small kernel file in one read call. A file object would cost four times as much."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 65_536)
    finally:
        os.close(file)


async def log_usage(sampled: Callable[[bool], Awaitable[dict[str, dict[str, Any]]]], telemetry: Telemetry) -> None:
    """Write a `usage` event every second until cancelled.

    `sampled(with_memory)` is awaited for the event's content; `with_memory` says whether it must contain the memory."""
    tick = 0
    while True:
        telemetry.event("usage", processes=await sampled(tick % MEMORY_EVERY == 0))
        tick += 1
        await asyncio.sleep(EVERY_S)


def sample(pids: Mapping[str, int], with_memory: bool) -> dict[str, dict[str, Any]]:
    """Measure CPU time and memory of this process ("conductor") and of other local processes.

    Returns name → {"cpu_s": seconds}, and with `with_memory` also "pss_bytes"."""
    processes, own = Processes(), os.getpid()
    result: dict[str, dict[str, Any]] = {"conductor": {"cpu_s": round(processes.own_cpu_s(own), 3)}}
    result |= {name: {"cpu_s": round(processes.cpu_s(pid), 3)} for name, pid in pids.items()}
    if with_memory:
        result["conductor"]["pss_bytes"] = pss_bytes([own])
        for name, pid in pids.items():
            result[name]["pss_bytes"] = pss_bytes(processes.tree(pid))
    return result
