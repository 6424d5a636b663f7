"""Measures a run's steps from its events, in the terms of a plan: shape of rollouts, wall time, CPU time, bytes.

It covers the time from the first step's event to the last one's, without one-time work. CPU seconds come from the
kernel, per process. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from etude.errors import RunError
from etude.loop.config import RunConfig
from etude.plan import Plan, Shape
from etude.run import RunFolder
from etude.telemetry import read_events

Event = Mapping[str, Any]
ROLES = {"learner": ("learner",), "engines": ("engine",), "machines": ("worker", "grader", "conductor")}


@dataclass(frozen=True)
class MeasuredSteps:
    """Measured means per step of a run, to be compared with a plan.

    `evaluated` is the number of rollouts of evaluations. `step_s` is wall time, and `cpu_s` the CPU seconds by role,
    with their sum as "all". `object_bytes` is the size of a published version, and `changed_share` the share of weights
    that changed."""

    num_steps: int
    shape: Shape
    evaluated: float
    step_s: float
    cpu_s: Mapping[str, float]
    object_bytes: float
    changed_share: float

    @classmethod
    def read(cls, run: RunFolder, config: RunConfig) -> MeasuredSteps:
        """Measure a run. Raises `RunError` when it has fewer than three steps."""
        events = list(read_events(run / "events"))
        steps = [event for event in events if event.get("kind") == "rl.step"]
        if len(steps) < 3:
            raise RunError(
                f"{run.path} has {len(steps)} steps", "a comparison needs three or more", hint="choose a longer run"
            )
        first, last = steps[0]["t"], steps[-1]["t"]
        within = [event for event in events if first <= event["t"] <= last]
        count = len(steps) - 1
        evals = [event for event in within if event.get("kind") == "eval.result"]
        versions = [event for event in within if event.get("kind") == "weights.publish"]
        return cls(
            num_steps=count,
            shape=_shape(steps[1:], config),
            evaluated=sum(event["num_tasks"] * event.get("tries", 1) for event in evals) / count,
            step_s=(last - first) / count,
            cpu_s=_cpu_s([event for event in within if event.get("kind") == "usage"], (last - first) / count),
            object_bytes=fmean(event["object_bytes"] for event in versions) if versions else 0.0,
            changed_share=fmean(event["changed_share"] for event in versions) if versions else 0.0,
        )

    def compare(self, plan: Plan, cores: int) -> dict[str, tuple[float, float]]:
        """Return (planned, measured) for each quantity, by name. `cores` is the number of cores of the machine."""
        found = {
            "step_s": (plan.step_s, self.step_s),
            "learner_cpu_s": (plan.learner_device_s, self.cpu_s["learner"]),
            "engines_cpu_s": (plan.engine_device_s, self.cpu_s["engines"]),
            "machines_cpu_s": (plan.machines_s, self.cpu_s["machines"]),
            "sync_bytes": (plan.sync_bytes, self.object_bytes),
        }
        planned = plan.learner_device_s + plan.engine_device_s + plan.machines_s
        return {
            **found,
            "cpu_s": (planned, self.cpu_s["all"]),
            "busy_share": (1.0, self.cpu_s["all"] / cores / self.step_s),
        }


def _shape(steps: Sequence[Event], config: RunConfig) -> Shape:
    size, taken = config.experience.group_size, [event["num_groups"] for event in steps]
    groups = fmean(taken)
    having = fmean(num * (1.0 - event["no_signal_share"]) for num, event in zip(taken, steps, strict=True))
    sampled, trained = fmean(event["sampled_mean"] for event in steps), fmean(event["num_tokens"] for event in steps)
    context = trained / max(1.0, having * size)
    return Shape(
        groups=groups,
        group_size=size,
        turns=fmean(event["turns_mean"] for event in steps),
        prompt_tokens=max(0.0, context - sampled),
        sampled_tokens=sampled,
        tool_tokens=0.0,  # counted as prompt tokens: both are not sampled
        signal_share=having / groups,
        solved_share=fmean(event["reward_mean"] for event in steps),
    )


def _cpu_s(usage: Sequence[Event], step_s: float) -> dict[str, float]:
    if len(usage) < 2:
        return dict.fromkeys((*ROLES, "all"), 0.0)
    first, last = usage[0]["processes"], usage[-1]["processes"]
    took = {name: use["cpu_s"] - first.get(name, {"cpu_s": 0.0})["cpu_s"] for name, use in last.items()}
    scale = step_s / (usage[-1]["t"] - usage[0]["t"])
    found = {
        role: scale * sum(seconds for name, seconds in took.items() if name.startswith(names))
        for role, names in ROLES.items()
    }
    return {**found, "all": sum(found.values())}
