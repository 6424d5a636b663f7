"""Choose the host that is expected to have the machines ready first.

Two random hosts that have the snapshot are compared with two that would have to copy it. The shortest expected wait
wins. This is the power of two choices: near the optimum in O(1), and robust against data that is one heartbeat old. It
also replicates snapshots: a copy is made as soon as waiting costs more than copying. If none of the four can serve, a
heap gives the emptiest hosts in O(log hosts).

Expected waits are corrected by the measured speed of each host (`Host.slowness`, 1 for a host as fast as `Costs` says).
A host more than `MAX_SLOWNESS` times slower than the median is used only if no other host has free slots.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from etude.environments.burst.hosts import Host, Hosts, SnapshotHosts

MAX_SLOWNESS = 2.0  # relative to the median host; slower hosts are used last
_SLOWEST = 32.0  # the largest slowness of a host
_WIDE = 8  # hosts to consider if the random ones cannot serve
_SOURCES = 3  # of a copy, tried in turn


@dataclass(frozen=True)
class Costs:
    """Expected durations on an idle host, in seconds. `Placement` corrects them by what it measures.

    - `batch_s`, `fork_s`: a batch of machines takes `batch_s`, messages included, plus `fork_s` for each machine in it
    - `copy_s`: to copy a snapshot from another host until it can be forked
    - `upload_s`: the part of a copy in which the sending host can send nothing else
    - `full_s`: not a duration; the waiting time by which a completely full host is made less attractive
    """

    batch_s: float = 0.005
    fork_s: float = 0.002
    copy_s: float = 0.05
    upload_s: float = 0.02
    full_s: float = 0.05

    def work_s(self, n: int) -> float:
        """Return the expected seconds to fork a batch of n machines."""
        return self.batch_s + n * self.fork_s


@dataclass(frozen=True)
class Choice:
    """A chosen host, and the time at which it will have the snapshot.

    `there_s`: that time, by the caller's clock. `sources`: hosts to copy the snapshot from, the best first; empty if
    the host has it.
    """

    host: Host
    there_s: float
    sources: tuple[Host, ...]


class Chooser:
    """Chooses the host that starts a batch of machines, and estimates each host's speed from measurements.

    `costs`: expected durations on an idle host. `seed`: the seed for the random choice of candidates. `suspect_s`: a
    host whose last heartbeat is older than this is not chosen. `short_s`: a batch with a shorter expected duration has
    less weight in the estimate. Times are in seconds, and `now_s` is the current time by the caller's clock.
    """

    def __init__(self, hosts: Hosts, costs: Costs, *, seed: int, suspect_s: float, short_s: float) -> None:
        self._hosts, self.costs, self._rng = hosts, costs, random.Random(seed)
        self._suspect_s, self._short_s = suspect_s, short_s
        self.typical = 1.0  # median slowness of all hosts

    def choose(self, copies: SnapshotHosts, n: int, now_s: float, *, avoid: Sequence[str] = ()) -> Choice | None:
        """Return the host that is expected to start `n` machines first, as a `Choice`.

        If no host has `n` free slots, return the host with the most; None if no host has any. `copies`: the hosts that
        have the snapshot. `avoid`: names of hosts that are used only if no other has `n` free slots.
        """
        near = copies.sample(self._rng, 2)
        if copies.copyable:
            near += self._hosts.sample(self._rng, 2)
        sources = self._sources(copies, now_s)
        found = self._soonest([host for host in near if not self.is_slow(host)], copies, sources, n, now_s, avoid)
        if found is not None:
            return found
        wide = [*near, *(self._hosts.emptiest(_WIDE) if copies.copyable else copies.sample(self._rng, _WIDE))]
        found = self._soonest(wide, copies, sources, n, now_s, avoid)
        if found is not None:
            return found
        free_slots, at = max(
            ((host.free_slots(copies.need), -i) for i, host in enumerate(wide) if self.is_alive(host, now_s)),
            default=(0, 0),
        )
        return self._choice(wide[-at], copies, sources, now_s) if free_slots else None

    def is_alive(self, host: Host, now_s: float) -> bool:
        """Return whether the host's last heartbeat is at most `suspect_s` old."""
        return now_s - host.last_heartbeat_s <= self._suspect_s

    def is_slow(self, host: Host) -> bool:
        """Return whether the host is more than `MAX_SLOWNESS` times slower than the median."""
        return host.slowness > MAX_SLOWNESS * self.typical

    def wait_s(self, host: Host, base_s: float) -> float:
        """Return the expected duration of work on a host, in seconds. `base_s`: the duration that `Costs` predicts.

        It is `base_s` times the host's slowness, but at most `MAX_SLOWNESS` times the median slowness.
        """
        return base_s * min(host.slowness, MAX_SLOWNESS * self.typical)

    def update_median(self) -> None:
        """Update the median slowness of all hosts.

        The median is robust: a few slow hosts do not make the others look fast.
        """
        if len(self._hosts):
            self.typical = statistics.median_low(host.slowness for host in self._hosts)

    def heartbeat(self, host: Host) -> None:
        """Record a heartbeat: the host's slowness moves a little towards the median.

        So a host that was slow is chosen again after some time.
        """
        host.slowness += 0.02 * (self.typical - host.slowness)
        host.is_too_slow = host.is_too_slow and self.is_slow(host)

    def record_start(self, host: Host, base_s: float, took_s: float) -> None:
        """Record that a batch started after `took_s` seconds, while `Costs` predicted `base_s`.

        Short batches have little weight, since one lost message dominates their time.
        """
        ratio = min(_SLOWEST, max(0.25, took_s / max(1e-6, base_s)))
        host.slowness += 0.25 * min(1.0, base_s / self._short_s) * (ratio - host.slowness)

    def record_delay(self, host: Host) -> None:
        """Record that a batch is overdue on the host, or has failed there: its slowness grows by half."""
        host.slowness = min(_SLOWEST, host.slowness * 1.5)

    def _soonest(
        self,
        hosts: Sequence[Host],
        copies: SnapshotHosts,
        sources: Sequence[tuple[float, Host]],
        n: int,
        now_s: float,
        avoid: Sequence[str],
    ) -> Choice | None:
        best, best_s = None, math.inf
        for host in hosts:
            if host.name not in avoid and self.is_alive(host, now_s) and host.free_slots(copies.need) >= n:
                there_s = copies.since_s.get(host.name, sources[0][0])
                wait_s = max(0.0, there_s - now_s) + (host.queued_s + self.costs.work_s(n)) * host.slowness
                wait_s += self.costs.full_s * host.fullness**2
                if wait_s < best_s:
                    best, best_s = host, wait_s
        return self._choice(best, copies, sources, now_s) if best is not None else None

    def _choice(self, host: Host, copies: SnapshotHosts, sources: Sequence[tuple[float, Host]], now_s: float) -> Choice:
        if host.name in copies.since_s:
            return Choice(host, max(now_s, copies.since_s[host.name]), ())
        return Choice(host, sources[0][0], tuple(source for _, source in sources[:_SOURCES]))

    def _sources(self, copies: SnapshotHosts, now_s: float) -> list[tuple[float, Host]]:
        """(when another host would have the snapshot from there, source host), the earliest first. A source that
        still waits for its own copy is penalised."""
        candidates = copies.sample(self._rng, 4)
        found = []
        for source in [host for host in candidates if self.is_alive(host, now_s)] or candidates:
            doubt_s = 0.0 if source.name in copies.confirmed else self.costs.copy_s
            sending_s = (source.uploads * self.costs.upload_s + self.costs.copy_s) * source.slowness
            found.append((max(copies.since_s[source.name], now_s) + sending_s + doubt_s, source))
        return sorted(dict((host.name, (when_s, host)) for when_s, host in found).values(), key=lambda one: one[0])
