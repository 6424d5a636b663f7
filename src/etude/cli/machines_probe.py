"""``etude machines probe | bench``: which machines can be had here, and what they cost."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable
from typing import TypeVar

from rich.table import Table
from rich.text import Text

from etude.cli.places import console
from etude.environments.backends import BACKENDS, open_runtime
from etude.errors import EtudeError, Exit
from etude.seams import Runtime

T = TypeVar("T")
_FILES = {"hello.txt": b"hello\n"}
_DEADLINE_S, _FORK_S = 60.0, 180.0  # the first of a virtual machine boots
_GROUP = 8


def probe(args: argparse.Namespace) -> int:
    """Have a machine of each backend run a command. Exit code 1 where none can be had."""
    table, works = Table("backend", "works", "isolation", "of note"), False
    for backend in BACKENDS:
        try:
            isolation, notes, wall_s = asyncio.run(_tried(backend))
        except EtudeError as error:
            table.add_row(backend, "no", "", Text(str(error)))
            continue
        works = True
        table.add_row(backend, f"in {wall_s:.1f} s", isolation, Text("\n".join(notes)))
    console().print(table)
    return Exit.DONE if works else Exit.FAILED


async def _tried(backend: str) -> tuple[str, tuple[str, ...], float]:
    """Isolation, notes, and seconds from nothing to a command's end in a machine."""
    began = time.perf_counter()
    runtime = open_runtime(backend)
    try:
        [machine] = await runtime.fork(await runtime.prepare(_FILES), 1, deadline_s=_FORK_S)
        await machine.exec(["true"], key="true", deadline_s=_DEADLINE_S)
        return runtime.info.isolation, runtime.info.notes, time.perf_counter() - began
    finally:
        await runtime.close()


def bench(args: argparse.Namespace) -> int:
    """Fork machines one after another and use them. Prints the median and the 99th percentile of each step."""
    taken = asyncio.run(_measured(args.backend, args.num))
    told = {
        step: {"p50_ms": _ms(sorted(each), 0.5), "p99_ms": _ms(sorted(each), 0.99), "times": len(each)}
        for step, each in taken.items()
    }
    if args.json:
        print(json.dumps({"backend": args.backend, "steps": told}, indent=1))
        return Exit.DONE
    table = Table("", "p50 ms", "p99 ms", "times")
    for step, numbers in told.items():
        table.add_row(step, f"{numbers['p50_ms']:.2f}", f"{numbers['p99_ms']:.2f}", str(numbers["times"]))
    console().print(table)
    return Exit.DONE


async def _measured(backend: str, num_machines: int) -> dict[str, list[float]]:
    """Seconds of each step, as often as it was done."""
    runtime = open_runtime(backend)
    try:
        snapshot = await runtime.prepare(_FILES)
        for machine in await runtime.fork(snapshot, 1, deadline_s=_FORK_S):  # what is made once for all is made now
            await machine.close()
        taken: dict[str, list[float]] = {}
        for _ in range(num_machines):
            await _used(runtime, snapshot, taken)
        for _ in range(-(-num_machines // _GROUP)):
            group = await _timed(taken, f"fork {_GROUP}", runtime.fork(snapshot, _GROUP))
            await asyncio.gather(*(machine.close() for machine in group))
        return taken
    finally:
        await runtime.close()


async def _used(runtime: Runtime, snapshot: str, taken: dict[str, list[float]]) -> None:
    [machine] = await _timed(taken, "fork", runtime.fork(snapshot, 1))
    for step, words in (("first `true`", ["true"]), ("`true`", ["true"]), ("`python3 -c`", ["python3", "-c", ""])):
        await _timed(taken, step, machine.exec(words, key=step, deadline_s=_DEADLINE_S))
    await _timed(taken, "snapshot", machine.snapshot())
    await _timed(taken, "close", machine.close())


async def _timed(taken: dict[str, list[float]], step: str, work: Awaitable[T]) -> T:
    began = time.perf_counter()
    result = await work
    taken.setdefault(step, []).append(time.perf_counter() - began)
    return result


def _ms(ordered: list[float], share: float) -> float:
    """
    >>> _ms([0.001, 0.002, 0.005], 0.5)
    2.0
    """
    return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)
