"""Forks of machines, sustained: how many a second are ready, how soon, what one weighs; others beside ours.

A closed loop of `--workers` forks a machine, runs ``python -c`` in it, and closes it, for `--seconds`; then the same in
turns of a few seconds with bubblewrap and the OCI runtimes that are here (`peers`), so that each ratio is of
one run on one host. Times are of the wall, on a host that should do nothing else; `load` says what it did.
`python -m benchmarks.machines.burst [--seconds 60] [--alive 500]`
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machines.peers import Bubblewrap, Bundle, Peer
from benchmarks.report import report
from etude.environments import NamespaceRuntime
from etude.environments.namespace.launcher import default_python
from etude.seams import Machine

FILES = {"calc.py": b"def f(n):\n    return n + 1\n", "tests.py": b"from calc import f\nassert f(1) == 2\n"}
PROGRAM = "print(6 * 7)"
ANSWER = b"42\n"


@dataclass
class Times:
    """Seconds of each machine: until it was ready, until Python had answered, all of it."""

    ready: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    wall_s: float = 0.0

    def add(self, other: Times) -> None:
        self.ready += other.ready
        self.answered += other.answered
        self.whole += other.whole
        self.wall_s += other.wall_s

    def told(self) -> dict[str, Any]:
        told: dict[str, Any] = {"machines": len(self.whole), "a_second": round(len(self.whole) / self.wall_s, 1)}
        for name, values in (("ready_ms", self.ready), ("python_answered_ms", self.answered), ("whole_ms", self.whole)):
            if values:
                told[name] = milliseconds(values)
        return told


def milliseconds(values: Iterable[float]) -> dict[str, float]:
    ranked = sorted(values)
    return {f"p{q}": round(ranked[min(len(ranked) - 1, int(q / 100 * len(ranked)))] * 1e3, 3) for q in (50, 90, 99)}


class Ours:
    """The namespace runtime and one prepared tree."""

    def __init__(self, runtime: NamespaceRuntime, snapshot: str) -> None:
        self.runtime, self.snapshot = runtime, snapshot

    async def loop(self, seconds: float, workers: int, *, python: bool, batch: int = 1) -> Times:
        """Fork, ask, close, again and again."""
        times, began = Times(), time.perf_counter()

        async def one(machine: Machine, forked_at: float) -> None:
            if python:
                result = await machine.exec(["python", "-c", PROGRAM], key="1", deadline_s=30)
                assert result.output == ANSWER, result
                times.answered.append(time.perf_counter() - forked_at)
            await machine.close()
            times.whole.append(time.perf_counter() - forked_at)

        async def work() -> None:
            while time.perf_counter() - began < seconds:
                forked_at = time.perf_counter()
                machines = await self.runtime.fork(self.snapshot, batch)
                times.ready += [time.perf_counter() - forked_at] * batch
                await asyncio.gather(*(one(machine, forked_at) for machine in machines))

        await asyncio.gather(*(work() for _ in range(workers)))
        times.wall_s = time.perf_counter() - began
        return times

    async def exec_s(self, argv: list[str], times: int) -> list[float]:
        """One command after another in one machine."""
        [machine] = await self.runtime.fork(self.snapshot, 1)
        spent = []
        for i in range(times):
            began = time.perf_counter()
            result = await machine.exec(argv, key=str(i), deadline_s=30)
            spent.append(time.perf_counter() - began)
            assert result.exit_code == 0, result
        await machine.close()
        return spent

    async def memory(self, alive: int) -> dict[str, float]:
        """What so many machines take together, each: of processes (PSS), and of all that the kernel counts."""
        before, pids = available_bytes(), processes()
        machines: list[Machine] = []
        while len(machines) < alive:
            machines += await self.runtime.fork(self.snapshot, min(50, alive - len(machines)))
        told = weighed(before, pids, alive)
        for i in range(0, alive, 50):
            await asyncio.gather(*(machine.close() for machine in machines[i : i + 50]))
        return told


def peer_loop(peer: Peer, seconds: float, workers: int, *, python: bool) -> Times:
    """The same loop, of threads."""
    times, began, failures = Times(), time.perf_counter(), list[BaseException]()

    def work() -> None:
        try:
            while time.perf_counter() - began < seconds and not failures:
                forked_at = time.perf_counter()
                with peer.machine() as machine:
                    times.ready.append(time.perf_counter() - forked_at)
                    if python:
                        assert machine.ask(f"{default_python()} -c '{PROGRAM}'") == ANSWER
                        times.answered.append(time.perf_counter() - forked_at)
                times.whole.append(time.perf_counter() - forked_at)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    times.wall_s = time.perf_counter() - began
    return times


def peer_memory(peer: Peer, alive: int) -> dict[str, float]:
    before, pids = available_bytes(), processes()
    machines = [peer.machine() for _ in range(alive)]
    told = weighed(before, pids, alive)
    for machine in machines:
        machine.__exit__()
    return told


def peer_exec_s(peer: Peer, times: int) -> list[float]:
    spent = []
    with peer.machine() as machine:
        for _ in range(times):
            began = time.perf_counter()
            peer.exec_true(machine)
            spent.append(time.perf_counter() - began)
    return spent


def cpu_s(runtime: NamespaceRuntime) -> dict[str, float]:
    """CPU seconds so far: of this process, of launcher and runner, of machines that have ended, and of the kernel's own
    threads, which free what they left; those are a machine's only where nothing else runs."""
    launcher, tick = runtime._pool.launcher, os.sysconf("SC_CLK_TCK")
    spent = {"host": time.process_time(), "launcher": 0.0, "machines": 0.0, "kernel": 0.0}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        own, waited = (sum(map(int, fields[i : i + 2])) / tick for i in (11, 13))
        if int(name) in (launcher.pid, launcher.runner_pid):
            spent["launcher"] += own
            spent["machines"] += waited
        elif fields[1] == "2":
            spent["kernel"] += own
    return spent


