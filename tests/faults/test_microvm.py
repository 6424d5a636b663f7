"""Virtual machines with faults: killed QEMU or host, guests that hang, flood, fill their disk, or crash; and what a
fork of a running machine must and must not share."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.here import opened
from tests.virtual import microvm

from etude.environments.microvm import MicroVMRuntime
from etude.records.command import ExecResult, OutputChunk, ProcessStarted
from etude.seams import Machine

MIB = 1 << 20


def with_runtime(test: Callable[[MicroVMRuntime], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        runtime = opened("microvm", microvm)
        try:
            return await test(runtime)
        finally:
            await runtime.close()

    return asyncio.run(main())


async def fork(runtime: MicroVMRuntime, n: int = 1, files: dict[str, bytes] | None = None) -> list[Machine]:
    return await runtime.fork(await runtime.prepare(files or {}), n, deadline_s=300.0)


async def shell(machine: Machine, script: str, key: str, **options: Any) -> ExecResult:
    return await machine.exec(["sh", "-c", script], key=key, **{"deadline_s": 300.0, **options})


def children() -> set[int]:
    """The QEMU processes of this process."""
    listed = subprocess.run(["pgrep", "-P", str(os.getpid()), "qemu-system"], capture_output=True, text=True)
    return set(map(int, listed.stdout.split()))


@contextlib.contextmanager
def ends_within(pids: set[int], seconds: float):
    """Check that these processes end in the `with` block, or shortly after it."""
    ends = [os.pidfd_open(pid) for pid in pids]
    try:
        yield
        until = time.monotonic() + seconds
        for pid, end in zip(pids, ends, strict=True):
            assert select.select([end], [], [], max(0.0, until - time.monotonic()))[0], f"{pid} lives on"
    finally:
        for end in ends:
            os.close(end)


def test_a_machine_whose_qemu_is_killed_is_dead_by_its_own_doing_and_others_live_on():
    async def test(runtime):
        before = children()
        victim, other = await fork(runtime, 1), await fork(runtime, 1)
        running = asyncio.create_task(shell(victim[0], "sleep 100", "1"))
        for pid in await mine(victim[0]) - before:
            os.kill(pid, signal.SIGKILL)
        assert (await running).exit_code == 137
        with pytest.raises(FileNotFoundError):
            await victim[0].read("anything")
        with pytest.raises(FileNotFoundError):
            await victim[0].snapshot()
        assert (await shell(other[0], "echo here", "1")).output == b"here\n"

    with_runtime(test)


async def mine(machine: Machine) -> set[int]:
    """The QEMU process of a machine: the one that uses CPU time while the machine does."""

    def spent() -> dict[int, int]:
        return {pid: _ticks(pid) for pid in children()}

    before = spent()
    await shell(machine, "i=0; while [ $i -lt 20000 ]; do i=$((i + 1)); done", "busy")
    after = spent()
    return {max(after, key=lambda pid: after[pid] - before.get(pid, after[pid]))}


def _ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().rpartition(")")[2].split()[11:13]))


def test_nothing_outlives_a_host_that_is_killed(tmp_path):
    with_runtime(lambda runtime: runtime.prepare({}))  # skips where there are none, and has the image booted
    code = """
        import asyncio, os, subprocess
        from tests.virtual import microvm
        async def main():
            runtime = microvm()
            machines = await runtime.fork(await runtime.prepare({}), 2, deadline_s=300.0)
            found = subprocess.run(["pgrep", "-P", str(os.getpid()), "qemu"], capture_output=True, text=True)
            print(*found.stdout.split())
            print("ready", flush=True)
            await machines[0].exec(["sleep", "1000"], key="1", deadline_s=1000)
        asyncio.run(main())
    """
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=env, stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        pids = set(map(int, host.stdout.readline().split()))
        assert (host.stdout.readline(), len(pids) >= 2) == (b"ready\n", True)
        with ends_within(pids, 120.0):
            host.kill()
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def test_a_closed_runtime_leaves_no_process_and_no_descriptor():
    async def one_machine(runtime):
        [machine] = await fork(runtime)
        await machine.snapshot()

    def open_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    with_runtime(one_machine)
    before = open_files()
    with_runtime(one_machine)
    assert (children(), open_files()) == (set(), before)


def test_a_full_disk_is_the_machines_own_trouble():
    async def test(runtime):
        [machine] = await fork(runtime)
        full = await shell(machine, "fallocate -l 1700M a; fallocate -l 200M b; echo over", "1")
        assert full.output.endswith(b"over\n")
        with pytest.raises(OSError, match="No space"):
            await machine.write("large", bytes(200 * MIB // 4))
        assert (await shell(machine, "rm a b; echo room > c; cat c", "2")).output == b"room\n"

    with_runtime(test)


def test_a_fork_bomb_ends_at_its_deadline_and_the_machine_answers():
    async def test(runtime):
        [machine] = await fork(runtime)
        bomb = await shell(machine, "b() { b | b & }; b; while :; do :; done", "1", deadline_s=3.0)
        assert bomb.timed_out
        assert (await shell(machine, "echo alive", "2")).output == b"alive\n"

    with_runtime(test)


def test_memory_that_is_used_up_kills_what_used_it_and_not_the_machine():
    async def test(runtime):
        [machine] = await fork(runtime)
        greedy = await machine.exec(["python", "-c", "x = bytearray(1 << 30)"], key="1", deadline_s=300)
        assert greedy.exit_code != 0
        assert (await shell(machine, "echo alive", "2")).output == b"alive\n"

    with_runtime(test)


def test_a_guest_whose_kernel_crashes_counts_as_killed():
    async def test(runtime):
        [machine] = await fork(runtime)
        crash = "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger; sleep 100"
        assert (await shell(machine, crash, "1", user="root")).exit_code == 137
        with pytest.raises(FileNotFoundError):
            await machine.read("anything")

    with_runtime(test)


def test_a_guest_that_hangs_is_ended_after_the_deadline():
    async def test(runtime):
        before = children()
        [machine] = await fork(runtime)
        [pid] = await mine(machine) - before
        with ends_within({pid}, 120.0):
            os.kill(pid, signal.SIGSTOP)
            hung = await shell(machine, "true", "1", deadline_s=0.5)
            assert (hung.exit_code, hung.timed_out) == (137, True)

    with_runtime(test)


def test_siblings_have_their_own_random_numbers_names_and_the_time_of_day():
    async def test(runtime):
        began = int(time.time())
        machines = await fork(runtime, 3)
        script = "head -c 16 /dev/urandom | od -An -tx1 | tr -d ' '; hostname; cat /etc/machine-id; date +%s"
        said = [(await shell(machine, script, "1")).output.decode().split() for machine in machines]
        for different in list(zip(*said, strict=True))[:3]:
            assert len(set(different)) == 3, different
        assert all(began <= int(now) <= time.time() + 1 for *_, now in said)

    with_runtime(test)


async def past(machine: Machine, key: str) -> tuple[int, float]:
    """Return (id of the next process, uptime of the machine in seconds)."""
    number, up_s = (await shell(machine, "echo $$; cut -d ' ' -f 1 /proc/uptime", key)).output.split()
    return int(number), float(up_s)


def test_siblings_have_pasts_of_their_own_and_no_clock_goes_back():
    async def test(runtime):
        machines = await fork(runtime, 3)
        numbers, ages_s = zip(*[await past(machine, "1") for machine in machines], strict=True)
        assert len(set(numbers)) > 1  # else one time in 65,536
        assert max(ages_s) - min(ages_s) > 1  # else one in 100,000
        [older] = await runtime.fork(await machines[0].snapshot(), 1, deadline_s=300.0)
        assert (await past(older, "1"))[1] >= ages_s[0]
        await shell(machines[0], "sleep 600 > out 2>&1 & echo started", "2")
        _, before_s = await past(machines[0], "3")
        [busy] = await runtime.fork(await machines[0].snapshot(), 1, deadline_s=300.0)
        assert before_s <= (await past(busy, "1"))[1] < before_s + 600  # the clock that runs is not changed

    with_runtime(test)


def test_a_fork_in_mid_run_goes_on_in_the_child_and_in_the_machine():
    counting = """
