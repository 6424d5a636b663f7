"""What a fleet would do: the real `Placement` against fake hosts, in simulated time, with failures.

The costs of a host are measured (`benchmarks.fleet.costs`); the network and the failures are assumed and named in the
result. The control plane is one process whose every message costs time. All machines are asked for at the beginning;
machines live for an exponential time, and for each that ends another is asked for. Counted: when machines were ready,
what was never ready (lost), what had to start anew because its host was lost (restarted), whether two attempts at one
group were ever alive at once (twice), and what hosts run that nobody knows of at the end (leaked).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.fleet.hosts import Clock, FakeHost, Measured, Network
from etude.environments.burst.choice import Costs
from etude.environments.burst.hosts import Capacity, Need
from etude.environments.burst.placement import Batch, Lease, Placement
from etude.errors import MachineError

T = TypeVar("T")
_REVIEW_S = 0.1
_COPIES = 2  # hosts, of two racks, that have a snapshot when it is asked for first


@dataclass(frozen=True)
class Scenario:
    """Who asks for what, of which hosts. A machine uses a tenth of a core on average."""

    machines: int = 100_000
    group: int = 16  # machines of one request
    snapshots: int = 1_000
    snapshot_bytes: int = 16 << 20
    hosts: int = 105
    cores: int = 96
    overcommit: float = 1.15  # cores given away over cores there are
    mean_life_s: float = 60.0
    horizon_s: float = 60.0
    seed: int = 0


@dataclass(frozen=True)
class Faults:
    """What fails: hosts by number. Partitions longer than the lease cost the machines behind them."""

    crashes: tuple[tuple[int, float], ...] = ()  # (host, when)
    slow: tuple[tuple[int, float], ...] = ()  # (host, times slower)
    partitions: tuple[tuple[int, float, float], ...] = ()  # (host, from, to)
    loss: float = 0.0  # share of messages


EVERY_KIND = Faults(
    crashes=((3, 0.5), (40, 15.0)),
    slow=((7, 8.0), (8, 30.0)),
    partitions=((11, 0.3, 2.3), (12, 10.0, 30.0)),
    loss=0.01,
)
"""Within one minute what a fleet of this size sees in weeks."""


@dataclass
class Simulated:
    """What came of it. Times in seconds."""

    all_ready_s: float = float("inf")  # when the last of the first machines was ready
    ready_s: list[float] = field(default_factory=list)  # of each batch of the first machines, from its request on
    later_s: list[float] = field(default_factory=list)  # of those asked for later
    num_asked: int = 0  # machines
    num_lost: int = 0  # never ready, or gone and not replaced at the end
    num_restarted: int = 0  # lost with their host and started again
    num_twice: int = 0
    num_leaked: int = 0
    num_batches: int = 0
    control_cpu_s: float = 0.0  # that the control plane took, in simulated time: what each message was measured to cost
    placement_cpu_s: float = 0.0  # CPU time of this process in the placement code
    calls: dict[str, tuple[int, float]] = field(default_factory=dict)  # of it: (number, seconds) of each kind
    curve: list[tuple[float, int, float, float]] = field(default_factory=list)  # (t, ready, mean, max share of cores)


@dataclass(eq=False)
class _Request:
    n: int
    left: int  # of them were never ready
    snapshot: str
    asked_s: float
    is_first: bool


class _Control:
    """The control plane: carries batches between placement and hosts. One process on one core: it handles one message
    after another, for as long as that and the placement's part of it was measured to take."""

    lease_s = 10.0

    def __init__(self, scenario: Scenario, faults: Faults, measured: Measured, network: Network, speed: float) -> None:
        self.scenario, self.clock, self.network = scenario, Clock(scenario.seed), network
        self.loss, self.result, self.need = faults.loss, Simulated(), Need()
        self.price_s = {
            "_place": measured.place_s,
            "_started": measured.started_s,
            "_closed": measured.ended_s,
        }
        self.message_s, self.measured = measured.message_s, measured
        self.upload_s = scenario.snapshot_bytes / network.bytes_per_s
        self.load_s = scenario.snapshot_bytes * measured.load_s_per_byte
        latency_s = 4 * network.latency_s
        costs = Costs(
            batch_s=measured.batch_s / speed + latency_s,
            fork_s=measured.fork_s / speed,
            copy_s=self.upload_s + self.load_s + latency_s,
            upload_s=self.upload_s,
        )
        self.placement = Placement(seed=scenario.seed, costs=costs, lease_s=self.lease_s)
        self.hosts: dict[str, FakeHost] = {}
        self.inbox: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()  # of hosts
        self.asked: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()  # of clients
        self.is_busy, self.owed_s = False, 0.0  # owed: CPU that what was handled took
        self.waiting: deque[_Request] = deque()  # for room
        self.is_retrying = False
        self.groups: dict[int, _Request] = {}
        self.batches: dict[int, tuple[Batch, str]] = {}  # sent to hosts; "wanted", "accepted", "running" or "closing"
        self.alive: dict[int, tuple[str, int, int]] = {}  # group: host, its life, batch, of machines with clients
        self.down: dict[int, int] = {}  # group: machines that were lost with their host and are not there again
        self.preparing: set[str] = set()
        self.num_ready = 0
        self.first_left = scenario.machines
        for i in range(scenario.hosts):
            self._add_host(f"host{i:03d}", measured, speed)

    def _add_host(self, name: str, measured: Measured, speed: float) -> None:
        host = FakeHost(
            name=name,
            clock=self.clock,
            measured=measured,
            network=self.network,
            lease=Lease(self.lease_s, now_s=0.0),
            lease_s=self.lease_s,
            cores=self.scenario.cores,
            machine_cores=self.need.cores,
            upload_s=self.upload_s,
            load_s=self.load_s,
            tell=self.told,
            peers=self.hosts,
            speed=speed,
            own_factor=self.clock.rng.choice(measured.host_spread),
        )
        self.hosts[name] = host
        self._join(host)
        self.clock.after(self.clock.rng.random() * self.network.heartbeat_s, host.beat)
        self.clock.at(self.lease_s, host.watch)

    def _join(self, host: FakeHost) -> None:
        cores = self.scenario.cores * self.scenario.overcommit
        capacity = Capacity(cores, 768 << 30, rack=f"rack{int(host.name[4:]) // 12}")
        self.placement.join(host.name, capacity, self.clock.now_s)
        for snapshot in host.snapshots:
            self.placement.add_snapshot(snapshot, host.name, self.clock.now_s, need=self.need)

    # messages

    def _delay_s(self) -> float:
        return self.clock.rng.expovariate(1 / self.network.latency_s)

    def _arrives(self, host: FakeHost) -> bool:
        return not (host.crashed or host.cut_off) and self.clock.rng.random() >= self.loss

    def told(self, what: str, host: FakeHost, *arguments: Any) -> None:
        """A message of a host, which is handled when those before it are."""
        if self._arrives(host):
            self.clock.after(self._delay_s(), self._queue, getattr(self, f"_{what}"), host, *arguments)

    def _queue(self, handle: Callable[..., Any], *arguments: Any) -> None:
        """What hosts say comes before what clients ask: otherwise a burst of requests hides that hosts have long
        started, and they look late."""
        (self.asked if handle == self._place else self.inbox).append((handle, arguments))
        if not self.is_busy:
            self._next()

    def _next(self) -> None:
        self.is_busy = bool(self.inbox or self.asked)
        if self.is_busy:
            handle, arguments = (self.inbox or self.asked).popleft()
            self._pay(self.message_s + self.price_s.get(handle.__name__, 0.0))
            owed_s, self.owed_s = self.owed_s, 0.0
            self.clock.after(owed_s, self._handle, handle, arguments)

    def _handle(self, handle: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        handle(*arguments)
        self._next()

    def _pay(self, cpu_s: float) -> None:
        self.owed_s += cpu_s
        self.result.control_cpu_s += cpu_s

    def _send(self, host: FakeHost, do: Callable[..., None], *arguments: Any) -> None:
        if self._arrives(host):
            self.clock.after(self._delay_s(), self._receive, host, do, arguments)

    def _receive(self, host: FakeHost, do: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not (host.crashed or host.cut_off):
            do(*arguments)

    def _timed(self, do: Callable[..., T], *arguments: Any) -> T:
        before = time.thread_time()
        try:
            return do(*arguments)
        finally:
            took_s = time.thread_time() - before
            self.result.placement_cpu_s += took_s
            number, sum_s = self.result.calls.get(do.__name__, (0, 0.0))
            self.result.calls[do.__name__] = number + 1, sum_s + took_s

    # requests

    def ask(self, request: _Request) -> None:
        """Machines are asked for."""
        self.result.num_asked += request.n
        self._queue(self._place, request)

    def _place(self, request: _Request) -> bool:
        """Place a request; one that finds no room waits, and is placed before those that come later."""
        batches = []
        try:
            batches = self._timed(self.placement.place, request.snapshot, request.n, self.clock.now_s)
        except MachineError:
            self._prepare(request.snapshot)
        if not batches:
            self.waiting.append(request)
        for batch in batches:
            self.groups[batch.group] = request
            self._order(batch)
        return bool(batches)

    def _retry(self) -> None:
        """There may be room: for those that wait, one after another, until one does not fit."""
        self.is_retrying = False
        for _ in range(len(self.waiting)):
            request = self.waiting.popleft()
            self._pay(self.measured.place_s)
            if not self._place(request):
                self.waiting.rotate(1)
                return

    def _room(self) -> None:
        if self.waiting and not self.is_retrying:
            self.is_retrying = True
            self._queue(self._retry)

    def _prepare(self, snapshot: str) -> None:
        """From what it was made of, on one host, as a fleet does when the last copy is lost."""
        homes = self.placement.choose_homes(1)
        if homes and snapshot not in self.preparing:
            self.preparing.add(snapshot)
            self.clock.after(2 * (self.upload_s + self.load_s), self._prepared, snapshot, homes[0])

    def _prepared(self, snapshot: str, name: str) -> None:
        self.preparing.discard(snapshot)
        host = self.hosts[name]
        if not host.crashed and not host.cut_off:
            host.arrived(snapshot)
            self.placement.add_snapshot(snapshot, name, self.clock.now_s, need=self.need)

    def _order(self, batch: Batch) -> None:
        self.result.num_batches += 1
        self.batches[batch.id] = (batch, "wanted")
        self._command(batch, 1)

    def _command(self, batch: Batch, times: int) -> None:
        """Tell the host, until it says that it has heard. It answers a repeated command from its record."""
        if self.batches.get(batch.id, (batch, ""))[1] == "wanted" and times <= 4:
            host = self.hosts[batch.host]
            self._send(host, host.fork, batch)
            self.clock.after(self.network.again_s, self._command, batch, times + 1)

    def _accepted(self, host: FakeHost, batch_id: int) -> None:
        if batch_id in self.batches and self.batches[batch_id][1] == "wanted":
            self.batches[batch_id] = (self.batches[batch_id][0], "accepted")

    # what hosts say

    def _started(self, host: FakeHost, batch_id: int) -> None:
        if batch_id not in self.batches:  # of a host that was lost, or closed already
            self._send(host, host.close, batch_id)
            return
        batch, state = self.batches[batch_id]
        if state == "closing":
            return
        won = self._timed(self.placement.started, batch_id, self.clock.now_s)
        self._send(host, host.known, batch_id)
        if not won:
            self._end(batch)
        elif state != "running":
            self.batches[batch_id] = (batch, "running")
            self._check_alone(batch, host)
            for rival in self.placement.rivals(batch_id):
                self._end(rival)
            self._ready(batch)

    def _check_alone(self, batch: Batch, host: FakeHost) -> None:
        """Another attempt of this group that still runs somewhere, where a client had it, would be a second run."""
        before = self.alive.get(batch.group)
        if before is not None:
            other, life, number = before
            was = self.hosts[other]
            if not was.crashed and was.life == life and number in was.running:
                self.result.num_twice += 1
        self.alive[batch.group] = (host.name, host.life, batch.id)

    def _ready(self, batch: Batch) -> None:
        self.num_ready += batch.n
        if batch.group in self.down:
            del self.down[batch.group]
            self.result.num_restarted += batch.n
        else:
            request = self.groups[batch.group]
            request.left -= batch.n
            waited_s = self.clock.now_s + self._delay_s() - request.asked_s
            (self.result.ready_s if request.is_first else self.result.later_s).append(waited_s)
            self.first_left -= batch.n if request.is_first else 0
            if self.first_left <= 0:
                self.result.all_ready_s = min(self.result.all_ready_s, self.clock.now_s)
        self.clock.after(self.clock.rng.expovariate(1 / self.scenario.mean_life_s), self._done, batch)

    def _done(self, batch: Batch) -> None:
        """The clients of a batch's machines are done with them; others want some."""
        if self.batches.get(batch.id, (batch, ""))[1] == "running":
            self.num_ready -= batch.n
            self._end(batch)
            if self.clock.now_s < self.scenario.horizon_s - 15.0:
                snapshot = f"tree{int(self.clock.rng.random() * self.scenario.snapshots)}"
                self.ask(_Request(batch.n, batch.n, snapshot, self.clock.now_s, is_first=False))

    def _end(self, batch: Batch) -> None:
        """Have a batch closed; asked for again until the host says so, or is lost."""
        if batch.id in self.batches and self.batches[batch.id][1] != "closing":
            self.batches[batch.id] = (batch, "closing")
            self._close(batch)

    def _close(self, batch: Batch) -> None:
        if batch.id in self.batches:
            host = self.hosts[batch.host]
            self._send(host, host.close, batch.id)
            self.clock.after(self.network.again_s, self._close, batch)

    def _closed(self, host: FakeHost, batch_id: int) -> None:
        batch, _ = self.batches.pop(batch_id, (None, ""))
        if batch is not None:
            self._timed(self.placement.ended, batch_id, batch.n)
            self._room()

    def _uncopied(self, host: FakeHost, snapshot: str, batches: Sequence[int]) -> None:
        self.placement.remove_snapshot(snapshot, host.name)
        for batch_id in batches:
            if self.batches.pop(batch_id, None) is not None:
                new = self._timed(self.placement.failed, batch_id, self.clock.now_s)
                self._pay(self.measured.place_s)
                if new is not None:
                    self._order(new)

    def _heartbeat(self, host: FakeHost, sent_s: float) -> None:
        if self.placement.heartbeat(host.name, self.clock.now_s):
            self._send(host, host.answered, sent_s)
        else:
            self._send(host, self._renew, host)

    def _renew(self, host: FakeHost) -> None:
        if self.placement.hosts.get(host.name) is None:
            host.renew(self.clock.now_s)
            self._join(host)

    def review(self) -> None:
        """The look at the clock that placement asks for."""
        review = self._timed(self.placement.review, self.clock.now_s)
        for name in review.hosts:
            for batch_id in [i for i, (batch, _) in self.batches.items() if batch.host == name]:
                del self.batches[batch_id]
        again = [self._timed(self.placement.retry, batch, self.clock.now_s) for batch in review.lost]
        for batch in review.lost:
            self.num_ready -= batch.n
            self.down[batch.group] = batch.n
        self._pay(self.measured.review_s)
        for new in (*review.batches, *again):
            if new is not None:
                self._pay(self.measured.place_s)
                self._order(new)
        for snapshot in self.placement.missing:
            self._prepare(snapshot)
        self._room()
        shares = [host.cores / self.scenario.cores for host in self.placement.hosts]
        mean, most = sum(shares) / max(1, len(shares)), max(shares, default=0.0)
        self.result.curve.append((self.clock.now_s, self.num_ready, mean, most))
        self.clock.after(_REVIEW_S, self.review)

    def finish(self) -> Simulated:
        """Count what is wrong at the end."""
        requests = {id(request): request for request in (*self.groups.values(), *self.waiting)}.values()
        self.result.num_lost = sum(request.left for request in requests) + sum(self.down.values())
        for host in self.hosts.values():
            for batch_id in host.running:
                if not host.crashed and batch_id not in self.batches:
                    self.result.num_leaked += host.running[batch_id]
        return self.result


def simulate(
    scenario: Scenario | None = None,
    *,
    faults: Faults | None = None,
    measured: Measured | None = None,
    network: Network | None = None,
    speed: float = 1.0,
) -> Simulated:
    """Run a scenario. The same arguments have the same result, but for `placement_cpu_s`. `speed`: how many times
    faster a host forks than the machine that was measured."""
    scenario = scenario if scenario is not None else Scenario()
    faults = faults if faults is not None else Faults()
    control = _Control(scenario, faults, measured or Measured(), network or Network(), speed)
    clock, hosts = control.clock, list(control.hosts.values())
    for i in range(scenario.snapshots):
        for k in range(min(_COPIES, len(hosts))):
            host = hosts[(i + k * (1 + len(hosts) // 2)) % len(hosts)]
            host.snapshots.add(f"tree{i}")
            control.placement.add_snapshot(f"tree{i}", host.name, 0.0, need=control.need)
    for number, times in faults.slow:
        hosts[number % len(hosts)].slow = times
    for number, when_s in faults.crashes:
        clock.at(when_s, setattr, hosts[number % len(hosts)], "crashed", True)
    for number, from_s, to_s in faults.partitions:
        clock.at(from_s, setattr, hosts[number % len(hosts)], "cut_off", True)
        clock.at(to_s, setattr, hosts[number % len(hosts)], "cut_off", False)
    left, i = scenario.machines, 0
    while left > 0:
        n = min(left, scenario.group)
        request = _Request(n, n, f"tree{i % scenario.snapshots}", 0.0, is_first=True)
        control.ask(request)
        left, i = left - request.n, i + 1
    control.review()
    clock.run(scenario.horizon_s)
    return control.finish()
