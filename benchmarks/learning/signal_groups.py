"""What it buys to go on sampling until enough groups have a signal, at equal CPU seconds.

Groups whose members all got the same reward teach nothing, and late in the laptop example most are of that kind. Each
run trains from one mid-trained checkpoint at a constant learning rate until RL has taken so many CPU seconds, machines
and graders included (`--budget-s`, looked at after each step), and is then evaluated on held-out tasks. `any` takes
`groups_per_step` groups, whatever they hold; `half` and `all` go on until half or all of that number have a signal
(`experience.signal_groups`), for at most four times as many groups; `scaled` takes the share of the learning
rate that has a signal. Seeds are pooled, with 95 % intervals.

`python -m benchmarks.learning.signal_groups --start CHECKPOINT [--seeds 0 1 2] [--budget-s 150] [--most RUNS]`
Two minutes a run on two cores. Rows are kept in `runs/`, so it goes on where it broke off; `--most 0` reports them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.learning.reinforcing import reinforce
from benchmarks.report import report
from benchmarks.runs import LAPTOP, ahead, brief, new_folder, rl_cpu_s
from etude.config import load
from etude.dashboard.run_view import RunView
from etude.evals.intervals import wilson
from etude.loop.config import RunConfig

WAYS = {"any": (0.0, "fill"), "half": (0.5, "fill"), "all": (1.0, "fill"), "scaled": (1.0, "scale")}
"""The share of groups_per_step that a step wants with a signal, and what it does where fewer have one."""
FOREVER = 1000  # steps: far more than the budget allows, so that no learning rate comes to its tail
Row = dict[str, Any]


def one(way: str, seed: int, start: Path, budget_s: float, heldout: int) -> Row:
    """Train for the budget and evaluate: a run's numbers."""
    never = [
        "evals.every=100000",
        "rl.checkpoint_every=100000",
        f"rl.steps={FOREVER}",
        f"evals.heldout_tasks={heldout}",
    ]
    settings = [f"start={start.resolve()}", f"seed={seed}", *never]
    per_step = load(LAPTOP, RunConfig, []).experience.groups_per_step
    share, policy = WAYS[way]
    settings += [f"experience.signal_groups={round(share * per_step)}", f"experience.little_signal={policy}"]
    config = load(LAPTOP, RunConfig, settings)
    folder = new_folder(f"signal-{way}-{seed}")

    def spent(step: Mapping[str, Any]) -> bool:
        return int(step["step"]) % 2 == 0 and sum(rl_cpu_s(folder, time.time()).values()) >= budget_s

    began = time.perf_counter()
    after = asyncio.run(reinforce(folder, config, until=spent, heldout=True))
    assert after is not None, "it was evaluated"
    view = RunView(folder)
    steps = view.by_step("rl.step")
    groups = [int(step["num_groups"]) for step in steps]
    with_signal = [round(n * (1 - float(step["no_signal_share"]))) for n, step in zip(groups, steps, strict=True)]
    last = slice(-10, None)
    return {
        "way": way,
        "seed": seed,
        "after": brief(after),
        "rl_cpu_s": round(sum(rl_cpu_s(folder).values()), 1),
        "steps": len(steps),
        "groups": sum(groups),
        "signal_share": round(sum(with_signal) / sum(groups), 4),
        "signal_groups_a_step_last_10": round(statistics.fmean(with_signal[last]), 2),
        "steps_without_signal": sum(n == 0 for n in with_signal),
        "reward_mean_last_10": round(statistics.fmean(float(step["reward_mean"]) for step in steps[last]), 4),
        "lag_max": max(int(lag) for step in steps for lag in step["token_lag"]),
        "wall_s": round(time.perf_counter() - began, 1),
    }


def pooled(rows: list[Row]) -> Row:
    """A way's seeds as one."""
    solved, tasks = (sum(row["after"][name] for row in rows) for name in ("solved", "num_tasks"))
    rate = wilson(solved, tasks)
    means = {
        name: round(statistics.fmean(row[name] for row in rows), 3)
        for name in ("rl_cpu_s", "steps", "groups", "signal_share", "steps_without_signal")
    }
    interval = {"rate": round(rate.value, 4), "low": round(rate.low, 4), "high": round(rate.high, 4)}
    return {**interval, "num_tasks": tasks, "seeds": len(rows), "mean": means}


def result(rows: list[Row]) -> Row:
    """Each way pooled, and how far it is ahead of `any`."""
    ways = {way: pooled(of) for way in WAYS if (of := [row for row in rows if row["way"] == way])}
    differences = {way: ahead(ways["any"], found) for way, found in ways.items() if way != "any" and "any" in ways}
    apart = {way: found["low"] > 0 or found["high"] < 0 for way, found in differences.items()}
    return {"ways": ways, "after_minus_any": differences, "difference_excludes_zero": apart, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, required=True, help="a mid-trained checkpoint of the example's model")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--budget-s", type=float, default=150.0, help="CPU seconds of RL")
    parser.add_argument("--heldout", type=int, default=512)
    parser.add_argument("--most", type=int, default=100, help="runs to make now")
    args = parser.parse_args()
    kept = Path("runs") / "signal-groups-rows.json"
    rows: list[Row] = json.loads(kept.read_text()) if kept.is_file() else []
    there = {(row["way"], row["seed"]) for row in rows}
    wanted = [(way, seed) for seed in args.seeds for way in args.ways if (way, seed) not in there]
    for way, seed in wanted[: args.most]:
        rows.append(one(way, seed, args.start, args.budget_s, args.heldout))
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(rows))
    report("signal_groups", {"budget_s": args.budget_s, **result(rows)})


if __name__ == "__main__":
    main()
