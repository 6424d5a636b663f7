"""What the effort term buys: sampled tokens of a rollout, at an equal solve rate.

Two runs of a seed train from one checkpoint for the same number of steps: `plain` on the grade alone, `effort` also on
the built-in term `effort`, whose weight tunes itself to `--target` of the tokens that solved rollouts took in the first
step. Both are then evaluated on the same held-out tasks. Reported: sampled tokens per rollout, `effort` ÷ `plain`, and
the difference of the solve rates, over the seeds, with 95 % intervals.

`python -m benchmarks.rewards.effort --start CHECKPOINT [--seeds 0 1 2] [--steps 60] [--most RUNS]`
Some minutes a run on two cores. Rows are kept in `runs/`, so it goes on where it broke off; `--most 0` reports them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.learning.reinforcing import reinforce
from benchmarks.learning.seeds import mean, ratio
from benchmarks.report import report
from benchmarks.runs import LAPTOP, brief, new_folder
from etude.config import load
from etude.dashboard.run_view import RunView
from etude.evals import read_rows
from etude.loop.config import RunConfig

WAYS = ("plain", "effort")
EFFORT = "k = 0.02, limit = 64.0, tool_output = 0.0, call = 0.0, turn = 0.0"
"""The price is that of sampled tokens alone, since these are what is compared; a rollout of the example takes 30."""
Row = dict[str, Any]


def one(way: str, seed: int, start: Path, steps: int, heldout: int, target: float, weight: float) -> Row:
    """Train and evaluate: a run's numbers."""
    settings = [
        f"start={start.resolve()}",
        f"seed={seed}",
        "evals.every=100000",
        "rl.checkpoint_every=100000",
        f"rl.steps={steps}",
        f"evals.heldout_tasks={heldout}",
    ]
    if way == "effort":
        kind = f'{{kind = "effort", {EFFORT}}}'
        settings.append(f'rewards.terms=[{{name = "effort", weight = {weight}, target = {target}, kind = {kind}}}]')
    folder = new_folder(f"effort-{way}-{seed}")
    began = time.perf_counter()
    after = asyncio.run(reinforce(folder, load(LAPTOP, RunConfig, settings), heldout=True))
    assert after is not None, "it was evaluated"
    rows = read_rows(folder / "evals" / "after.parquet")
    events = RunView(folder).by_step("rl.step")
    weights = [event.get("reward_weights") for event in events]
    return {
        "way": way,
        "seed": seed,
        "after": brief(after),
        "sampled_mean": round(statistics.fmean(row.sampled for row in rows), 3),
        "sampled_mean_solved": round(statistics.fmean(row.sampled for row in rows if row.reward > 0), 3),
        "sampled_by_step": [round(float(event["sampled_mean"]), 2) for event in events],
        "weight_by_step": [round(one["effort"], 4) if isinstance(one, dict) else 0.0 for one in weights],
        "wall_s": round(time.perf_counter() - began, 1),
    }


def result(rows: list[Row]) -> Row:
    """The seeds that have both runs: tokens and solve rates of `effort` against `plain`."""
    by_seed = {seed: {row["way"]: row for row in rows if row["seed"] == seed} for seed in {row["seed"] for row in rows}}
    both = [found for _, found in sorted(by_seed.items()) if set(found) == set(WAYS)]
    if not both:
        return {"rows": rows}
    tokens = {way: [found[way]["sampled_mean"] for found in both] for way in WAYS}
    rates = {way: [found[way]["after"]["rate"] for found in both] for way in WAYS}
    lower = [plain - effort for plain, effort in zip(rates["plain"], rates["effort"], strict=True)]
    return {
        "seeds": len(both),
        "tokens": {way: mean(found) for way, found in tokens.items()},
        "tokens_effort_over_plain": ratio(tokens["effort"], tokens["plain"]),
        "rates": {way: mean(found) for way, found in rates.items()},
        "rate_lower_by": mean(lower),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, required=True, help="a checkpoint of the example's model")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--heldout", type=int, default=512)
    parser.add_argument("--target", type=float, default=0.6, help="share of the first step's tokens")
    parser.add_argument("--weight", type=float, default=0.8, help="the largest weight")
    parser.add_argument("--most", type=int, default=100, help="runs to make now")
    args = parser.parse_args()
    kept = Path("runs") / "effort-rows.json"
    rows: list[Row] = json.loads(kept.read_text()) if kept.is_file() else []
    there = {(row["way"], row["seed"]) for row in rows}
    wanted = [(way, seed) for seed in args.seeds for way in WAYS if (way, seed) not in there]
    for way, seed in wanted[: args.most]:
        rows.append(one(way, seed, args.start, args.steps, args.heldout, args.target, args.weight))
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(rows))
    settings = {"steps": args.steps, "target": args.target, "weight": args.weight}
    report("effort", {**settings, **result(rows)})


if __name__ == "__main__":
    main()