import os, time
n = 0
while True:
    n += 1
    open("new", "w").write(str(n))
    os.replace("new", "n")
    time.sleep(0.01)
"""

    async def later(machine: Machine, than: int) -> int:
        """Wait until the counter has increased, and return it."""
        async with asyncio.timeout(300):
            while (now := int(await machine.read("n"))) <= than:  # noqa: ASYNC110 - in a guest
                await asyncio.sleep(0.02)  # its one processor is for counting, not for answering
        return now

    async def test(runtime):
        [machine] = await fork(runtime, 1, {"count.py": counting.encode(), "n": b"0"})
        await shell(machine, "python count.py > out 2>&1 & echo started", "1")
        reached = await later(machine, 0)
        children = await runtime.fork(await machine.snapshot(), 2, deadline_s=300.0)
        for each in (*children, machine):
            assert await later(each, reached) > reached
        await shell(children[0], "kill $(pgrep -f count.py)", "1")
        stopped = int(await children[0].read("n"))
        assert await later(children[1], await later(machine, stopped)) > 0

    with_runtime(test)


def test_a_fork_while_a_command_floods_speaks_a_clean_protocol():
    async def test(runtime):
        [machine] = await fork(runtime)
        floods = asyncio.Event()

        def tell(event: ProcessStarted | OutputChunk) -> None:
            if isinstance(event, OutputChunk):
                floods.set()

        flooding = asyncio.create_task(machine.exec(["yes"], key="1", deadline_s=600.0, on_output=tell))
        await asyncio.wait_for(floods.wait(), 120)
        for round_ in range(3):
            [child] = await runtime.fork(await machine.snapshot(), 1, deadline_s=300.0)
            assert (await shell(child, "pgrep yes > /dev/null && echo on", "1")).output == b"on\n", round_
            await child.close()
        assert (await shell(machine, "pkill yes", "2")).exit_code == 0
        assert (await flooding).exit_code == 128 + signal.SIGTERM

    with_runtime(test)


def test_the_host_can_end_a_command_whose_guest_sends_nothing() -> None:
    """An emulated guest that is idle sleeps through one message in a thousand, unless it is nudged."""
    rounds = 3000

    async def test(runtime: MicroVMRuntime) -> None:
        [machine] = await fork(runtime)
        echoed: asyncio.Queue[bytes] = asyncio.Queue()

        async def given():
            for number in range(rounds):
                yield b"%d\n" % number
                said = b""
                while not said.endswith(b"\n"):
                    said += await echoed.get()
                assert said == b"%d\n" % number

        def tell(event: ProcessStarted | OutputChunk) -> None:
            if isinstance(event, OutputChunk):
                echoed.put_nowait(event.data)

        result = await shell(machine, "exec cat", "talk", stdin=given(), on_output=tell, deadline_s=600.0)
        assert (result.timed_out, result.output.count(b"\n")) == (False, rounds)

    with_runtime(test)
