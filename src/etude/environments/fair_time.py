"""Deadlines that allow for a busy host: a command gets back the time that its machine waited for a core.

A command's deadline is in seconds of wall time on a host that gives its machine all the cores it may use. While other
processes keep the host's cores busy, those of the machine stand in the run queue. That time, `lost`, is added to the
deadline.

The time lost in an interval is the smaller of two things:

- what others took: the cores that the machine may use, less the cores that were left on the host beside the CPU time of
  everything outside the machine. The machine's own CPU time comes from its control group, where its processes cannot
  hide any; so it cannot make others look busy, however many processes it starts;
- how long its own threads stood in the run queue. A command that sleeps stands in none.

So a machine alone on its host loses nothing, whatever it does, and one on a busy host gets at most what it was owed.
A deadline grows to `PATIENCE` times its length at most; past that the command has timed out like any other. A slow host
alone never makes a rollout invalid, so no agent can make its rollout invalid that way.
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
_TICKS = 32  # how often the clock is read within one deadline
_SHORTEST_S = 0.1
_HZ = os.sysconf("SC_CLK_TCK")
T = TypeVar("T")


class MachineUsage(NamedTuple):
    """CPU time and waiting time of a machine up to now, as `Measure` reads them."""

    cpu_s: float  # CPU time of everything that ever ran in it
    waits: dict[int, float]  # by thread: seconds in the run queue


class HostUsage(NamedTuple):
    """CPU time of a host up to now."""

    busy_s: float  # CPU time of everything on it, over all cores, with what its hypervisor took (steal)
    cores: int


Measure = Callable[[], MachineUsage | None]
"""Reads a machine's `Use`; None where it cannot be read."""


class FairClock:
    """The clock of one command: wall time, less the time that its machine lost. `cores`: how many the machine may use.

    >>> host, use = iter([HostUsage(0.0, 2), HostUsage(20.0, 2)]), iter([MachineUsage(0.0, {7: 0.0}), MachineUsage(1.0, {7: 9.0})])
    >>> now = iter([0.0, 10.0])
    >>> clock = FairClock(lambda: next(use), cores=1.0, host=lambda: next(host), now=lambda: next(now))
    >>> clock.update()  # in 10 s others had 19 s of two cores: 1 s was left of the 10 that one core has
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
        """Whether lost time can be measured here."""
        return self._use is not None and self._busy is not None

    def update(self) -> None:
        """Add what was lost since the last call to `lost_s`."""
        at, use, host = self._now(), self._measure(), self._host()
        if self._use is not None and use is not None and self._busy is not None and host is not None:
            self.lost_s += lost_seconds(at - self._at, self._use, use, self._busy, host, self._cores)
        self._at, self._use, self._busy = at, use, host

    def left_s(self, deadline_s: float) -> float:
        """Seconds until the deadline, with the time lost up to the last `look`."""
        end = self.began + min(deadline_s + self.lost_s, deadline_s * MAX_EXTENSION)
        return end - self._now()


def lost_seconds(
    wall_s: float, use: MachineUsage, later: MachineUsage, host: HostUsage, host_later: HostUsage, cores: float
) -> float:
    """Seconds that others took, in an interval of `wall_s` seconds, from a machine that may use `cores` cores. `use`
    and `host` were read at its beginning, `later` and `host_later` at its end.

    >>> quiet, full = HostUsage(0.0, 2), HostUsage(20.0, 2)
    >>> lost_seconds(10.0, MachineUsage(0.0, {1: 0.0}), MachineUsage(20.0, {1: 50.0}), quiet, full, 1.0)  # its own processes filled the host
    0.0
    >>> lost_seconds(10.0, MachineUsage(0.0, {1: 0.0}), MachineUsage(0.0, {1: 0.0}), quiet, full, 1.0)  # others did, and it slept
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
    """Wait until a command has ended; call `kill` once when its deadline is over first. Returns (whether it was killed,
    seconds lost). An error of the command stays in `ended` and is not raised."""
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
    """This host's CPU time up to now, over all cores; None where it cannot be read."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
        return HostUsage((user + nice + system + irq + softirq + steal) / _HZ, os.cpu_count() or 1)
    return None


def cgroup_usage(accounts: str, threads: str, *, also: Iterable[int] = ()) -> Measure:
    """A function that reads the `Use` of a control group from two of its files: `accounts`, its CPU time
    (``cpuacct.usage`` or ``cpu.stat``), and `threads`. `also`: processes outside the group whose waiting counts too,
    such as the one that starts its commands."""
    others = tuple(also)

    def measure() -> MachineUsage | None:
        try:
            words = Path(accounts).read_text().split()
            inside = [int(word) for word in Path(threads).read_text().split()]
            used_s = int(words[0]) / 1e9 if len(words) == 1 else int(words[words.index("usage_usec") + 1]) / 1e6
        except (OSError, ValueError, IndexError):
            return None
        return MachineUsage(used_s, _waits([*inside, *others]))

    return measure


def _waits(threads: Iterable[int]) -> dict[int, float]:
    found = {}
    for thread in threads:
        with (
            contextlib.suppress(OSError, ValueError, IndexError),
            open(f"/proc/{thread}/schedstat", encoding="ascii") as file,
        ):
            found[thread] = int(file.read().split()[1]) / 1e9
    return found
