"""Hosts and a network for the simulation: what is simulated is what they cost and how they fail, nothing else.

A fake host forks one batch after another at the speed that was *measured* on one small machine: it is granted no more
cores than that machine had (`speed` says otherwise). It keeps its lease, answers a repeated command from its record,
sends copies of snapshots one at a time, and kills what it runs when its lease is over.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.environments.burst.placement import Batch, Lease

_COPY_LATE_S = 0.25  # after it should be there, the next source is asked


@dataclass(frozen=True)
class Measured:
    """What a host and the control plane cost, in seconds. Made by `costs.measure`; the defaults are typical.

    A batch of n takes ``batch_s + n * (fork_s + crowd_s * alive)``, times one of `host_spread` for the host and one of
    `spread` for the batch, and up to `busy` times longer beside machines that work.

    >>> Measured(batch_s=0.001, fork_s=0.001, crowd_s=1e-6).work_s(16, alive=1000)
    0.033
    """

    batch_s: float = 0.001  # fork of a batch, whatever its size
    fork_s: float = 0.001  # one machine more in it
    crowd_s: float = 0.5e-6  # and that for each machine that is alive already
    busy: float = 2.0  # times longer a fork takes where machines ask for all cores
    close_s: float = 0.0005  # one machine closed
    exec_s: float = 0.001  # ``true``, from call to result
    load_s_per_byte: float = 2e-9  # a tree's bytes into a host's store
    spread: tuple[float, ...] = (0.5, 0.8, 1.0, 1.2, 1.5)  # of a batch's time, mean 1: drawn from, for each
    host_spread: tuple[float, ...] = (0.9, 1.0, 1.1)  # measured over predicted time of whole bursts: for each host
    message_s: float = 50e-6  # CPU of the control plane: one read, handled and answered
    place_s: float = 40e-6  # and in the placement itself: a batch placed
    started_s: float = 20e-6
    ended_s: float = 20e-6
    review_s: float = 200e-6

    def work_s(self, n: int, *, alive: int) -> float:
        """A batch of n on an idle host where so many are alive."""
        return self.batch_s + n * (self.fork_s + self.crowd_s * alive)


@dataclass(frozen=True)
class Network:
    """Assumed, not measured."""

    latency_s: float = 0.000_5  # one way, the mean of what varies
    bytes_per_s: float = 1.25e9  # of each host, one copy at a time
    loss: float = 0.0  # share of messages that never arrive
    heartbeat_s: float = 0.5
    again_s: float = 0.5  # a message without an answer is sent again


class Clock:
    """Simulated time and what is to happen in it."""

    def __init__(self, seed: int) -> None:
        self.now_s, self.rng, self.num_events = 0.0, random.Random(seed), 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when_s: float, do: Callable[..., None], *arguments: Any) -> None:
        """Do something then."""
        self._count += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._count, do, arguments))

    def after(self, delay_s: float, do: Callable[..., None], *arguments: Any) -> None:
        """Do something in so many seconds."""
        self.at(self.now_s + delay_s, do, *arguments)

    def run(self, until_s: float, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Let time pass."""
        while self._heap and self._heap[0][0] <= until_s and not stop():
            self.now_s, _, do, arguments = heapq.heappop(self._heap)
            self.num_events += 1
            do(*arguments)


