"""Decide which hosts fork which machines, track what happens, and repeat what is late or lost.

A request for n machines is split into *groups* of at most `batch` machines. Each group runs on one host. A *batch* is
one attempt to start a group on a host. An overdue batch is also tried on another host. The first batch that starts wins
the group; for any other, `Placement.started` returns False and its machines are closed. So no work is done twice. When
a host turns out to be slow, all batches that have not started there are overdue at once.

A host may run machines only during its *lease*, which each answered heartbeat renews. When the lease expires, the host
kills its machines itself (`Lease`). Its machines count as lost here `margin_s` later, and their groups can be placed
again. A lost host that comes back starts without machines.

`Placement` is pure and seeded: the caller passes the time and sends the batches to the hosts. The module `choice`
selects the host of a batch.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from etude.environments.burst.choice import Choice, Chooser, Costs
from etude.environments.burst.hosts import Capacity, Host, Hosts, Need, SnapshotHosts
from etude.errors import MachineError

_MAX_ATTEMPTS = 3  # parallel attempts at one group
_SPARE_ATTEMPTS = 64  # parallel attempts in total, plus one for ten batches that have not started


@dataclass(frozen=True)
class Batch:
    """An order to one host to fork n machines of a snapshot: one attempt to start a group.

    - `id`, `group`: numbers of this batch and of its group; `attempt`: counts from 1 within the group
    - `snapshot`, `host`: the snapshot's id and the host's name
    - `n`: number of machines; `need`: resources of each
    - `sources`: hosts to copy the snapshot from, tried in turn; empty if the host has it
    - `there_s`: the time at which the host should have the snapshot, by the caller's clock
    """

    id: int
    group: int
    attempt: int
    snapshot: str
    host: str
    n: int
    need: Need
    sources: tuple[str, ...]
    there_s: float


@dataclass(frozen=True)
class Review:
    """The result of `Placement.review`, which the caller must act upon.

    `batches`: new attempts, to be sent to their hosts. `lost`: batches that had started on a lost host; their `n` is
    the number of machines that had not ended. `hosts`: names of the hosts that were lost now.
    """

    batches: tuple[Batch, ...] = ()
    lost: tuple[Batch, ...] = ()
    hosts: tuple[str, ...] = ()


class Lease:
    """The lease of one host, kept on that host. When it has expired, the host must kill its machines.

    `lease_s`: its length in seconds. Times are in seconds of one clock.

    >>> lease = Lease(10.0, now_s=0.0)
    >>> lease.answered(sent_s=4.0)
    >>> lease.is_over(13.9), lease.is_over(14.0)
    (False, True)
    """

    def __init__(self, lease_s: float, *, now_s: float) -> None:
        self._lease_s, self.ends_s = lease_s, now_s + lease_s

    def answered(self, *, sent_s: float) -> None:
        """Renew the lease: the heartbeat that was sent at `sent_s` was answered. The lease counts from the time of
        sending."""
        self.ends_s = max(self.ends_s, sent_s + self._lease_s)

    def is_over(self, now_s: float) -> bool:
        """Return whether the lease has expired, so that no machine may run here any more."""
        return now_s >= self.ends_s


@dataclass(frozen=True)
class _Pending:
    """A batch that has not started; seconds by the costs alone."""

    work_s: float  # this batch
    base_s: float  # from the snapshot's arrival: earlier batches and this one


@dataclass
class _Group:
    snapshot: str
    n: int  # machines still wanted
    attempts: int = 0
    won: int | None = None  # the batch that started first
    open: set[int] = field(default_factory=set)  # batches that have not ended


class Placement:
    """The state of all hosts, snapshots and batches, and the decisions about them.

    - `seed`: the seed for the random choice of hosts
    - `costs`: expected durations
    - `batch`: the largest number of machines of one group
    - `lease_s`: how long a host may run machines after its last answered heartbeat
    - `margin_s`: how many seconds after the end of the lease the host's machines count as lost
    - `suspect_s`: a host without a heartbeat for this long gets no new batches
    - `patience`, `grace_s`: a batch is overdue after `patience` times its expected wait plus `grace_s`

    All times are in seconds. The caller passes the current time as `now_s`.

    >>> placement = Placement(seed=1)
    >>> for name in ("a", "b"):
    ...     placement.join(name, Capacity(cores=2, memory_bytes=1 << 30), 0.0)
    >>> placement.add_snapshot("tree", "a", 0.0)
    >>> [(batch.host, batch.n, batch.sources) for batch in placement.place("tree", 12, 0.0)]
    [('a', 12, ())]
    >>> [(batch.host, batch.n, batch.sources) for batch in placement.place("tree", 12, 0.0)]  # 4 more would fit on a
    [('b', 12, ('a',))]
    >>> placement.place("tree", 12, 0.0)  # all of them or none
    []
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        costs: Costs | None = None,
        batch: int = 64,
        lease_s: float = 10.0,
        margin_s: float = 1.0,
        suspect_s: float = 1.5,
        patience: float = 2.0,
        grace_s: float = 0.25,
    ) -> None:
        self._costs, self._batch = costs if costs is not None else Costs(), batch
        self._lost_s, self._suspect_s = lease_s + margin_s, suspect_s
        self._patience, self._grace_s = patience, grace_s
        self.hosts = Hosts()
        self._chooser = Chooser(self.hosts, self._costs, seed=seed, suspect_s=suspect_s, short_s=grace_s)
        self._copies: dict[str, SnapshotHosts] = {}
        self._batches: dict[int, Batch] = {}
        self._open_machines: dict[int, int] = {}  # machines of a batch that have not ended
        self._pending: dict[int, _Pending] = {}  # batches that have not started
        self._groups: dict[int, _Group] = {}
        self._due: list[tuple[float, int]] = []
        self._late: deque[int] = deque()  # batches that are overdue
        self._parallel: set[int] = set()  # parallel attempts that have not started
        self._unplaced: deque[int] = deque()  # groups that wait for free slots
        self._gone: set[str] = set()  # snapshots of overdue groups that no host has
        self._ids = 0

    # hosts and snapshots

    def join(self, name: str, capacity: Capacity, now_s: float) -> None:
        """Add the host `name`, which runs no machines yet. `now_s` is the current time in seconds. Raises `ValueError`
        if a host of this name has joined and is not lost."""
        if self.hosts.get(name) is not None:
            raise ValueError(f"host {name!r} has joined already")
        self.hosts.add(Host(name, capacity, now_s))

    def heartbeat(self, name: str, now_s: float, *, pressure: float = 0.0) -> bool:
        """Record a heartbeat of the host `name`, with its load `pressure` from 0 to 1.

        Returns False if the host counts as lost: it must kill its machines and join again.
        """
        host = self.hosts.get(name)
        if host is None:
            return False
        self.hosts.heartbeat(host, now_s)
        self._chooser.heartbeat(host)
        if host.pressure != pressure:
            host.pressure = pressure
            self.hosts.reindex(host)
        return True

    def add_snapshot(
        self, snapshot: str, name: str, now_s: float, *, need: Need | None = None, copyable: bool = True
    ) -> None:
        """Record that the host `name` has a snapshot.

        `need`: resources of one machine of the snapshot. `copyable`: whether other hosts can get it. Both are taken
        from the first report of a snapshot only. Does nothing if the host is lost.
        """
        host = self.hosts.get(name)
        if host is not None:
            copies = self._copies.setdefault(
                snapshot, SnapshotHosts(need if need is not None else Need(), copyable=copyable)
            )
            copies.add(host, now_s)
            copies.confirm(name)
            host.snapshots.add(snapshot)

    def remove_snapshot(self, snapshot: str, name: str) -> None:
        """Record that the host `name` no longer has a snapshot."""
        if snapshot in self._copies:
            self._copies[snapshot].drop(name)
            if not self._copies[snapshot]:
                del self._copies[snapshot]
        host = self.hosts.get(name)
        if host is not None:
            host.snapshots.discard(snapshot)

    def hosts_with(self, snapshot: str) -> tuple[str, ...]:
        """Return the names of the hosts that have a snapshot, or will have it once copies in progress have arrived."""
        return tuple(self._copies[snapshot].since_s) if snapshot in self._copies else ()

    def choose_homes(self, n: int) -> list[str]:
        """Return the names of up to n of the emptiest hosts, on which a new snapshot is to be prepared. If possible, no
        two of them are in one rack."""
        emptiest = [host for host in self.hosts.emptiest(4 * n) if host.free_slots(Need())]
        first = {host.capacity.rack or host.name: host for host in reversed(emptiest)}
        spread = sorted(first.values(), key=lambda host: host.fullness)
        return [host.name for host in dict.fromkeys([*spread, *emptiest])][:n]

    # batches

    def place(self, snapshot: str, n: int, now_s: float) -> list[Batch]:
        """Place n machines of a snapshot on hosts; return the batches to send to them.

        Groups have at most `batch` machines, and fewer only if no host has enough free slots. Returns [] if not all n
        machines can be placed now. Raises `MachineError` if no host has the snapshot.
        """
        copies = self._copies.get(snapshot)
        if not copies:
            raise MachineError(f"no host has snapshot {snapshot!r}", hint="prepare it on one of `choose_homes`")
        placed: list[Batch] = []
        left = n
        while left > 0:
            wanted = min(left, self._batch)
            choice = self._chooser.choose(copies, wanted, now_s)
            if choice is None:
                for one in placed:
                    self.ended(one.id, one.n)
                return []
            size = min(wanted, choice.host.free_slots(copies.need))
            self._ids += 1
            self._groups[self._ids] = _Group(snapshot, size)
            placed.append(self._assign(self._ids, choice, now_s))
            left -= size
        return placed

    def started(self, batch_id: int, now_s: float) -> bool:
        """Record at the time `now_s` that a host has forked the machines of a batch. Returns whether they are still
        wanted.

        If not, because another batch of the group started first or the group was cancelled, the caller must close the
        machines and call `ended`.
        """
        batch = self._batches.get(batch_id)
        if batch is None:
            return False
        group = self._groups.get(batch.group)
        if group is not None and group.won == batch_id:
            return True  # reported twice
        if batch_id not in self._pending:
            return False
        host, copies, pending = self.hosts[batch.host], self._copies.get(batch.snapshot), self._unqueue(batch)
        if not batch.sources and pending is not None:  # no copy was waited for
            self._chooser.record_start(host, pending.base_s, now_s - batch.there_s)
        if copies is not None:
            copies.confirm(batch.host)
        if group is None or group.won is not None:
            return False
        group.won = batch_id
        return True

    def ended(self, batch_id: int, n: int = 1) -> None:
        """Record that n machines of a batch are closed, or will never exist."""
        batch = self._batches.get(batch_id)
        if batch is None:
            return
        group = self._groups.get(batch.group)
        if group is not None and group.won in (batch_id, None):
            group.n -= n
            if group.n <= 0:
                del self._groups[batch.group]
        self._resize(batch, self._open_machines[batch_id] - n)

    def failed(self, batch_id: int, now_s: float) -> Batch | None:
        """Record at the time `now_s` that a host could not fork a batch. Returns the next attempt, on another host if
        possible.

        Returns None if another attempt is in progress, or if no host has enough free slots; then a later `review`
        returns it.
        """
        batch = self._batches.get(batch_id)
        if batch is None:
            return None
        self._chooser.record_delay(self.hosts[batch.host])
        self._resize(batch, 0)
        return self._retry(batch.group, now_s, avoid=(batch.host,))

    def review(self, now_s: float) -> Review:
        """Check which hosts are lost and which batches are overdue at `now_s`. Call this a few times a second.

        Returns new attempts for batches that are overdue or had not started on a lost host. Batches that had started
        there are in `Review.lost`: pass them to `retry`, or ignore them.
        """
        self._chooser.update_median()
        silent = self.hosts.silent_since(now_s - self._lost_s)
        lost = [batch for host in silent for batch in self._lose(host)]
        wanted = list(dict.fromkeys(self._unplaced))
        self._unplaced.clear()
        new = [self._retry(group, now_s) for group in wanted]
        for host in self.hosts.silent_since(now_s - self._suspect_s):
            if not host.is_suspect:
                host.is_suspect = True
                self._mark_all_late(host)
        while self._due and self._due[0][0] <= now_s:
            batch_id = heapq.heappop(self._due)[1]
            if batch_id in self._pending:
                due_s = self._due_s(self._batches[batch_id])
                if due_s > now_s:  # all hosts turned out slower than expected
                    heapq.heappush(self._due, (due_s, batch_id))
                else:
                    self._late.append(batch_id)
        while self._late:
            new.append(self._handle_late(self._late.popleft(), now_s))
        return Review(tuple(one for one in new if one), tuple(lost), tuple(host.name for host in silent))

    def _due_s(self, batch: Batch) -> float:
        """When a batch is overdue, by what is known now of its host and of all hosts."""
        wait_s = self._chooser.wait_s(self.hosts[batch.host], self._pending[batch.id].base_s)
        return batch.there_s + self._patience * wait_s + self._grace_s

    def _handle_late(self, batch_id: int, now_s: float) -> Batch | None:
        """Lower the rating of the copy or the host that delays a batch, and try the batch on another host as well."""
        batch = self._batches.get(batch_id)
        group = self._groups.get(batch.group) if batch is not None else None
        if batch is None or group is None or group.won is not None:
            return None
        copies, host = self._copies.get(batch.snapshot), self.hosts[batch.host]
        if copies is not None and batch.host not in copies.confirmed:
            self.remove_snapshot(batch.snapshot, batch.host)  # the copy has not arrived
        elif not (host.is_suspect or host.is_too_slow):
            self._chooser.record_delay(host)
            if self._chooser.is_slow(host):
                host.is_too_slow = True
                self._mark_all_late(host)
        return self._retry_in_parallel(batch, group, now_s)

    def _mark_all_late(self, host: Host) -> None:
        self._late += sorted(self._pending.keys() & host.batches)

    def retry(self, lost: Batch, now_s: float) -> Batch | None:
        """Return a new attempt to start a group whose machines were lost. `lost`: the batch from `Review.lost`.

        Returns None if no host has enough free slots; then a later `review` returns it.
        """
        self._groups[lost.group] = _Group(lost.snapshot, lost.n, attempts=lost.attempt)
        return self._retry(lost.group, now_s)

    def cancel(self, group_id: int) -> None:
        """Cancel a group: `started` returns False for its batches that start later."""
        self._groups.pop(group_id, None)

    def rivals(self, batch_id: int) -> list[Batch]:
        """Return the other batches of a batch's group that have not ended. Close them when the batch has started."""
        group = self._groups.get(self._batches[batch_id].group) if batch_id in self._batches else None
        return [self._batches[other] for other in sorted(group.open) if other != batch_id] if group else []

    @property
    def missing(self) -> set[str]:
        """Ids of the snapshots that groups wait for and no host has. Prepare them again."""
        waiting = {self._groups[group].snapshot for group in self._unplaced if group in self._groups}
        self._gone = {snapshot for snapshot in self._gone | waiting if not self._copies.get(snapshot)}
        return set(self._gone)

    @property
    def waiting(self) -> int:
        """The number of machines whose batch was lost and that have no new host yet."""
        return sum(self._groups[group].n for group in self._unplaced if group in self._groups)

    # internals

    def _retry(self, group_id: int, now_s: float, *, avoid: Sequence[str] = ()) -> Batch | None:
        """The next attempt at a group without one. The group is not split; it waits if no host has enough free
        slots."""
        group = self._groups.get(group_id)
        if group is None or group.open:
            return None
        copies = self._copies.get(group.snapshot)
        choice = self._chooser.choose(copies, group.n, now_s, avoid=avoid) if copies else None
        if choice is None or copies is None or choice.host.free_slots(copies.need) < group.n:
            self._unplaced.append(group_id)
            return None
        return self._assign(group_id, choice, now_s)

    def _retry_in_parallel(self, batch: Batch, group: _Group, now_s: float) -> Batch | None:
        copies = self._copies.get(group.snapshot)
        choice = None
        max_parallel = _SPARE_ATTEMPTS + len(self._pending) // 10  # overloaded hosts do not get even more work
        if copies and len(group.open) < _MAX_ATTEMPTS and len(self._parallel) < max_parallel:
            tried = [self._batches[other].host for other in group.open]
            choice = self._chooser.choose(copies, group.n, now_s, avoid=tried)
            if choice is not None and (choice.host.name in tried or choice.host.free_slots(copies.need) < group.n):
                choice = None
        if not copies:
            self._gone.add(group.snapshot)
        heapq.heappush(self._due, (now_s + 4 * self._grace_s, batch.id))
        if choice is None:
            return None
        further = self._assign(batch.group, choice, now_s)
        self._parallel.add(further.id)
        return further

    def _assign(self, group_id: int, choice: Choice, now_s: float) -> Batch:
        group, host = self._groups[group_id], choice.host
        copies = self._copies[group.snapshot]
        if choice.sources:
            copies.add(host, choice.there_s, source=choice.sources[0])
            host.snapshots.add(group.snapshot)
        there_s = max(now_s, choice.there_s)
        work_s = self._costs.work_s(group.n)
        self._ids += 1
        group.attempts += 1
        batch = Batch(
            id=self._ids,
            group=group_id,
            attempt=group.attempts,
            snapshot=group.snapshot,
            host=host.name,
            n=group.n,
            need=copies.need,
            sources=tuple(source.name for source in choice.sources),
            there_s=there_s,
        )
        group.open.add(batch.id)
        self._pending[batch.id] = _Pending(work_s, host.queued_s + work_s)
        host.queued_s += work_s
        self._batches[batch.id], self._open_machines[batch.id] = batch, batch.n
        host.batches.add(batch.id)
        host.take(batch.n, copies.need)
        self.hosts.reindex(host)
        heapq.heappush(self._due, (self._due_s(batch), batch.id))
        return batch

    def _resize(self, batch: Batch, left: int) -> None:
        host = self.hosts[batch.host]
        host.take(max(0, left) - self._open_machines[batch.id], batch.need)
        self._open_machines[batch.id] = left
        if left <= 0:
            self._forget(batch, host)
        self.hosts.reindex(host)

    def _unqueue(self, batch: Batch) -> _Pending | None:
        host, pending = self.hosts.get(batch.host), self._pending.pop(batch.id, None)
        self._parallel.discard(batch.id)
        if host is not None and pending is not None:
            host.queued_s = max(0.0, host.queued_s - pending.work_s)
        return pending

    def _forget(self, batch: Batch, host: Host) -> None:
        del self._batches[batch.id], self._open_machines[batch.id]
        self._unqueue(batch)
        host.batches.discard(batch.id)
        group = self._groups.get(batch.group)
        if group is not None:
            group.open.discard(batch.id)

    def _lose(self, host: Host) -> list[Batch]:
        """Forget a lost host. Returns the batches that were lost with it, of those that had won their group."""
        self.hosts.remove(host)
        for snapshot in host.snapshots:
            self._copies[snapshot].drop(host.name)
        lost = []
        for batch_id in sorted(host.batches):
            batch = self._batches[batch_id]
            group = self._groups.get(batch.group)
            left = self._open_machines[batch_id]
            self._forget(batch, host)
            if group is not None and group.won == batch_id:
                del self._groups[batch.group]
                lost.append(dataclasses.replace(batch, n=left))
            elif group is not None and group.won is None:
                self._unplaced.append(batch.group)
        return lost
