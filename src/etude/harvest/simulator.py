"""Simulates engines that serve production and are lent to rollouts: a discrete-event simulation.

Engines decode by continuous batching: all sequences of an engine get a token in each step, and a step of n sequences
takes ``step_s + sequence_s * n`` seconds. So an engine counts its steps, and a request with k tokens ends k steps after
it began. While a prompt is computed, the engine makes no other progress. A request goes to the serving engine with the
fewest requests; if all slots are taken, it waits in one queue.

Rollouts are not simulated one by one: there is always another one. They fill the slots of lent engines, and up to
`bulk_slots` slots of engines that serve production. Production never waits for rollouts. If production takes the slot
of a rollout, the rollout keeps its tokens, and the engine computes its context again later. The time for a rollout's
prompt is divided evenly among its sampled tokens.

The event loop is a heap of times: that takes fewer lines than processes of a simulation library."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from etude.config import ranged
from etude.harvest.leases import AWAY, Lease, Leases
from etude.harvest.policies import LendingPolicy
from etude.harvest.traffic import F64, Arrivals


@dataclass(frozen=True)
class EngineCosts:
    """The speed of an engine.

    - `slots`: the sequences that it decodes together.
    - `step_s`, `sequence_s`: seconds of a decoding step, and in addition for each sequence.
    - `prompt_token_s`: seconds for each token of a prompt."""

    slots: int = ranged(32, low=1, high=4096)
    step_s: float = ranged(0.02, low=1e-6)
    sequence_s: float = ranged(0.0005, low=0.0)
    prompt_token_s: float = ranged(0.00002, low=0.0)


@dataclass(frozen=True)
class FleetShape:
    """The simulated fleet.

    - `engines`, `min_serving`: their number, and how many are never lent.
    - `tick_s`: interval at which the policy decides, in seconds.
    - `lend_s`, `return_s`: seconds until a drained engine serves rollouts, and until a lent one serves production.
      A swap by delta takes about a second, another model (sleep and wake) tens of seconds.
    - `bulk_slots`: the most slots of a serving engine that rollouts may use: the tier of milliseconds. 0: none.
    - `bulk_prompt_tokens`, `bulk_sampled_tokens`: mean numbers of tokens of a rollout.
    - `first_s`, `token_s`: a request of production is late if its first token takes longer than `first_s` seconds, or
      the others longer than `token_s` each on average."""

    engines: int = ranged(8, low=1, high=1024)
    min_serving: int = ranged(1, low=1)
    costs: EngineCosts = field(default_factory=EngineCosts)
    tick_s: float = ranged(5.0, low=0.01)
    lend_s: float = ranged(2.0, low=0.0)
    return_s: float = ranged(2.0, low=0.0)
    bulk_slots: int = ranged(0, low=0)
    bulk_prompt_tokens: float = ranged(1_000.0, low=0.0)
    bulk_sampled_tokens: float = ranged(2_000.0, low=1.0)
    first_s: float = ranged(2.0, low=0.0)
    token_s: float = ranged(0.06, low=0.0)


@dataclass
class Simulated:
    """What a simulation counted.

    - `first_s` [R], `latency_s` [R]: seconds from the arrival of each request to its first and last token; NaN if the
      simulation ended earlier.
    - `late_share`: the share of requests that were late (`FleetShape`).
    - `production_tokens`, `bulk_tokens`, `lent_tokens`: sampled tokens of production, of rollouts on all engines, and
      of rollouts on lent ones.
    - `hours`: engine hours by state of the lease.
    - `loads`: mean number of requests that ran or waited, for each tick.
    - `num_preempted`: rollouts that lost their slot. `num_leases`: leases that began.
    - `hand_back_s`: for each engine that was taken back, the seconds until it served production."""

    first_s: F64
    latency_s: F64
    late_share: float = 0.0
    production_tokens: float = 0.0
    bulk_tokens: float = 0.0
    lent_tokens: float = 0.0
    hours: dict[Lease, float] = field(default_factory=lambda: dict.fromkeys(Lease, 0.0))
    loads: list[float] = field(default_factory=list)
    num_preempted: int = 0
    num_leases: int = 0
    hand_back_s: list[float] = field(default_factory=list)


class _Engine:
    """One engine: its lease, the requests in its slots, and how many steps it has made."""

    def __init__(self, name: str, fleet: FleetShape) -> None:
        self.name, self.fleet = name, fleet
        self.running: list[tuple[float, int]] = []  # a heap of (step at which it ends, request)
        self.steps = self.now = self.stalled_until = 0.0
        self.bulk = self.displaced = 0  # rollouts in slots, and rollouts that lost their slot
        self.num_preempted = 0
        self.since = 0.0  # when its lease got its state
        self.epoch = 0  # number of changes, to recognise outdated events

    def step_s(self) -> float:
        """Seconds of a step with the present sequences."""
        costs, fleet = self.fleet.costs, self.fleet
        prompt_s = costs.prompt_token_s * fleet.bulk_prompt_tokens / fleet.bulk_sampled_tokens
        return costs.step_s + costs.sequence_s * (len(self.running) + self.bulk) + prompt_s * self.bulk

    def advance(self, now: float) -> tuple[float, float]:
        """Simulate the engine until `now` (seconds). Returns how many tokens production and rollouts sampled."""
        begin = max(self.now, min(self.stalled_until, now))
        steps = (now - begin) / self.step_s()
        self.now, self.steps = now, self.steps + steps
        return steps * len(self.running), steps * self.bulk

    def start(self, request: int, prompt_tokens: int, sampled_tokens: int) -> float:
        """Begin a request with the next step. Returns when its first token is sampled, in seconds."""
        missing = math.ceil(self.steps - 1e-6) - self.steps if self.running or self.bulk else 0.0
        rest_s = missing * self.step_s()
        self.stalled_until = max(self.now, self.stalled_until) + self.fleet.costs.prompt_token_s * prompt_tokens
        heapq.heappush(self.running, (self.steps + missing + sampled_tokens, request))
        return self.stalled_until + rest_s + self.step_s()

    def next_end(self) -> float:
        """Return when the next request ends if none begins before, in seconds; infinity if none runs."""
        if not self.running:
            return math.inf
        return max(self.now, self.stalled_until) + max(0.0, self.running[0][0] - self.steps) * self.step_s()

    def fill(self, state: Lease) -> None:
        """Give free slots to rollouts, or take slots from them."""
        fleet, slots = self.fleet, self.fleet.costs.slots
        most = slots if state is Lease.LENT else fleet.bulk_slots if state is Lease.SERVING else 0
        bulk = min(most, slots - len(self.running))
        if bulk < self.bulk and state is Lease.SERVING:
            self.displaced += self.bulk - bulk
            self.num_preempted += self.bulk - bulk
        back = min(max(0, bulk - self.bulk), self.displaced)
        if back:
            self.displaced -= back
            context = fleet.bulk_prompt_tokens + fleet.bulk_sampled_tokens / 2
            self.stalled_until = max(self.now, self.stalled_until) + back * context * fleet.costs.prompt_token_s
        self.bulk = bulk


def simulate(arrivals: Arrivals, fleet: FleetShape, policy: LendingPolicy, *, start_s: float = 0.0) -> Simulated:
    """Simulate a fleet from the first arrival to the end of `arrivals`.

    `start_s`: the time of day of the beginning, in seconds since a midnight; the policy is asked every `fleet.tick_s`
    seconds."""
    return _Simulation(arrivals, fleet, policy, start_s).run()


class _Simulation:
    def __init__(self, arrivals: Arrivals, fleet: FleetShape, policy: LendingPolicy, start_s: float) -> None:
        self.arrivals, self.fleet, self.policy, self.start_s = arrivals, fleet, policy, start_s
        self.engines = {name: _Engine(name, fleet) for name in (f"engine-{i}" for i in range(fleet.engines))}
        self.leases = Leases(self.engines, min_serving=fleet.min_serving)
        self.waiting: deque[int] = deque()
        self.events: list[tuple[float, int, str, int, float]] = []  # time, order, engine, its epoch, began
        self.order = 0
        self.now = self.area = 0.0  # area: request-seconds since the last tick
        self.load = 0  # requests that run or wait
        number = len(arrivals.at_s)
        self.found = Simulated(np.full(number, np.nan), np.full(number, np.nan))

    def run(self) -> Simulated:
        at_s, end_s, tick_s = self.arrivals.at_s.tolist(), self.arrivals.duration_s, self.fleet.tick_s
        for engine in self.engines.values():
            engine.fill(Lease.SERVING)
        request, tick = 0, 0.0
        while True:
            arrival = at_s[request] if request < len(at_s) else math.inf
            event = self.events[0][0] if self.events else math.inf
            now = min(arrival, event, tick)
            if now >= end_s:
                break
            if now == tick:
                self._move_on(now)
                self._decide()
                tick += tick_s
            elif now == event:
                _, _, name, epoch, began = heapq.heappop(self.events)
                if self.engines[name].epoch == epoch:
                    self._move_on(now)
                    self._happened(self.engines[name], began)
            else:
                self._move_on(now)
                self.waiting.append(request)
                self.load += 1
                self._dispatch()
                request += 1
        self._move_on(end_s)
        for engine in self.engines.values():
            self._advance(engine)
            self._count_hours(engine)
            self.found.num_preempted += engine.num_preempted
        self.found.late_share = self._late_share()
        return self.found

    def _move_on(self, now: float) -> None:
        self.area += (now - self.now) * self.load
        self.now = now

    def _count_hours(self, engine: _Engine) -> None:
        self.found.hours[self.leases.states[engine.name]] += (self.now - engine.since) / 3600
        engine.since = self.now

    def _decide(self) -> None:
        load = self.area / self.fleet.tick_s
        self.area = 0.0
        self.found.loads.append(load)
        wanted = self.policy.away(self.start_s + self.now, load, self.leases.count(*AWAY))
        lent, back = self.leases.changes(wanted, {name: len(one.running) for name, one in self.engines.items()})
        for name in lent:
            self._change(self.engines[name], Lease.DRAINING)
        for name in back:
            draining = self.leases.states[name] is Lease.DRAINING
            self._change(self.engines[name], Lease.SERVING if draining else Lease.RETURNING)
        self._dispatch()

    def _advance(self, engine: _Engine) -> None:
        production, bulk = engine.advance(self.now)
        self.found.production_tokens += production
        self.found.bulk_tokens += bulk
        self.found.lent_tokens += bulk * (self.leases.states[engine.name] is Lease.LENT)

    def _change(self, engine: _Engine, state: Lease) -> None:
        """Change the state of an engine, and plan its next one."""
        self._advance(engine)
        self._count_hours(engine)
        self.leases.move(engine.name, state)
        self.found.num_leases += state is Lease.LENT
        self._plan(engine)

    def _plan(self, engine: _Engine) -> None:
        """Push the next event of an engine whose clock is at the present time."""
        state = self.leases.states[engine.name]
        engine.fill(state)
        at = engine.next_end()
        if state is Lease.DRAINING and not engine.running:
            self._change(engine, Lease.LOADING)
            return
        if state is Lease.LOADING:
            at = self.now + self.fleet.lend_s
        elif state is Lease.RETURNING:
            at = self.now + self.fleet.return_s
        engine.epoch += 1
        if at < math.inf:
            self.order += 1
            heapq.heappush(self.events, (at, self.order, engine.name, engine.epoch, self.now))

    def _happened(self, engine: _Engine, began: float) -> None:
        """Handle the next event of an engine: a request ends, or a swap of the weights."""
        state = self.leases.states[engine.name]
        if state is Lease.LOADING:
            self._change(engine, Lease.LENT)
        elif state is Lease.RETURNING:
            self.found.hand_back_s.append(self.now - began)
            self._change(engine, Lease.SERVING)
        else:
            self._advance(engine)
            _, request = heapq.heappop(engine.running)
            self.found.latency_s[request] = self.now - self.arrivals.at_s[request]
            self.load -= 1
            self._plan(engine)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give waiting requests to serving engines with a free slot."""
        while self.waiting:
            able = [
                one
                for one in self.engines.values()
                if self.leases.states[one.name] is Lease.SERVING and len(one.running) < self.fleet.costs.slots
            ]
            if not able:
                return
            engine, request = min(able, key=lambda one: len(one.running)), self.waiting.popleft()
            self._advance(engine)
            tokens = int(self.arrivals.prompt_tokens[request]), int(self.arrivals.sampled_tokens[request])
            first = engine.start(request, *tokens)
            self.found.first_s[request] = first - self.arrivals.at_s[request]
            self._plan(engine)

    def _late_share(self) -> float:
        """The share of late ones among the requests of which it is known."""
        found, fleet = self.found, self.fleet
        first = np.where(np.isnan(found.first_s), self.now - self.arrivals.at_s, found.first_s)  # those that wait
        token_s = (found.latency_s - found.first_s) / np.maximum(1, self.arrivals.sampled_tokens - 1)
        known = ~np.isnan(found.latency_s) | (first > fleet.first_s)
        late = (first > fleet.first_s) | (np.nan_to_num(token_s) > fleet.token_s)
        return float(late[known].mean()) if known.any() else 0.0
