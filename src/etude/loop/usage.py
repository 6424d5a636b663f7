"""What the children cost: CPU seconds each second, memory each fifth, read from the kernel, not told by them.

CPU of a child includes its ended descendants and those that run (a worker's machines), so that shares add up to the
machine. Memory is the proportional set size (PSS), so that shared pages count once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from etude.telemetry import Telemetry

EVERY_S, MEMORY_EVERY = 1.0, 5


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, its descendants, and its descendants that have ended."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process and its descendants."""
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total


async def watch(pids: Callable[[], Mapping[str, int]], telemetry: Telemetry) -> None:
    """Emit a `usage` event each second until cancelled. The conductor itself is always among the processes."""
    tick = 0
    while True:
        processes: dict[str, dict[str, Any]] = {}
        own = psutil.Process(os.getpid())
        times = own.cpu_times()
        processes["conductor"] = {"cpu_s": round(times.user + times.system, 3)}
        if tick % MEMORY_EVERY == 0:
            processes["conductor"]["pss_bytes"] = own.memory_full_info().pss
        for name, pid in pids().items():
            processes[name] = {"cpu_s": round(cpu_s(pid), 3)}
            if tick % MEMORY_EVERY == 0:
                processes[name]["pss_bytes"] = await asyncio.to_thread(pss_bytes, pid)
        telemetry.event("usage", processes=processes)
        tick += 1
        await asyncio.sleep(EVERY_S)