def available_bytes() -> int:
    text = Path("/proc/meminfo").read_text()
    return int(text.partition("MemAvailable:")[2].split()[0]) * 1024


def processes() -> set[int]:
    """All processes that this one has started, and those they have."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
        children.setdefault(parent, []).append(int(name))
    found, left = set[int](), [os.getpid()]
    while left:
        below = children.get(left.pop(), [])
        found.update(below)
        left += below
    return found


def weighed(before: int, pids: set[int], machines: int) -> dict[str, float]:
    """Of what is there now and was not before, a machine's share: of our processes, and of the whole host's memory,
    which is only theirs where nothing else runs."""
    pss_kib = 0
    for pid in processes() - pids:
        try:
            pss_kib += int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0])
        except (OSError, IndexError):
            continue  # it has ended
    return {
        "alive": machines,
        "pss_mib_each": round(pss_kib / 1024 / machines, 4),
        "host_memory_mib_each": round((before - available_bytes()) / machines / (1 << 20), 4),
    }


def python_start_s(times: int = 40) -> list[float]:
    """The bare interpreter's own start, outside of any machine."""
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        subprocess.run([default_python(), "-c", PROGRAM], check=True, capture_output=True)
        spent.append(time.perf_counter() - began)
    return spent


def peers(folder: Path) -> tuple[list[Peer], dict[str, str]]:
    """Those that work here, and why the others do not."""
    found: list[Peer] = []
    absent: dict[str, str] = {}
    makers: dict[str, Callable[[], Peer]] = {
        "bwrap": lambda: Bubblewrap(folder),
        "runc": lambda: Bundle("runc", folder),
        "crun": lambda: Bundle("crun", folder),
    }
    for name, make in makers.items():
        try:
            found.append(make())
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            absent[name] = str(error)
    return found, absent


