"""What isolation costs: CPU seconds of a machine (fork, load, kill, reap), of a Python command and of `true` in one.

CPU time is read from the kernel's accounting of the launcher's tree and of this process, so waiting does not count;
what the kernel does later in its own threads (freeing a network namespace) is not in it. A neighbour on the same
core makes CPU seconds longer too, so each number is also given as a multiple of a bare interpreter's fork, measured
in between, and a fresh interpreter's start is there to compare with.
`python -m benchmarks.machines.isolation [--machines N] [--without-agent]`
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.report import report
from etude.environments import MachineGrader, NamespaceRuntime
from etude.environments.namespace.launcher import default_python
from etude.records.task import Answer, Case, Split, Task

CONCURRENT, ROUNDS, IDLE = 8, 3, 64
FILES = {"calc.py": "def f(n):\n    return n + 1\n", "text.py": "def g(s):\n    return s[::-1]\n"}
TESTS = "from calc import f\nfrom text import g\nassert f(1) == 2\nassert g('ab') == 'ba'\nprint('2 of 2 passed')\n"
BARE_FORKS = """
import os, resource
for _ in range(200):
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(sum(u.ru_utime + u.ru_stime for u in used))
"""


def bare_fork_ms() -> float:
    """CPU milliseconds to fork and reap a bare interpreter; its own start is taken off."""
    with_forks = float(subprocess.run([default_python(), "-IS", "-c", BARE_FORKS], capture_output=True).stdout)
    without = float(
        subprocess.run([default_python(), "-IS", "-c", BARE_FORKS.replace("200", "0")], capture_output=True).stdout
    )
    return (with_forks - without) / 200 * 1e3


def fresh_start_ms() -> float:
    """CPU milliseconds of ``python -I -S`` from start to end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(20):
        subprocess.run([default_python(), "-IS", "-c", "pass"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 20 * 1e3


class Bench:
    """One runtime and one prepared tree, used again and again."""

    def __init__(self, runtime: NamespaceRuntime, snapshot: str) -> None:
        self.runtime, self.snapshot = runtime, snapshot
        self.exec_s: dict[str, list[float]] = {"python": [], "true": []}
        self.fork_s: list[float] = []

    async def machine(self, num_execs: int, program: str = "python") -> None:
        """Fork a machine, run its tests, or `true`, a few times, close it."""
        started = time.perf_counter()
        [machine] = await self.runtime.fork(self.snapshot, 1)
        self.fork_s.append(time.perf_counter() - started)
        for i in range(num_execs):
            argv = ["python", "tests.py"] if program == "python" else [program]
            result = await machine.exec(argv, key=str(i), deadline_s=30)
            assert result.output == (b"2 of 2 passed\n" if program == "python" else b""), result
            self.exec_s[program].append(result.wall_s)
        await machine.close()

    async def cpu_ms(self, work: Callable[[], Awaitable[None]], times: int) -> dict[str, float]:
        """Milliseconds of CPU, and of the clock, for each time `work` is done."""
        guest, host, wall = self.runtime.cpu_s(), time.process_time(), time.perf_counter()
        left = iter(range(times))

        async def worker() -> None:
            for _ in left:
                await work()

        await asyncio.gather(*(worker() for _ in range(CONCURRENT)))
        return {
            "guest": (self.runtime.cpu_s() - guest) / times * 1e3,
            "host": (time.process_time() - host) / times * 1e3,
            "wall": (time.perf_counter() - wall) / times * 1e3,
        }


def pss_mib(parent: int, but: int) -> float:
    """Proportional memory of each child of a process, on average; one of them left out."""
    children = [c for c in Path(f"/proc/{parent}/task/{parent}/children").read_text().split() if int(c) != but]
    rollups = [Path(f"/proc/{child}/smaps_rollup").read_text() for child in children]
    return sum(int(text.partition("\nPss:")[2].split()[0]) for text in rollups) / len(rollups) / 1024


def quantile_ms(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3


async def measure(num_machines: int, *, with_agent: bool) -> dict[str, Any]:
    started = time.perf_counter()
    runtime = NamespaceRuntime(with_agent=with_agent)
    start_ms = (time.perf_counter() - started) * 1e3
    files = {name: text.encode() for name, text in {**FILES, "tests.py": TESTS}.items()}
    bench = Bench(runtime, await runtime.prepare(files))
    task = Task(
        source="bench", split=Split.TRAIN, index=0, family="f", instruction="", files=FILES, exports=("calc.py",)
    )
    answer = Answer(reference={}, cases=tuple(Case("calc", "f", [n], n + 1) for n in range(10)))
    grader = MachineGrader(runtime)

    async def grade() -> None:
        outcome = await grader.grade(task, answer, {"calc.py": FILES["calc.py"].encode()})
        assert getattr(outcome, "reward", 0.0) == 1.0, outcome

    rounds = []
    for _ in range(ROUNDS):
        fork_ms = bare_fork_ms()
        empty = await bench.cpu_ms(lambda: bench.machine(0), num_machines)
        full = await bench.cpu_ms(lambda: bench.machine(3), num_machines)
        programs = await bench.cpu_ms(lambda: bench.machine(3, "true"), num_machines)
        grades = await bench.cpu_ms(grade, num_machines // 4)
        each = {"machine": empty["guest"] + empty["host"], "grade": grades["guest"] + grades["host"]}
        each["python"] = (full["guest"] + full["host"] - each["machine"]) / 3
        each["true"] = (programs["guest"] + programs["host"] - each["machine"]) / 3
        each["machine_wall"] = empty["wall"]
        each["machine_and_3_python"] = full["guest"] + full["host"]
        rounds.append({"bare_fork": fork_ms, **each, "host_share": full["host"] / each["machine_and_3_python"]})
    alone_fork = len(bench.fork_s)
    for program, waited_s in bench.exec_s.items():
        waited_s.clear()
        for _ in range(20):
            await bench.machine(20, program)
    idle = await runtime.fork(bench.snapshot, IDLE)
    memory = pss_mib(runtime._pool.launcher.pid, runtime._pool.launcher.runner_pid)
    await asyncio.gather(*(m.close() for m in idle))
    await runtime.close()
    best = {key: round(min(r[key] for r in rounds), 3) for key in rounds[0]}
    return {
        "with_agent": "root" in runtime.info.users,
        "limits": runtime.limits,
        "start_ms": round(start_ms, 1),
        "cpu_ms": best,
        "multiple_of_bare_fork": {
            key: round(min(r[key] / r["bare_fork"] for r in rounds), 2) for key in ("machine", "python", "grade")
        },
        "fresh_python_cpu_ms": round(fresh_start_ms(), 2),
        "fork_ms": {f"p{q}": round(quantile_ms(bench.fork_s[alone_fork:], q / 100), 2) for q in (50, 99)},
        "machines_per_s": round(1000 / best["machine_wall"]),  # sustained, each with its end
        **{
            f"{program}_ms": {f"p{q}": round(quantile_ms(waited_s, q / 100), 2) for q in (50, 99)}
            for program, waited_s in bench.exec_s.items()
        },
        "pss_mib_each": round(memory, 2),
        "load": os.getloadavg()[0],
        "rounds": [{key: round(value, 3) for key, value in r.items()} for r in rounds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=256, help="machines in each round")
    parser.add_argument("--without-agent", action="store_true", help="machines whose first process sleeps")
    arguments = parser.parse_args()
    name = "machines_without_agent" if arguments.without_agent else "machines"
    report(name, asyncio.run(measure(arguments.machines, with_agent=not arguments.without_agent)))


if __name__ == "__main__":
    sys.exit(main())
