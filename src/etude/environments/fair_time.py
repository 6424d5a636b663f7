"""Fair deadlines on a busy host: a command gets back the time that other processes took from its machine.

A deadline means seconds of wall time on a host that gives the machine all the cores that it may use. On a busy host the
machine's threads wait in the run queue. This *lost time* is added to the deadline. For each interval between two
measurements, the lost time is the smaller of:

- the time that others took: the cores that the machine may use, less the cores that all processes outside of it left
  idle. The machine's own CPU time comes from its control group, so its processes can neither hide it nor make other
  processes look busy;
- the time that the machine's threads waited in the run queue. A sleeping command waits for no core.

So a machine alone on its host loses nothing. A deadline grows to at most `MAX_EXTENSION` times its length; then the
command times out like any other. So an agent cannot make its own rollout invalid by being slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

MAX_EXTENSION = 10.0
_TICKS = 32  # clock readings per deadline
_SHORTEST_S = 0.1
_HZ = os.sysconf("SC_CLK_TCK")
T = TypeVar("T")


class MachineUsage(NamedTuple):
    """CPU time of a machine since its start, and how long its threads waited for a core.

    `cpu_s`: CPU seconds of everything that ever ran in it. `waits`: thread id to seconds in the run queue.
    """

    cpu_s: float
    waits: dict[int, float]


class HostUsage(NamedTuple):
    """CPU time of a host since its boot. `busy_s`: CPU seconds of all cores together. `cores`: number of cores."""

    busy_s: float  # CPU time of all processes on all cores, including time taken by the hypervisor (steal)
    cores: int


Measure = Callable[[], MachineUsage | None]
"""Reads a machine's usage; None if it cannot be read."""


class FairClock:
    """The clock of one command: wall time minus the time that its machine lost to other processes.

    `measure` returns the machine's usage now, or None if it cannot be read. `cores`: how many cores the machine may
    use. `host` and `now` return the host's counters and the time; tests replace them.

    >>> host, now = iter([HostUsage(0.0, 2), HostUsage(20.0, 2)]), iter([0.0, 10.0])
    >>> use = iter([MachineUsage(0.0, {7: 0.0}), MachineUsage(1.0, {7: 9.0})])
    >>> clock = FairClock(lambda: next(use), cores=1.0, host=lambda: next(host), now=lambda: next(now))
    >>> clock.update()  # in 10 s others used 19 s of two cores: 1 s of the 10 s of one core was left
    >>> clock.lost_s
    9.0
    """

    def __init__(
        self,
        measure: Measure,
        *,
        cores: float,
        host: Callable[[], HostUsage | None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure, self._cores, self._host, self._now = measure, cores, host or host_usage, now
        self.began, self.lost_s = now(), 0.0
        self._at, self._use, self._busy = self.began, measure(), self._host()

    @property
    def is_available(self) -> bool:
        """Whether lost time can be measured on this host."""
        return self._use is not None and self._busy is not None

    def update(self) -> None:
        """Measure again, and add the time lost since the last call to `lost_s`."""
        at, use, host = self._now(), self._measure(), self._host()
        if self._use is not None and use is not None and self._busy is not None and host is not None:
            self.lost_s += lost_seconds(at - self._at, self._use, use, self._busy, host, self._cores)
        self._at, self._use, self._busy = at, use, host

    def left_s(self, deadline_s: float) -> float:
        """Return how many seconds are left until the deadline, extended by the lost time up to the last `update`.

        `deadline_s`: the deadline, in seconds from the creation of this clock.
        """
        end = self.began + min(deadline_s + self.lost_s, deadline_s * MAX_EXTENSION)
        return end - self._now()


def lost_seconds(
    wall_s: float, use: MachineUsage, later: MachineUsage, host: HostUsage, host_later: HostUsage, cores: float
) -> float:
    """Return how many seconds of an interval other processes took from a machine.

    `wall_s`: the interval's length. `use` and `host` were measured at its start, `later` and `host_later` at its end.
    `cores`: how many cores the machine may use.

    >>> quiet, full = HostUsage(0.0, 2), HostUsage(20.0, 2)
    >>> before, busy = MachineUsage(0.0, {1: 0.0}), MachineUsage(20.0, {1: 50.0})
    >>> lost_seconds(10.0, before, busy, quiet, full, 1.0)  # its own processes filled the host
    0.0
    >>> lost_seconds(10.0, before, before, quiet, full, 1.0)  # others did, and it slept
    0.0
    """
    own_s = max(0.0, later.cpu_s - use.cpu_s)
    others_s = max(0.0, host_later.busy_s - host.busy_s - own_s)
    owed_s = min(cores, host.cores) * wall_s
    left_s = max(0.0, host.cores * wall_s - others_s)
    taken = max(0.0, 1.0 - left_s / owed_s) if owed_s > 0 else 0.0
    waited_s = sum(max(0.0, wait - use.waits.get(thread, 0.0)) for thread, wait in later.waits.items())
    return min(taken * wall_s, waited_s)


async def wait_until_deadline(
    ended: asyncio.Future[T], clock: FairClock, deadline_s: float, kill: Callable[[], None]
) -> tuple[bool, float]:
    """Wait until the future `ended` of a command is done; call `kill` once if its fair deadline passes first.

    Returns (whether `kill` was called, seconds lost to other processes). An error of the command stays in `ended` and
    is not raised here.
    """
    tick_s = max(_SHORTEST_S, deadline_s / _TICKS)
    while not ended.done():
        left_s = clock.left_s(deadline_s)
        if left_s <= 0:
            clock.update()
            if clock.left_s(deadline_s) <= 0:
                kill()
                return True, clock.lost_s
        await asyncio.wait([ended], timeout=min(tick_s, max(left_s, 0.001)))
        if not ended.done():
            clock.update()
    return False, clock.lost_s


def host_usage() -> HostUsage | None:
    """Return the CPU time of this host since its boot, or None if /proc/stat cannot be read."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
        return HostUsage((user + nice + system + irq + softirq + steal) / _HZ, os.cpu_count() or 1)
    return None


def cgroup_usage(accounts: str, threads: str, *, also: Iterable[int] = ()) -> Measure:
    """Return a function that measures the usage of a control group; it returns None if the files cannot be read.

    `accounts`: path of the file with its CPU time (``cpuacct.usage`` or ``cpu.stat``). `threads`: path of the file that
    lists its threads. `also`: ids of processes outside the group whose waiting counts too, such as the process that
    starts its commands.
    """
    others = tuple(also)

    def measure() -> MachineUsage | None:
        try:
            words = Path(accounts).read_text().split()
            inside = [int(word) for word in Path(threads).read_text().split()]
            used_s = int(words[0]) / 1e9 if len(words) == 1 else int(words[words.index("usage_usec") + 1]) / 1e6
        except (OSError, ValueError, IndexError):
            return None
        return MachineUsage(used_s, run_queue_waits([*inside, *others]))

    return measure


def run_queue_waits(threads: Iterable[int]) -> dict[int, float]:
    """Return for each of these thread ids how many seconds the thread has waited in the run queue since its start.

    Threads that cannot be read are left out.
    """
    found = {}
    for thread in threads:
        with (
            contextlib.suppress(OSError, ValueError, IndexError),
            open(f"/proc/{thread}/schedstat", encoding="ascii") as file,
        ):
            found[thread] = int(file.read().split()[1]) / 1e9
    return found