@dataclass(eq=False)
class FakeHost:
    """A host. `tell` sends a message to the control plane, by the name of what handles it there."""

    name: str
    clock: Clock
    measured: Measured
    network: Network
    lease: Lease
    lease_s: float
    cores: float
    machine_cores: float
    upload_s: float  # a copy, sent
    load_s: float  # and taken in
    tell: Callable[..., None]
    peers: dict[str, FakeHost]
    speed: float = 1.0  # times the machine that was measured
    slow: float = 1.0  # times slower than it should be
    own_factor: float = 1.0  # one of `Measured.host_spread`
    crashed: bool = False
    cut_off: bool = False  # no message comes or goes
    line: deque[Batch] = field(default_factory=deque)  # that it is to fork
    is_forking: bool = False
    closing_s: float = 0.0  # of work on machines that were closed, done before the next fork
    uploading_s: float = 0.0
    running: dict[int, int] = field(default_factory=dict)  # batch: machines of it
    record: dict[int, Batch | None] = field(default_factory=dict)  # commands that came; None: closed
    unanswered: set[int] = field(default_factory=set)  # started, and the control plane has not said that it knows
    snapshots: set[str] = field(default_factory=set)
    expecting: dict[str, list[Batch | FakeHost]] = field(default_factory=dict)  # copies, and who waits for them
    life: int = 0  # counts up when everything in it is killed

    def fork(self, batch: Batch) -> None:
        """A command to fork a batch. A repeated one is answered from the record."""
        self.tell("accepted", self, batch.id)
        if batch.id in self.record:
            return
        self.record[batch.id] = batch
        if batch.snapshot in self.snapshots:
            self._work(batch)
        elif batch.snapshot in self.expecting:
            self.expecting[batch.snapshot].append(batch)
        elif not batch.sources:
            self._uncopied(batch.snapshot, [batch])
        else:
            self.expecting[batch.snapshot] = [batch]
            self._ask(batch, 0, self.life)

    def _ask(self, batch: Batch, number: int, life: int) -> None:
        """Have the snapshot sent; by the next source where one does not send it."""
        if life != self.life or self.crashed or batch.snapshot not in self.expecting:
            return
        if number == len(batch.sources):
            self._uncopied(
                batch.snapshot, [one for one in self.expecting.pop(batch.snapshot) if isinstance(one, Batch)]
            )
            return
        self.clock.after(self.network.latency_s, self.peers[batch.sources[number]].send, batch.snapshot, self)
        late_s = max(self.clock.now_s, batch.there_s) + _COPY_LATE_S
        self.clock.at(late_s, self._ask, batch, number + 1, life)

    def send(self, snapshot: str, to: FakeHost) -> None:
        """Send a copy to another host, once it is here itself."""
        if self.crashed or self.cut_off or to.cut_off:
            return
        if snapshot in self.snapshots:
            self.uploading_s = max(self.uploading_s, self.clock.now_s) + self.upload_s * self.slow
            self.clock.at(self.uploading_s + self.network.latency_s + self.load_s * to.slow, to.arrived, snapshot)
        elif snapshot in self.expecting:
            self.expecting[snapshot].append(to)

    def arrived(self, snapshot: str) -> None:
        """A copy is there."""
        if not self.crashed and snapshot not in self.snapshots:
            self.snapshots.add(snapshot)
            for one in self.expecting.pop(snapshot, []):
                if isinstance(one, Batch):
                    self._work(one)
                else:
                    self.send(snapshot, one)

    def _uncopied(self, snapshot: str, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.record[batch.id] = None
        if batches:
            self.tell("uncopied", self, snapshot, [batch.id for batch in batches])

    def _work(self, batch: Batch) -> None:
        """Fork, when what came before is done."""
        self.line.append(batch)
        if not self.is_forking:
            self._next()

    def _next(self) -> None:
        """The next batch of the line. Machines that are alive make it slower, those that work more than others."""
        self.is_forking = False
        while self.line and not self.is_forking:
            batch = self.line.popleft()
            if self.record.get(batch.id) is not None:  # not closed meanwhile
                self.is_forking = True
                alive = sum(self.running.values())
                cost_s = self.measured.work_s(batch.n, alive=alive) * self._draw(self.measured.spread) * self.own_factor
                cost_s *= 1 + (self.measured.busy - 1) * min(1.0, alive * self.machine_cores / self.cores)
                closing_s, self.closing_s = self.closing_s, 0.0
                self.clock.after((cost_s + closing_s) * self.slow / self.speed, self._forked, batch, self.life)

    def _draw(self, values: Sequence[float]) -> float:
        return values[int(self.clock.rng.random() * len(values))]

    def _forked(self, batch: Batch, life: int) -> None:
        if self.crashed or life != self.life:
            return
        if self.record.get(batch.id) is not None:
            self.running[batch.id] = batch.n
            self.unanswered.add(batch.id)
            self.tell("started", self, batch.id)
        self._next()

    def known(self, batch_id: int) -> None:
        """The control plane knows that the batch has started."""
        self.unanswered.discard(batch_id)

    def close(self, batch_id: int) -> None:
        """Close a batch, or forbid it before it has started. Idempotent."""
        self.closing_s += self.running.pop(batch_id, 0) * self.measured.close_s
        self.unanswered.discard(batch_id)
        self.record[batch_id] = None
        self.tell("closed", self, batch_id)

    def answered(self, sent_s: float) -> None:
        """The heartbeat that was sent then was answered."""
        self.lease.answered(sent_s=sent_s)

    def beat(self) -> None:
        """A heartbeat: with it goes again what was not answered."""
        if not self.crashed:
            self.tell("heartbeat", self, self.clock.now_s)
            for batch_id in sorted(self.unanswered):
                self.tell("started", self, batch_id)
            if self.lease.is_over(self.clock.now_s):
                self.kill()
            self.clock.after(self.network.heartbeat_s, self.beat)

    def watch(self) -> None:
        """Kill everything at the moment when the lease is over."""
        if not self.crashed:
            if self.lease.is_over(self.clock.now_s):
                self.kill()
            self.clock.at(max(self.lease.ends_s, self.clock.now_s + 0.01), self.watch)

    def kill(self) -> None:
        """End everything that runs or is to run."""
        self.life += 1
        self.line.clear()
        self.is_forking, self.closing_s = False, 0.0
        self.record.update(dict.fromkeys(self.record))
        self.running.clear()
        self.unanswered.clear()
        self.expecting.clear()

    def renew(self, now_s: float) -> None:
        """Begin again, empty, under a new lease."""
        self.kill()
        self.lease = Lease(self.lease_s, now_s=now_s)
