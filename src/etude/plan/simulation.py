"""Simulates the loop of rollouts and training on accelerators: a discrete-event simulation that checks a plan.

It has what the formulas of `planning` leave out: rollouts of different lengths, batches that shrink when the last
rollouts of a step are waited for, turns that wait for their tools, and the window of admission. An engine counts its
decoding steps, of which all of its sequences get a token each; while it computes a prompt it makes no other progress.

>>> from etude.plan import Layout, Shape
>>> shape = Shape(groups=4, group_size=4, turns=2.0, prompt_tokens=100.0, sampled_tokens=200.0, tool_tokens=50.0)
>>> fixed = simulate_steps(shape, Layout(engines=2, max_running=32), lambda batch: 0.01, 0.0, learner_s=5.0, spread=0.0)
>>> round(fixed, 2)  # the learner is the bottleneck
5.0
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np

from etude.plan.shape import Layout, Shape

MAX_TURNS = 4


class _Engine:
    """One engine: a heap of (step at which a turn ends, rollout), and how many steps it has made."""

    def __init__(self, step_s: Callable[[float], float]) -> None:
        self.step_s, self.running = step_s, list[tuple[float, int]]()
        self.steps = self.now = self.stalled_until = 0.0
        self.epoch = 0

    def advance(self, now: float) -> None:
        if self.running:
            begin = max(self.now, min(self.stalled_until, now))
            self.steps += (now - begin) / self.step_s(len(self.running))
        self.now = now

    def next_end(self) -> float:
        if not self.running:
            return math.inf
        left = max(0.0, self.running[0][0] - self.steps) * self.step_s(len(self.running))
        return max(self.now, self.stalled_until) + left


def simulate_steps(
    shape: Shape,
    layout: Layout,
    step_s: Callable[[float], float],
    prompt_token_s: float,
    *,
    learner_s: float,
    sync_s: float = 0.0,
    spread: float = 0.5,
    steps: int = 6,
    seed: int = 0,
) -> float:
    """Simulate training steps, and return the mean seconds of a step, without the first third of them.

    - `step_s`: returns the seconds of a decoding step with a number of sequences. `prompt_token_s`: seconds for a token
      of a prompt.
    - `learner_s`: seconds of a training step. `sync_s`: seconds until all engines have loaded its version.
    - `spread`: standard deviation of the logarithm of a rollout's number of sampled tokens. `shape` has the mean.
    - `steps`: the number of training steps.

    A rollout has at most `MAX_TURNS` simulated turns; if `shape` has more, each stands for several of them."""
    rng = np.random.default_rng(seed)
    per_step, turns = round(shape.rollouts), min(MAX_TURNS, max(1, round(shape.turns)))
    number = per_step * (steps + layout.max_lag + 1)  # those of later steps keep the engines busy
    tokens = rng.lognormal(-(spread**2) / 2, spread, number) * shape.sampled_tokens / turns  # of a turn
    round_trip_s = sum(one.engines * one.round_trip_s for one in layout.places) / layout.engines
    wait_s = (shape.tool_s + round_trip_s) * shape.turns / turns  # after each turn
    prefill = np.full(turns, shape.tool_tokens / turns)
    prefill[0] += shape.prompt_tokens
    engines = [_Engine(step_s) for _ in range(layout.engines)]
    home, turn = np.zeros(number, int), np.zeros(number, int)
    missing = np.full(number // per_step, per_step)
    events: list[tuple[float, int, str, int, int]] = []
    ended: list[float] = []
    order = started = running = published = 0
    free_at = 0.0

    def push(at: float, kind: str, which: int, epoch: int = 0) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (at, order, kind, which, epoch))

    def plan_end(number: int) -> None:
        engines[number].epoch += 1
        if engines[number].running:
            push(engines[number].next_end(), "end", number, engines[number].epoch)

    def begin_turn(rollout: int, now: float) -> None:
        engine = engines[home[rollout]]
        engine.advance(now)
        seconds = prompt_token_s * prefill[turn[rollout]] / layout.engine_ranks
        engine.stalled_until = max(now, engine.stalled_until) + seconds
        heapq.heappush(engine.running, (engine.steps + tokens[rollout], rollout))
        plan_end(int(home[rollout]))

    def admit(now: float) -> None:
        nonlocal started, running
        while started < len(tokens) and running < layout.max_running:
            if started // per_step > published + layout.max_lag:
                return
            home[started] = min(range(len(engines)), key=lambda i: len(engines[i].running))
            begin_turn(started, now)
            started, running = started + 1, running + 1

    def train(now: float) -> None:
        nonlocal free_at
        while len(ended) < steps and not missing[len(ended)] and free_at <= now:
            free_at = now + learner_s
            ended.append(free_at)
            push(free_at, "trained", len(ended))
            push(free_at + sync_s, "published", len(ended))

    admit(0.0)
    while events and len(ended) < steps:
        now, _, kind, which, epoch = heapq.heappop(events)
        if kind == "published":
            published = max(published, which)
        elif kind == "tool":
            begin_turn(which, now)
        elif kind == "end" and engines[which].epoch == epoch:
            engines[which].advance(now)
            _, rollout = heapq.heappop(engines[which].running)
            plan_end(which)
            turn[rollout] += 1
            push(now + wait_s, "tool" if turn[rollout] < turns else "graded", rollout)
        elif kind == "graded":
            running -= 1
            missing[which // per_step] -= 1
        elif kind != "trained":
            continue  # the end of a request that is no longer the next one
        train(now)
        admit(now)
    skipped = steps // 3
    return float((ended[-1] - ended[skipped - 1]) / (len(ended) - skipped))
