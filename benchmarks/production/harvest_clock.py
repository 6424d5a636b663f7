"""Two real engines by the CPU time of their steps, and the same run in the simulator of leases.

    python -m benchmarks.production.harvest_clock [--rounds 4] [--seconds 2]

The engines are stepped by hand, and the clock of each is the CPU time of its own steps and swaps: so the run is that of
two engines with a core each, whatever else the machine does. Scheduling, preemption, sampling and swaps of weights are
real; there is no gateway and no HTTP (`benchmarks.production.harvest_engines` has them, in wall time). Production
arrives at random; rollouts fill all other slots. In the middle of a round one engine is lent: it completes its
production, swaps to the version of the rollouts by a delta of the store, and back.

The costs of steps are fitted to the even rounds. The simulator repeats the odd ones with them.

- Hand-back of milliseconds: how much later than after the computation of its prompt alone a request of production has
  its first token in an engine full of rollouts.
- Hand-back of seconds: ending rollouts, fetching, decoding and verifying the delta, and writing it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tests.unit.inference.drafted import ByHand

from benchmarks.report import report
from etude.harvest import EngineCosts, FleetShape, simulate
from etude.harvest.traffic import Arrivals
from etude.inference.scheduler import Sequence
from etude.models import ModelConfig, Transformer, hf_views
from etude.records import CompletionRequest, Sampling, Version
from etude.records.completion import Traffic
from etude.stores import MemoryStore
from etude.weights import Channel, Follower, Tensor
from etude.weights.chain import branches
from etude.weights.follow.runtime_map import Map, named
from etude.weights.follow.targets import Target

MODEL = ModelConfig(
    vocab_size=384,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    expert_size=64,
    num_experts=8,
    top_k=2,
    context_tokens=512,
)
SLOTS, BULK_PROMPT, BULK_SAMPLED, PROMPT = 6, 64, 160, 48
CHANGED = 0.02
Row = tuple[float, float, float]
"""A step: seconds, sampled tokens, prompt tokens."""


class Engine:
    """A real engine with a clock of its own."""

    def __init__(self, store: MemoryStore, name: str) -> None:
        self.by_hand = ByHand(model=Transformer(MODEL, seed=1), max_sequences=SLOTS, context_tokens=512)
        self.follower = Follower(store, branch=name)
        self.target = Target(Map(named(hf_views(self.by_hand.model))))
        self.clock = 0.0
        self.lent = self.away = False
        self.bulk: list[Sequence] = []
        self.production: dict[int, Sequence] = {}
        self.follower.advance()

    def timed(self, work: Callable[[], object]) -> float:
        """Do some work, and add its CPU time to the clock."""
        begin = time.thread_time()
        work()
        seconds = time.thread_time() - begin
        self.clock += seconds
        return seconds

    def swap(self) -> float:
        """Load the version of the branch. Returns the CPU seconds."""

        def work() -> None:
            update = self.follower.advance()
            assert update is not None
            done = self.by_hand.engine.swap(self.target.prepare(update, self.follower.tensors))
            self.by_hand._calls()
            self.by_hand.engine._apply_swaps()
            done.result()

        return self.timed(work)


@dataclass
class Run:
    """The engines, the counts of requests and tokens, and what was measured."""

    store: MemoryStore
    engines: list[Engine]
    versions: tuple[Version, Version]
    number: int = 0
    delivered: int = 0
    preempted: int = 0
    hand_back_s: list[float] = field(default_factory=list)
    swaps_s: list[float] = field(default_factory=list)

    def ask(self, prompt_tokens: int, sampled_tokens: int, traffic: Traffic) -> CompletionRequest:
        self.number += 1
        ids = np.random.default_rng(self.number).integers(20, MODEL.vocab_size, prompt_tokens).astype(np.int32)
        sampling = Sampling(max_tokens=sampled_tokens, stop_token_ids=(), seed=self.number)
        name = f"r{self.number}"
        return CompletionRequest(
            request_id=name, session_id=name, prompt_ids=ids, sampling=sampling, keep_session=False, traffic=traffic
        )

    def fill(self, one: Engine) -> None:
        """Replace rollouts that have ended."""
        for done in [sequence for sequence in one.bulk if sequence.future.done()]:
            self.delivered += len(done.future.result().token_ids)
            one.bulk.remove(done)
        while len(one.bulk) < SLOTS:
            one.bulk.append(one.by_hand.submit(self.ask(BULK_PROMPT, BULK_SAMPLED, Traffic.ROLLOUT)))

    def move(self, one: Engine, to: Version) -> float:
        branches.point(self.store, "policy", to, branch=f"engine-{self.engines.index(one)}")
        return one.swap()


def start() -> Run:
    store, rng = MemoryStore(), np.random.default_rng(1)
    channel, model = Channel(store), Transformer(MODEL, seed=1)
    codes = {name: view.detach().numpy().view(np.uint32).ravel().copy() for name, view in hf_views(model).items()}

    def publish(step: int, parent: Version | None) -> Version:
        shapes = {name: tuple(view.shape) for name, view in hf_views(model).items()}
        tensors = {name: Tensor("f32", shapes[name], one) for name, one in codes.items()}
        return channel.publish(tensors, step=step, parent=parent, rollout_ids=[]).version

    stable = publish(1, None)
    for one in codes.values():
        one[rng.random(len(one)) < CHANGED] ^= 1 << 10
    newest = publish(2, stable)
    names = ("engine-0", "engine-1")
    for name in names:
        branches.point(store, "policy", stable, branch=name)
    found = Run(store, [Engine(store, name) for name in names], (stable, newest))
    for engine in found.engines:
        engine.by_hand.engine.version = stable  # the weights are those that it was made with
    return found


@dataclass
class Round:
    """A round: [R, 5] requests (arrival, prompt tokens, sampled tokens, first token, last token), tokens of rollouts,
    the steps, and the times of the lease: asked for, lent, taken, back. All times in seconds from its begin."""

    requests: np.ndarray[Any, Any]
    bulk_tokens: float
    steps: list[Row]
    lease: tuple[float, float, float, float]
    seconds: float


def play(run: Run, seconds: float, rate: float, seed: int) -> Round:
    """Step the two engines for `seconds` of their clocks."""
    rng, second = np.random.default_rng(seed), run.engines[1]
    at = np.cumsum(rng.exponential(1 / rate, int(3 * rate * seconds) + 10))
    at = at[at < seconds]
    sampled = np.clip(rng.lognormal(np.log(30), 0.5, len(at)), 4, 200).astype(int)
    rows = np.full((len(at), 5), np.nan)
    rows[:, 0], rows[:, 1], rows[:, 2] = at, PROMPT, sampled
    steps, bulk_tokens, coming = list[Row](), 0, 0
    lease = {"asked": seconds / 4, "lent": 0.0, "taken": 3 * seconds / 4, "back": 0.0}
    for one in run.engines:
        run.fill(one)
        for _ in range(0 if seed else 60):  # rollouts of different progress
            one.by_hand.step()
            run.fill(one)
        one.clock = 0.0
    end = seconds
    while True:
        one = min(run.engines, key=lambda engine: engine.clock)
        if one.clock >= end and (coming == len(at)) and not any(engine.production for engine in run.engines):
            break
        while coming < len(at) and at[coming] <= one.clock:
            able = [engine for engine in run.engines if not engine.away]
            target = min(able, key=lambda engine: len(engine.production))
            request = run.ask(PROMPT, int(sampled[coming]), Traffic.PRODUCTION)
            target.production[coming] = target.by_hand.submit(request)
            coming += 1
        if one is second and not one.away and not lease["lent"] and one.clock >= lease["asked"]:
            one.away = True
        if one is second and one.away and not one.lent and not one.production:
            run.swaps_s.append(run.move(one, run.versions[1]))
            one.lent, lease["lent"] = True, one.clock
        if one is second and one.lent and one.clock >= lease["taken"]:
            taken = one.clock
            run.hand_back_s.append(run.move(one, run.versions[0]))
            one.lent = one.away = False
            lease["taken"], lease["back"] = taken, one.clock
        counters = one.by_hand.engine.counters
        before = counters.tokens, counters.production_tokens, counters.prefill_tokens
        took = one.timed(one.by_hand.step)
        tokens, production, prompt = (
            getattr(counters, name) - old
            for name, old in zip(("tokens", "production_tokens", "prefill_tokens"), before, strict=True)
        )
        steps.append((took, tokens, prompt))
        if one.clock <= end:
            bulk_tokens += tokens - production
        for number, sequence in list(one.production.items()):
            if sequence.token_ids and np.isnan(rows[number, 3]):
                rows[number, 3] = one.clock
            if sequence.future.done():
                rows[number, 4] = one.clock
                run.delivered += len(sequence.future.result().token_ids)
                del one.production[number]
        run.fill(one)
    times = (lease["asked"], lease["lent"], lease["taken"], lease["back"])
    return Round(rows, bulk_tokens, steps, times, seconds)


def fitted(rounds: list[Round]) -> EngineCosts:
    """Fit the seconds of steps by least squares."""
    rows = np.array([row for one in rounds for row in one.steps])
    wall, parts = rows[:, 0], np.column_stack([np.ones(len(rows)), rows[:, 1:]])
    cost, *_ = np.linalg.lstsq(parts, wall, rcond=None)
    step, sequence, prompt = (max(0.0, float(one)) for one in cost)
    return EngineCosts(slots=SLOTS, step_s=step, sequence_s=sequence, prompt_token_s=prompt)


class Recorded:
    """Lends one engine as a round did."""

    def __init__(self, one: Round) -> None:
        self._asked, _, self._taken, _ = one.lease

    def away(self, time_s: float, load: float, away: int) -> int:
        return int(self._asked <= time_s < self._taken)


def compared(rounds: list[Round], costs: EngineCosts, swap_s: float) -> dict[str, Any]:
    """Simulate rounds, and compare with what was measured in them."""
    simulated, measured = np.zeros(3), np.zeros(3)
    firsts: tuple[list[float], list[float]] = ([], [])
    for one in rounds:
        arrivals = Arrivals(
            one.requests[:, 0], one.requests[:, 1].astype(int), one.requests[:, 2].astype(int), one.seconds
        )
        fleet = FleetShape(
            engines=2,
            costs=costs,
            tick_s=0.01,
            lend_s=swap_s,
            return_s=swap_s,
            bulk_slots=SLOTS,
            bulk_prompt_tokens=BULK_PROMPT,
            bulk_sampled_tokens=BULK_SAMPLED,
        )
        found = simulate(arrivals, fleet, Recorded(one))
        ended = ~np.isnan(found.latency_s)
        first = one.requests[:, 3] - one.requests[:, 0]
        latency = one.requests[:, 4] - one.requests[:, 0]
        simulated += [found.bulk_tokens, found.first_s[ended].sum(), found.latency_s[ended].sum()]
        measured += [one.bulk_tokens, first[ended].sum(), latency[ended].sum()]
        firsts[0].extend(found.first_s[ended])
        firsts[1].extend(first[ended])
    number, seconds = len(firsts[0]), sum(one.seconds for one in rounds)
    return {
        "requests": number,
        "rollout_tokens_s": [round(float(x[0]) / seconds, 1) for x in (simulated, measured)],
        "first_token_ms": [round(1000 * float(x[1]) / number, 2) for x in (simulated, measured)],
        "latency_ms": [round(1000 * float(x[2]) / number, 2) for x in (simulated, measured)],
        "simulated_over_measured": {
            name: round(float(simulated[i] / measured[i]), 3)
            for i, name in enumerate(("rollout tokens", "first token", "latency"))
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU seconds of each engine in a round")
    parser.add_argument("--rate", type=float, default=16.0, help="requests of production per second")
    parser.add_argument("--swaps", type=int, default=20, help="further swaps, there and back")
    args = parser.parse_args()
    torch.set_num_threads(1)
    run, rounds = start(), list[Round]()
    for seed in range(args.rounds):
        rounds.append(play(run, args.seconds, args.rate, seed))
        print(f"round {seed}: {len(rounds[-1].requests)} requests, {len(rounds[-1].steps)} steps", flush=True)
    costs = fitted(rounds[::2])
    swap_s = float(np.median(run.swaps_s + run.hand_back_s))
    for _ in range(args.swaps):
        run.move(run.engines[1], run.versions[1])
        run.hand_back_s.append(run.move(run.engines[1], run.versions[0]))
    full = np.concatenate([one.requests[:, 3] - one.requests[:, 0] for one in rounds])
    alone = costs.step_s + costs.sequence_s + PROMPT * costs.prompt_token_s
    for one in run.engines:  # what is in flight ends
        run.delivered += sum(len(done.token_ids) for done in one.by_hand.finish(one.bulk))
    sampled = sum(one.by_hand.engine.counters.tokens for one in run.engines)
    report(
        "harvest_clock",
        {
            "rounds": args.rounds,
            "clock": "CPU seconds of each engine's thread",
            "costs_us": {
                "step": round(1e6 * costs.step_s, 1),
                "sequence": round(1e6 * costs.sequence_s, 1),
                "prompt_token": round(1e6 * costs.prompt_token_s, 1),
            },
            "simulated": compared(rounds[1::2], costs, swap_s),
            "milliseconds": {
                "requests": len(full),
                "alone_ms": round(1000 * alone, 2),
                "first_token_p50_p99_ms": [round(1000 * float(x), 2) for x in np.percentile(full, [50, 99])],
                "hand_back_p99_ms": round(1000 * (float(np.percentile(full, 99)) - alone), 2),
                "preempted": sum(one.by_hand.engine.counters.rollouts_preempted for one in run.engines),
            },
            "seconds": {
                "hand_backs": len(run.hand_back_s),
                "p50_p99_s": [round(float(x), 4) for x in np.percentile(run.hand_back_s, [50, 99])],
            },
            "sampled_tokens": sampled,
            "lost_tokens": sampled - run.delivered,
        },
    )


if __name__ == "__main__":
    main()
