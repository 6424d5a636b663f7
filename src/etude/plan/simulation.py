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
from typing import Any

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
    wait_s = shape.tool_s + sum(one.engines * one.round_trip_s for one in layout.places) / layout.engines
    turns = min(MAX_TURNS, max(1, round(shape.turns)))
    number = round(shape.rollouts) * (steps + layout.max_lag + 1)  # those of later steps keep the engines busy
    tokens = np.random.default_rng(seed).lognormal(-(spread**2) / 2, spread, number) * shape.sampled_tokens / turns
    prefill = np.full(turns, shape.tool_tokens / turns)
    prefill[0] += shape.prompt_tokens
    loop = _Loop(layout, step_s, tokens, prefill * prompt_token_s / layout.engine_ranks, round(shape.rollouts))
    ended = loop.run(steps, wait_s=wait_s * shape.turns / turns, learner_s=learner_s, sync_s=sync_s)
    skipped = steps // 3
    return float((ended[-1] - ended[skipped - 1]) / (len(ended) - skipped))


class _Loop:
    """The state of the simulated loop.

    - `tokens`: sampled tokens of a turn, by rollout. `prefill_s`: seconds for the prompt of a rollout's n-th turn.
    - `per_step`: rollouts of a training step."""

    def __init__(
        self,
        layout: Layout,
        step_s: Callable[[float], float],
        tokens: np.ndarray[Any, np.dtype[np.float64]],
        prefill_s: np.ndarray[Any, np.dtype[np.float64]],
        per_step: int,
    ) -> None:
        self.layout, self.tokens, self.prefill_s, self.per_step = layout, tokens, prefill_s, per_step
        self.engines = [_Engine(step_s) for _ in range(layout.engines)]
        self.home, self.turn = np.zeros(len(tokens), int), np.zeros(len(tokens), int)
        self.missing = np.full(len(tokens) // per_step, per_step)
        self.events: list[tuple[float, int, str, int, int]] = []  # time, order, kind, what it is about, epoch
        self.order = self.started = self.running = self.published = 0

    def run(self, steps: int, *, wait_s: float, learner_s: float, sync_s: float) -> list[float]:
        """Return when each of `steps` training steps ended. `wait_s`: seconds after each turn."""
        ended, free_at = list[float](), 0.0
        self.admit(0.0)
        while self.events and len(ended) < steps:
            now, _, kind, which, epoch = heapq.heappop(self.events)
            if kind == "published":
                self.published = max(self.published, which)
            elif kind == "tool":
                self.begin_turn(which, now)
            elif kind == "end" and self.engines[which].epoch == epoch:
                rollout = self.end_turn(which, now)
                self.push(now + wait_s, "tool" if self.turn[rollout] < len(self.prefill_s) else "graded", rollout)
            elif kind == "graded":
                self.running -= 1
                self.missing[which // self.per_step] -= 1
            elif kind != "trained":
                continue  # the end of a request that is no longer the next one
            while len(ended) < steps and not self.missing[len(ended)] and free_at <= now:
                free_at = now + learner_s
                ended.append(free_at)
                self.push(free_at, "trained", len(ended))
                self.push(free_at + sync_s, "published", len(ended))
            self.admit(now)
        return ended

    def push(self, at: float, kind: str, which: int, epoch: int = 0) -> None:
        self.order += 1
        heapq.heappush(self.events, (at, self.order, kind, which, epoch))

    def plan_end(self, number: int) -> None:
        engine = self.engines[number]
        engine.epoch += 1
        if engine.running:
            self.push(engine.next_end(), "end", number, engine.epoch)

    def begin_turn(self, rollout: int, now: float) -> None:
        engine = self.engines[self.home[rollout]]
        engine.advance(now)
        engine.stalled_until = max(now, engine.stalled_until) + self.prefill_s[self.turn[rollout]]
        heapq.heappush(engine.running, (engine.steps + self.tokens[rollout], rollout))
        self.plan_end(int(self.home[rollout]))

    def end_turn(self, number: int, now: float) -> int:
        """End the turn that an engine finishes now. Returns its rollout."""
        self.engines[number].advance(now)
        _, rollout = heapq.heappop(self.engines[number].running)
        self.plan_end(number)
        self.turn[rollout] += 1
        return rollout

    def admit(self, now: float) -> None:
        while self.started < len(self.tokens) and self.running < self.layout.max_running:
            if self.started // self.per_step > self.published + self.layout.max_lag:
                return
            self.home[self.started] = min(range(len(self.engines)), key=lambda i: len(self.engines[i].running))
            self.begin_turn(self.started, now)
            self.started, self.running = self.started + 1, self.running + 1
