"""State of hosts for placement, in two small indexes.

`Hosts` has all hosts. It samples a random host in O(1) and finds the emptiest in O(log hosts), by a heap with one entry
per change whose outdated entries are dropped when they reach the top. `SnapshotHosts` has the hosts of one snapshot.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Need:
    """Resources that one machine takes of its host on average: CPU cores and bytes of memory."""

    cores: float = 0.1
    memory_bytes: int = 64 << 20


@dataclass(frozen=True)
class Capacity:
    """The resources that a host has for machines: CPU cores, and memory in bytes.

    `rack`: hosts with the same rack can fail together, for example by losing power; "" if unknown.
    """

    cores: float
    memory_bytes: int
    rack: str = ""


@dataclass(eq=False)
class Host:
    """State of one host of a `Placement`. Times are in seconds of the caller's clock.

    - `cores`, `memory_bytes`: reserved for its machines
    - `pressure`: load that the host reports, from 0 to 1
    - `queued_s`: expected duration of its batches that have not started
    - `is_suspect`: no heartbeat for some time; `is_too_slow`: its batches are also tried on other hosts
    - `uploads`: snapshot copies that it is sending
    - `slowness`: measured durations relative to expected ones
    - `batches`, `snapshots`: ids of the batches and snapshots on it
    - `entry`: number of its current heap entry in `Hosts`
    """

    name: str
    capacity: Capacity
    last_heartbeat_s: float
    cores: float = 0.0
    memory_bytes: int = 0
    pressure: float = 0.0
    queued_s: float = 0.0
    is_suspect: bool = False
    is_too_slow: bool = False
    uploads: int = 0
    slowness: float = 1.0
    batches: set[int] = field(default_factory=set)
    snapshots: set[str] = field(default_factory=set)
    entry: int = 0

    def free_slots(self, need: Need) -> int:
        """Return how many more machines with this need fit."""
        if self.pressure >= 1.0:
            return 0
        by_cores = (self.capacity.cores - self.cores) / need.cores + 1e-6
        by_memory = (self.capacity.memory_bytes - self.memory_bytes) // need.memory_bytes
        return max(0, min(int(by_cores), by_memory))

    @property
    def fullness(self) -> float:
        """The fraction of the host in use, from 0 to 1: the larger of the reserved share of its resources and the load
        that it reports."""
        taken = self.cores / self.capacity.cores, self.memory_bytes / self.capacity.memory_bytes
        return max(*taken, self.pressure)

    def take(self, n: int, need: Need) -> None:
        """Reserve resources for n machines; a negative n frees them."""
        self.cores = max(0.0, self.cores + n * need.cores)
        self.memory_bytes += n * need.memory_bytes


class SnapshotHosts:
    """The hosts that have one snapshot, and the time since which each has it.

    `need`: resources of one machine of the snapshot. `copyable`: whether other hosts can get the snapshot.
    """

    def __init__(self, need: Need, *, copyable: bool) -> None:
        self.need, self.copyable = need, copyable
        self.since_s: dict[str, float] = {}
        self.confirmed: set[str] = set()  # hosts that have proven it
        self._copying_from: dict[str, Host] = {}  # host of an incoming copy: its source
        self._hosts: list[Host] = []
        self._index: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._hosts)

    def add(self, host: Host, since_s: float, *, source: Host | None = None) -> None:
        """Record that the host has the snapshot from the time `since_s` on; the earlier time counts if it is recorded
        already.

        `source`: the host that sends it the snapshot; None if no copy is needed.
        """
        if source is not None:
            self._copying_from[host.name] = source
            source.uploads += 1
        if host.name not in self._index:
            self._index[host.name] = len(self._hosts)
            self._hosts.append(host)
        self.since_s[host.name] = min(since_s, self.since_s.get(host.name, since_s))

    def confirm(self, name: str) -> None:
        """Record that the host certainly has the snapshot, since it has forked machines from it. `name`: the host's
        name."""
        if name in self.since_s:
            self.confirmed.add(name)
            self._arrived(name)

    def _arrived(self, name: str) -> None:
        source = self._copying_from.pop(name, None)
        if source is not None:
            source.uploads -= 1

    def drop(self, name: str) -> None:
        """Record that the host of this name no longer has the snapshot."""
        self._arrived(name)
        at = self._index.pop(name, None)
        if at is not None:
            last = self._hosts.pop()
            if last.name != name:
                self._hosts[at] = last
                self._index[last.name] = at
            del self.since_s[name]
            self.confirmed.discard(name)

    def sample(self, rng: random.Random, n: int) -> list[Host]:
        """Return n random hosts that have the snapshot; one may appear twice. Return all if there are at most n."""
        if len(self._hosts) <= n:
            return list(self._hosts)
        return [self._hosts[int(rng.random() * len(self._hosts))] for _ in range(n)]


class Hosts:
    """All hosts that are not lost, by name, in the order of their last heartbeats.

    >>> hosts = Hosts()
    >>> for name, cores in (("a", 4), ("b", 8)):
    ...     hosts.add(Host(name, Capacity(cores, 1 << 30), last_heartbeat_s=0.0))
    >>> hosts["a"].take(10, Need()); hosts.reindex(hosts["a"])
    >>> [host.name for host in hosts.emptiest(2)]
    ['b', 'a']
    """

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, Host] = OrderedDict()  # longest silent first
        self._list: list[Host] = []
        self._heap: list[tuple[float, int, Host]] = []
        self._entries = 0

    def __len__(self) -> int:
        return len(self._list)

    def __iter__(self) -> Iterator[Host]:
        return iter(self._list)

    def __getitem__(self, name: str) -> Host:
        return self._by_name[name]

    def get(self, name: str) -> Host | None:
        """Return the host of this name, or None if it is lost or never joined."""
        return self._by_name.get(name)

    def add(self, host: Host) -> None:
        """Add a host."""
        self._by_name[host.name] = host
        self._list.append(host)
        self.reindex(host)

    def remove(self, host: Host) -> None:
        """Remove a lost host."""
        del self._by_name[host.name]
        self._list.remove(host)
        host.entry = -1

    def heartbeat(self, host: Host, now_s: float) -> None:
        """Record that the host sent a heartbeat at `now_s`."""
        host.last_heartbeat_s, host.is_suspect = now_s, False
        self._by_name.move_to_end(host.name)

    def silent_since(self, since_s: float) -> list[Host]:
        """Return the hosts whose last heartbeat was before the time `since_s`."""
        found = []
        for host in self._by_name.values():
            if host.last_heartbeat_s >= since_s:
                break
            found.append(host)
        return found

    def reindex(self, host: Host) -> None:
        """Update the heap after a host's fullness has changed."""
        self._entries += 1
        host.entry = self._entries
        heapq.heappush(self._heap, (host.fullness, self._entries, host))
        if len(self._heap) > 8 * len(self._list) + 64:
            self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
            heapq.heapify(self._heap)

    def emptiest(self, n: int) -> list[Host]:
        """Return up to n hosts, the least full first."""
        top: list[tuple[float, int, Host]] = []
        while self._heap and len(top) < n:
            entry = heapq.heappop(self._heap)
            if entry[2].entry == entry[1]:
                top.append(entry)
        for entry in top:
            heapq.heappush(self._heap, entry)
        return [host for _, _, host in top]

    def sample(self, rng: random.Random, n: int) -> list[Host]:
        """Return n random hosts, or all if there are not more."""
        return [self._list[int(rng.random() * len(self._list))] for _ in range(n if self._list else 0)]
