"""Which host, of those that have room: the one that would have the machines soonest, as far as is known here.

Of two random hosts that have the snapshot and two that would have to copy it, the one with the shortest expected wait
wins (power of two choices: near the best at O(1), and robust against knowledge that is a heartbeat old). So a snapshot
spreads by itself where its hosts are busy: a copy is made when waiting costs more than copying. Where none of the four
will do, the emptiest hosts come from a heap in O(log hosts).

What is expected is corrected by what is seen of each host (`Host.slowness`). All hosts forking slower than was said is
no host's fault: one that is more than `PATIENT` times slower than the median is asked only where nothing else has
room. Knows nothing of groups and attempts.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from etude.environments.burst.hosts import Host, Hosts, SnapshotHosts

MAX_SLOWNESS = 2.0  # times the median host's time; for so long a host is waited for
_SLOWEST = 32.0  # times the expected time; what a host can be thought to be
_WIDE = 8  # hosts that are looked at where the random ones will not do
_SOURCES = 3  # of a copy: where the first does not send, the next is asked


@dataclass(frozen=True)
class Costs:
    """What placement expects of an idle host, in seconds. It corrects itself by what it then sees."""

    batch_s: float = 0.005  # a batch, whatever its size, messages included
    fork_s: float = 0.002  # one machine more
    copy_s: float = 0.05  # a snapshot from another host, until it can be forked
    upload_s: float = 0.02  # for so long the sender sends nothing else
    full_s: float = 0.05  # as so much waiting counts a host that is full

    def work_s(self, n: int) -> float:
        """A batch of n."""
        return self.batch_s + n * self.fork_s


@dataclass(frozen=True)
class Choice:
    """A host, and when it will have the snapshot."""

    host: Host
    there_s: float
    sources: tuple[Host, ...]  # of the copy, the best first; () where there is one


class Chooser:
    """Chooses hosts, and learns how fast they are. Seeded; time is passed."""

    def __init__(self, hosts: Hosts, costs: Costs, *, seed: int, suspect_s: float, short_s: float) -> None:
        self._hosts, self.costs, self._rng = hosts, costs, random.Random(seed)
        self._suspect_s, self._short_s = suspect_s, short_s
        self.typical = 1.0  # of the hosts' slowness

    def choose(self, copies: SnapshotHosts, n: int, now_s: float, *, avoid: Sequence[str] = ()) -> Choice | None:
        """The host that would start n machines soonest, or one with room for some of them; None without any room."""
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
        """Heard lately."""
        return now_s - host.last_heartbeat_s <= self._suspect_s

    def is_slow(self, host: Host) -> bool:
        """Slower than others by more than is waited for."""
        return host.slowness > MAX_SLOWNESS * self.typical

    def wait_s(self, host: Host, base_s: float) -> float:
        """How long a host is waited for, for what should take `base_s` by the costs alone."""
        return base_s * min(host.slowness, MAX_SLOWNESS * self.typical)

    def update_median(self) -> None:
        """Learn what is typical: the median, so that a few slow hosts do not make the others look fast, nor all
        together look slow."""
        if len(self._hosts):
            self.typical = statistics.median_low(host.slowness for host in self._hosts)

    def heartbeat(self, host: Host) -> None:
        """It lives: what was slow once is tried again some day."""
        host.slowness += 0.02 * (self.typical - host.slowness)
        host.is_too_slow = host.is_too_slow and self.is_slow(host)

    def record_start(self, host: Host, base_s: float, took_s: float) -> None:
        """A batch that should have taken `base_s` by the costs alone started after `took_s`. Short waits say little:
        a message that was lost once takes longer."""
        ratio = min(_SLOWEST, max(0.25, took_s / max(1e-6, base_s)))
        host.slowness += 0.25 * min(1.0, base_s / self._short_s) * (ratio - host.slowness)

    def record_delay(self, host: Host) -> None:
        """A batch is overdue there, or failed."""
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
        """(when a further host would have it from there, host), the soonest first. Who waits for a copy itself can
        send it on, but is believed less than who has shown that it has it."""
        candidates = copies.sample(self._rng, 4)
        found = []
        for source in [host for host in candidates if self.is_alive(host, now_s)] or candidates:
            doubt_s = 0.0 if source.name in copies.confirmed else self.costs.copy_s
            sending_s = (source.uploads * self.costs.upload_s + self.costs.copy_s) * source.slowness
            found.append((max(copies.since_s[source.name], now_s) + sending_s + doubt_s, source))
        return sorted(dict((host.name, (when_s, host)) for when_s, host in found).values(), key=lambda one: one[0])
