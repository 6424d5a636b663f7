"""Deadlines on a busy host: CPU time taken by others extends them, a machine's own work does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.here import opened

from etude.environments import MachineLimits
from etude.environments.fair_time import (
    MAX_EXTENSION,
    FairClock,
    HostUsage,
    MachineUsage,
    cgroup_usage,
    host_usage,
    lost_seconds,
    wait_until_deadline,
)
from etude.environments.namespace import NamespaceRuntime
from etude.records.command import ExecResult
from etude.seams import Machine

SECONDS = st.floats(0.0, 1e4)
WAITS = st.dictionaries(st.integers(1, 9), SECONDS, max_size=5)


@given(SECONDS, st.floats(0.05, 64), st.integers(1, 64), SECONDS, WAITS)
def test_a_machine_alone_on_its_host_loses_nothing(wall_s, cores, num_cores, used_s, waits):
    used_s = min(used_s, num_cores * wall_s)
    assert (
        lost_seconds(
            wall_s,
            MachineUsage(0.0, {}),
            MachineUsage(used_s, waits),
            HostUsage(0.0, num_cores),
            HostUsage(used_s, num_cores),
            cores,
        )
        == 0
    )


@given(SECONDS, st.floats(0.05, 64), st.integers(1, 64), SECONDS, SECONDS, WAITS)
def test_no_more_is_lost_than_its_threads_waited_and_than_passed(wall_s, cores, num_cores, used_s, busy_s, waits):
    found = lost_seconds(
        wall_s,
        MachineUsage(0.0, {}),
        MachineUsage(used_s, waits),
        HostUsage(0.0, num_cores),
        HostUsage(busy_s, num_cores),
        cores,
    )
    assert 0.0 <= found <= min(wall_s, sum(waits.values()))


@given(SECONDS, st.floats(0.05, 64), st.integers(1, 64), SECONDS, SECONDS, SECONDS, WAITS)
def test_a_machine_that_uses_more_cpu_is_credited_no_more_lost_time(
    wall_s, cores, num_cores, used_s, more_s, others_s, waits
):
    def of(own_s: float) -> float:
        host = HostUsage(others_s + own_s, num_cores)
        return lost_seconds(
            wall_s, MachineUsage(0.0, {}), MachineUsage(own_s, waits), HostUsage(0.0, num_cores), host, cores
        )

    assert of(used_s + more_s) <= of(used_s) + 1e-6


def test_a_thread_is_counted_from_when_it_was_seen_and_one_that_has_ended_no_more():
    before, after = MachineUsage(0.0, {1: 5.0, 2: 7.0}), MachineUsage(0.0, {2: 8.0, 3: 0.5})
    assert lost_seconds(10.0, before, after, HostUsage(0.0, 1), HostUsage(10.0, 1), 1.0) == 1.5


def clock_of(took: Callable[[float], float], now: list[float]) -> FairClock:
    """A clock on a host of one core that others have all of, by a machine whose wait is a function of the time."""
    return FairClock(
        lambda: MachineUsage(0.0, {1: took(now[0])}), cores=1.0, host=lambda: HostUsage(now[0], 1), now=lambda: now[0]
    )


def test_a_deadline_moves_by_what_is_lost_and_to_a_bound():
    now = [0.0]
    clock = clock_of(lambda at: at / 2, now)
    now[0] = 8.0
    assert clock.left_s(10.0) == 2.0
    clock.update()
    assert (clock.lost_s, clock.left_s(10.0)) == (4.0, 6.0)
    starved = clock_of(lambda at: at, now)
    now[0] = 1e6
    starved.update()
    assert starved.left_s(10.0) == 8.0 + 10.0 * MAX_EXTENSION - 1e6


def test_without_a_measure_a_deadline_is_wall_time():
    clock = FairClock(lambda: None, cores=1.0)
    assert not clock.is_available
    clock.update()
    assert clock.lost_s == 0


def test_at_its_deadline_a_command_is_killed_once():
    async def main() -> None:
        killed: list[int] = []
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        late, lost_s = await wait_until_deadline(
            ended, FairClock(lambda: None, cores=1.0), 0.01, lambda: killed.append(1)
        )
        assert (late, lost_s, killed) == (True, 0.0, [1])
        ended.set_result(3)
        assert await wait_until_deadline(ended, FairClock(lambda: None, cores=1.0), 0.01, lambda: killed.append(2)) == (
            False,
            0.0,
        )
        assert killed == [1]

    asyncio.run(main())


@pytest.mark.parametrize("text", ["", "cpu", "x y z", "12 13 14 -"])
def test_files_that_are_not_what_they_should_be_are_no_measure(tmp_path, text):
    (tmp_path / "usage").write_text(text)
    (tmp_path / "tasks").write_text(text)
    assert cgroup_usage(str(tmp_path / "usage"), str(tmp_path / "tasks"))() is None
    assert cgroup_usage(str(tmp_path / "gone"), str(tmp_path / "tasks"))() is None


def test_both_versions_of_control_groups_are_read(tmp_path):
    (tmp_path / "tasks").write_text(f"{os.getpid()}\n")
    for text in ("2500000000\n", "usage_usec 2500000\nuser_usec 1\n"):
        (tmp_path / "usage").write_text(text)
        use = cgroup_usage(str(tmp_path / "usage"), str(tmp_path / "tasks"))()
        assert use is not None
        assert use.cpu_s == 2.5
        assert set(use.waits) == {os.getpid()}
    assert host_usage() is not None


# ------------------------------------------------------------------------------------------------ on a busy host

SPINS = "import time\nend = time.process_time() + {cpu_s}\nwhile time.process_time() < end: pass\nprint('done')"
DEADLINE_S = 1.2
CPU_S = 0.4  # of a whole core: a third of the deadline on a quiet host, more than the deadline beside the hogs


@contextlib.contextmanager
def busy_host() -> Iterator[None]:
    """Four processes a core that do nothing but run; they end by themselves, too."""
    spin = "import time\nend = time.monotonic() + 120\nwhile time.monotonic() < end: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(4 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
        for hog in hogs:
            hog.wait()


def on_busy_host(test: Callable[[Machine], Awaitable[None]]) -> None:
    async def main() -> None:
        runtime = opened("namespace", lambda: NamespaceRuntime(MachineLimits()))
        try:
            if runtime._pool.launcher.info["accounts"] is None:
                pytest.skip("no control group counts CPU time here")
            [machine] = await runtime.fork(await runtime.prepare({}), 1)
            with busy_host():
                await test(machine)
        finally:
            await runtime.close()

    asyncio.run(main())


async def spin(machine: Machine, words: list[str]) -> ExecResult:
    return await machine.exec(words, key=os.urandom(4).hex(), deadline_s=DEADLINE_S)


@pytest.mark.slow  # a virtual machine whose cores others take from outside cannot see what it lost
@pytest.mark.parametrize("by_agent", [False, True])
def test_a_command_that_would_be_in_time_alone_is_in_time_beside_hogs(by_agent):
    async def test(machine: Machine) -> None:
        code = SPINS.format(cpu_s=CPU_S)
        words = ["sh", "-c", f'exec python -c "{code}"'] if by_agent else ["python", "-c", code]
        result = await spin(machine, words)
        assert (result.output, result.timed_out) == (b"done\n", False)
        assert result.lost_s > 0

    on_busy_host(test)


ABUSES = {
    "sleeps": "import time\ntime.sleep(1000)",
    "forks spinners": "import os\nfor _ in range(5): os.fork()\nwhile True: pass",
    "starts many short ones": "import os\nwhile True:\n    if os.fork() == 0: os._exit(0)\n    os.wait()",
    "wakes a crowd": (
        "import os, time\nfor _ in range(30):\n    if os.fork() == 0:\n"
        "        while True:\n            time.sleep(.01)\n            sum(range(1000))\ntime.sleep(1000)"
    ),
}


@pytest.mark.parametrize("abuse", ABUSES)
def test_a_command_beside_resource_hogs_times_out_without_failing_the_machine(abuse):
    async def test(machine: Machine) -> None:
        result = await spin(machine, ["python", "-c", ABUSES[abuse]])
        assert result.timed_out
        assert result.lost_s <= DEADLINE_S * MAX_EXTENSION
        after = await machine.exec(["python", "-c", "print(1)"], key="after", deadline_s=30)
        assert after.output == b"1\n"

    on_busy_host(test)
