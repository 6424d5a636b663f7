"""What Ray costs: the laptop example's RL placed by Ray, against the same as children of one process.

From one checkpoint, in turns (local, ray, ray, local, ...), on one machine. Wall and CPU time count from the commit of
the first step to that of the last, so that starting counts in neither; it stands beside. CPU is that of this process
and everything below it: Ray's own processes are among them, and are not there in the turns without it. Nothing is
evaluated meanwhile, the curriculum is off and the seed is the same, so that both do alike work.
`python -m benchmarks.run.ray_overhead --start CHECKPOINT [--steps 30] [--rounds 2] [--set a.b=c]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.reinforcing import reinforce
from benchmarks.report import report
from benchmarks.runs import LAPTOP, new_folder
from etude.config import load
from etude.loop import ray_cluster
from etude.loop.config import RunConfig
from etude.loop.ray_placement import RayPlacement
from etude.loop.usage import Processes

ALONE = ("evals.every=100000", "rl.checkpoint_every=100000", "experience.curriculum=source")
PLACES = ("local", "ray")


def turn(place: str, config: RunConfig) -> dict[str, Any]:
    """One run: seconds of wall and CPU from its first step's commit to its last, and what it was."""
    marks: list[tuple[float, float]] = []
    rewards: list[float] = []

    def step(facts: Mapping[str, Any]) -> bool:
        if facts["step"] in (1, config.rl.steps):
            marks.append((time.perf_counter(), _cpu_s()))
        rewards.append(float(facts["reward_mean"]))
        return False

    began, folder = time.perf_counter(), new_folder(f"ray-{place}")
    if place == "ray":
        ray_cluster.connect("ray")
    try:
        placement = RayPlacement(folder) if place == "ray" else None
        asyncio.run(reinforce(folder, config, until=step, placement=placement))
    finally:
        if place == "ray":
            ray_cluster.disconnect()
    (first, cpu), (last, end_cpu) = marks
    return {
        "place": place,
        "wall_s": round(last - first, 3),
        "cpu_s": round(end_cpu - cpu, 3),
        "until_first_step_s": round(first - began, 3),
        "reward_mean": round(statistics.fmean(rewards), 4),
    }


def _cpu_s() -> float:
    """CPU seconds of this process and of all below it. What has ended and was not waited for is not in it."""
    return Processes().cpu_s(os.getpid())


def ratios(turns: Sequence[Mapping[str, Any]], what: str) -> dict[str, float]:
    """Ray ÷ local of the means, and each side's spread (largest ÷ smallest)."""
    sides = {place: [float(t[what]) for t in turns if t["place"] == place] for place in PLACES}
    means = {place: statistics.fmean(values) for place, values in sides.items()}
    spread = {f"spread_{place}": round(max(values) / min(values), 4) for place, values in sides.items()}
    return {"ratio": round(means["ray"] / means["local"], 4), **{p: round(m, 3) for p, m in means.items()}, **spread}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--start", type=Path, required=True, help="a mid-trained checkpoint of the laptop example")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    given = [f"start={args.start.resolve()}", f"rl.steps={args.steps}", *ALONE, *args.set]
    config = load(LAPTOP, RunConfig, given).with_parity_budget()
    turns = []
    for i in range(args.rounds):
        for place in PLACES if i % 2 == 0 else reversed(PLACES):
            turns.append(turn(place, config))
            print(json.dumps(turns[-1]), file=sys.stderr, flush=True)
    report(
        "ray_overhead",
        {
            "steps": args.steps,
            "rollouts_a_step": config.experience.groups_per_step * config.experience.group_size,
            "goal_wall_ratio": 1.05,
            "wall": ratios(turns, "wall_s"),
            "cpu": ratios(turns, "cpu_s"),
            "until_first_step": ratios(turns, "until_first_step_s"),
            "turns": turns,
        },
    )


if __name__ == "__main__":
    main()