async def beside(ours: Ours, others: list[Peer], arguments: argparse.Namespace) -> dict[str, Any]:
    """Turns of a few seconds each; a ratio is of one round, and the median of rounds is told."""
    names = ["namespace", *(peer.name for peer in others)]
    sums = {name: Times() for name in names}
    ratios: dict[str, list[float]] = {peer.name: [] for peer in others}
    for _ in range(arguments.rounds):
        rates = {}
        for python in (False, True):
            times = await ours.loop(arguments.turn_s, arguments.workers, python=python)
            _count(sums["namespace"], times, python)
            rates["namespace"] = rates.get("namespace", len(times.whole) / times.wall_s)
            for peer in others:
                times = await asyncio.to_thread(peer_loop, peer, arguments.turn_s, arguments.workers, python=python)
                _count(sums[peer.name], times, python)
                rates[peer.name] = rates.get(peer.name, len(times.whole) / times.wall_s)
        for peer in others:
            ratios[peer.name].append(rates["namespace"] / rates[peer.name])
    told: dict[str, Any] = {name: sums[name].told() for name in names}
    true_s = {"namespace": await ours.exec_s(["true"], 400)}
    for peer in others:
        told[peer.name]["ours_over_it"] = {
            "machines_a_second": round(statistics.median(ratios[peer.name]), 2),
            "of_each_round": [round(ratio, 2) for ratio in ratios[peer.name]],
        }
        told[peer.name]["memory"] = await asyncio.to_thread(peer_memory, peer, arguments.alive_peers)
        true_s[peer.name] = await asyncio.to_thread(peer_exec_s, peer, 100)
    for name in names:
        told[name]["exec_true_ms"] = milliseconds(true_s[name])
    return told


def _count(sums: Times, times: Times, python: bool) -> None:
    """Rates and times to ready are of the turns without Python, the answers of those with it."""
    if python:
        sums.answered += times.answered
    else:
        sums.add(times)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    runtime = NamespaceRuntime(max_machines=arguments.alive + 64)
    try:
        ours = Ours(runtime, await runtime.prepare(FILES))
        await ours.loop(1.0, arguments.workers, python=True)  # warm
        before = cpu_s(runtime)
        sustained = await ours.loop(arguments.seconds, arguments.workers, python=False)
        spent = cpu_s(runtime)
        batches = await ours.loop(arguments.seconds / 4, 2, python=False, batch=16)
        with_python = await ours.loop(arguments.seconds, arguments.workers, python=True)
        told = {
            "fork_to_ready": sustained.told(),
            "fork_cpu_ms": {who: round((spent[who] - before[who]) / len(sustained.whole) * 1e3, 3) for who in spent},
            "fork_of_16_to_ready": batches.told(),
            "fork_to_python": with_python.told(),
            "python_alone_ms": milliseconds(python_start_s()),
            "python_in_a_machine_ms": milliseconds(await ours.exec_s(["python", "-c", PROGRAM], 100)),
            "memory": await ours.memory(arguments.alive),
        }
        with tempfile.TemporaryDirectory() as folder:
            others, absent = await asyncio.to_thread(peers, Path(folder))
            told["beside"] = await beside(ours, others, arguments)
            told["skipped"] = absent
    finally:
        await runtime.close()
    return {"limits": runtime.limits, **told, "workers": arguments.workers, "load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of ours, alone")
    parser.add_argument("--workers", type=int, default=4, help="machines under way at once")
    parser.add_argument("--rounds", type=int, default=3, help="of turns with the others")
    parser.add_argument("--turn-s", type=float, default=5.0, help="of each, in a round, twice")
    parser.add_argument("--alive", type=int, default=500, help="machines of ours whose memory is measured")
    parser.add_argument("--alive-peers", type=int, default=50, help="the same, of each of the others")
    report("machines_burst", asyncio.run(measure(parser.parse_args())))


if __name__ == "__main__":
    sys.exit(main())
