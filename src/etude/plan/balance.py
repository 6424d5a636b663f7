"""How many devices for rollouts a run needs beside those that train, and what this ratio depends on.

A forward pass takes 2 operations per active parameter and token, training 6 (Kaplan et al. 2020, arXiv 2001.08361). So
if decoding were bound by arithmetic, one device for rollouts would be enough for three that train: 1:3. It is not, when
batches are small or contexts are long, and not all sampled tokens are trained on. The balance is the smallest number of
engines with which the learner does not wait for rollouts, by the formulas of `planning`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from etude.models.config import ModelConfig
from etude.plan.hardware import Device
from etude.plan.planning import decoding_step_s, plan, prompt_token_s
from etude.plan.shape import Layout, Shape
from etude.plan.simulation import simulate_steps

MAX_ENGINES = 4096


@dataclass(frozen=True)
class Balance:
    """The engines that a learner needs.

    - `engines`: their number. 0: no number up to `MAX_ENGINES` is enough, because single rollouts take too long.
    - `ratio`: devices for rollouts per device that trains.
    - `batch`: sequences that an engine decodes together.
    - `planned_s`, `simulated_s`: seconds of a training step by the formulas and in the simulation (0.0: not done)."""

    engines: int
    ratio: float
    batch: float = 0.0
    planned_s: float = 0.0
    simulated_s: float = 0.0


def balance(
    model: ModelConfig,
    shape: Shape,
    layout: Layout,
    hardware: Device,
    engines_on: Device | None = None,
    *,
    check: bool = True,
) -> Balance:
    """Return the fewest engines with which the learner is the bottleneck.

    The number of engines in `layout` is not used, except that `max_running` grows in proportion to it. `check`: whether
    to simulate the result, too."""
    device = engines_on or hardware

    def with_engines(number: int) -> Layout:
        running = max(1, layout.max_running * number // layout.engines)
        places = tuple(replace(one, engines=number) for one in layout.places[:1])
        return replace(layout, engines=number, max_running=running, regions=places)

    def is_enough(number: int) -> bool:
        found = plan(model, shape, with_engines(number), hardware, device)
        return found.engines_s <= found.learner_s and found.rollout_s / (layout.max_lag + 1) <= found.learner_s

    high = 1
    while not is_enough(high):
        if high >= MAX_ENGINES:
            return Balance(0, 0.0)
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    chosen = with_engines(high)
    found = plan(model, shape, chosen, hardware, device)
    simulated_s = 0.0
    if check:
        mean = shape.context / 2
        simulated_s = simulate_steps(
            shape,
            chosen,
            decoding_step_s(model, mean, chosen, device),
            prompt_token_s(model, mean, device),
            learner_s=found.learner_s,
            sync_s=found.sync_s,
        )
    ratio = high * layout.engine_ranks / layout.learner_ranks
    return Balance(high, ratio, found.batch, found.step_s, simulated_s)


Inputs = tuple[Shape, Layout, Device, Device]
"""Shape, layout, the learner's devices and the engines'."""


def variations(shape: Shape) -> Mapping[str, Callable[[Inputs], Inputs]]:
    """Return the inputs for which `sensitivity` computes the ratio: by name, a function that changes one input."""

    def shaped(**changes: Any) -> Callable[[Inputs], Inputs]:
        return lambda given: (replace(given[0], **changes), *given[1:])

    def engines(factor: float) -> Callable[[Inputs], Inputs]:
        return lambda g: (*g[:3], replace(g[3], decoding_share=min(1.0, factor * g[3].decoding_share)))

    def learners(factor: float) -> Callable[[Inputs], Inputs]:
        return lambda g: (*g[:2], replace(g[2], training_share=min(1.0, factor * g[2].training_share)), g[3])

    tokens = ("prompt_tokens", "sampled_tokens", "tool_tokens")
    return {
        "as given": lambda given: given,
        "all tokens halved": shaped(**{name: getattr(shape, name) / 2 for name in tokens}),
        "all tokens doubled": shaped(**{name: getattr(shape, name) * 2 for name in tokens}),
        "half of the rollouts trained on": shaped(signal_share=shape.signal_share / 2),
        "groups halved": shaped(groups=shape.groups / 2),
        "groups doubled": shaped(groups=shape.groups * 2),
        "10 s more for each tool call": shaped(tool_s=shape.tool_s + 10.0),
        "decoding at 3/4 of its share of the roofline": engines(0.75),
        "decoding at 4/3 of its share": engines(4 / 3),
        "training at 3/4 of its share of the peak": learners(0.75),
        "training at 4/3 of its share": learners(4 / 3),
        "max_lag + 2": lambda g: (g[0], replace(g[1], max_lag=g[1].max_lag + 2), *g[2:]),
    }


def sensitivity(
    model: ModelConfig, shape: Shape, layout: Layout, hardware: Device, engines_on: Device | None = None
) -> dict[str, Balance]:
    """Return the balance for each of `variations`, by name. Each is also simulated."""
    given = (shape, layout, hardware, engines_on or hardware)
    return {name: balance(model, *change(given)) for name, change in variations(shape).items()}
