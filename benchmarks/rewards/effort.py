"""What the effort term buys: sampled tokens of a rollout, at an equal solve rate.

The policy of `wordy.toml` says what it is going to do before each call, since its demonstrations do. All seeds share
one mid-trained checkpoint. A `start` of each seed is trained from it by RL on the grade alone. From there two runs
train for the same number of steps: `plain` on the grade alone, `effort` also on the built-in term `effort`, whose
weight tunes itself to `--target` of the tokens that solved rollouts took in the first step. Both are then evaluated on
the same held-out tasks. Reported: sampled tokens per rollout, `effort` ÷ `plain`, and the difference of the solve
rates, over the seeds, with 95 % intervals.

Whether giving up early pays is measured by `benchmarks.rewards.surrender`.

`python -m benchmarks.rewards.effort [--seeds 0 1 2] [--ways plain effort] [--most RUNS]`
Minutes a run on one core. Rows are kept in `runs/`, so it goes on where it broke off; `--most 0` reports them.
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
from benchmarks.runs import brief, new_folder, start_run
from etude.config import load
from etude.dashboard.run_view import RunView
from etude.evals import read_rows
from etude.experience.trace_reader import read_outcomes
from etude.experience.traces import trace_path
from etude.loop.config import RunConfig
from etude.records import Graded

CONFIG = Path(__file__).with_name("wordy.toml")
SHORT = ("rl.steps=1", "evals.heldout_tasks=16", "evals.baseline_tasks=1")
"""Settings of the run that makes the mid-trained checkpoint."""
START = "start"
COMPARED = ("plain", "effort")
WATCHED = '{name = "gave_up", weight = 0.0, kind = "benchmarks.rewards.wordy:GaveUp"}'
COST = "k = 0.02, limit = 96.0, tool_output = 0.0, call = 0.0, turn = 0.0"
"""The price is that of sampled tokens alone, since these are what is compared."""
LAST = 5
"""Steps at the end of a run whose rollouts are reported."""
GOAL = {"tokens_effort_over_plain": 0.75, "rate_lower_by": 0.01}
Row = dict[str, Any]


def one(way: str, seed: int, checkpoint: Path, steps: int, heldout: int, target: float, weight: float) -> Row:
    """Train and, where two ways are compared, evaluate: a run's numbers."""
    terms = [WATCHED]
    if way == "effort":
        terms.append(f'{{name = "cost", weight = {weight}, target = {target}, kind = {{kind = "effort", {COST}}}}}')
    settings = [
        f"start={checkpoint.resolve()}",
        f"seed={seed}",
        f"rl.checkpoint_every={steps}",
        f"rl.steps={steps}",
        f"evals.heldout_tasks={heldout}",
        f"rewards.terms=[{', '.join(terms)}]",
    ]
    folder = new_folder(f"effort-{way}-{seed}")
    began = time.perf_counter()
    after = asyncio.run(reinforce(folder, load(CONFIG, RunConfig, settings), heldout=way in COMPARED))
    events = RunView(folder).by_step("rl.step")
    graded = {step: outcomes(folder, step) for step in range(1, steps + 1)}
    last = [one for step in range(max(1, steps + 1 - LAST), steps + 1) for one in graded[step]]
    row: Row = {
        "way": way,
        "seed": seed,
        "folder": str(folder),
        "sampled_by_step": [round(float(event["sampled_mean"]), 2) for event in events],
        "solved_by_step": [round(statistics.fmean(one.grade > 0 for one in graded[step]), 4) for step in graded],
        "weight_by_step": [round(event.get("reward_weights", {}).get("cost", 0.0), 4) for event in events],
        "solved_last": round(statistics.fmean(one.grade > 0 for one in last), 4),
        "gave_up_last": round(statistics.fmean(bool(one.values["gave_up"]) for one in last), 4),
        "wall_s": round(time.perf_counter() - began, 1),
    }
    if after is not None:
        rollouts = read_rows(folder / "evals" / "after.parquet")
        row["after"] = brief(after)
        row["sampled_mean"] = round(statistics.fmean(one.sampled for one in rollouts), 3)
        row["sampled_mean_solved"] = round(statistics.fmean(one.sampled for one in rollouts if one.solved), 3)
    return row


def outcomes(folder: Path, step: int) -> list[Graded]:
    """The graded rollouts of a step."""
    _, rollouts = read_outcomes(trace_path(folder / "traces", step))
    return [one.outcome for one in rollouts if isinstance(one.outcome, Graded)]


def result(rows: list[Row]) -> Row:
    """Tokens and solve rates of `effort` against `plain`, over the seeds."""
    found: Row = {}
    if both := _paired(rows, COMPARED):
        tokens = {way: [pair[way]["sampled_mean"] for pair in both] for way in COMPARED}
        rates = {way: [pair[way]["after"]["rate"] for pair in both] for way in COMPARED}
        lower = [plain - effort for plain, effort in zip(rates["plain"], rates["effort"], strict=True)]
        found |= {
            "seeds": len(both),
            "tokens": {way: mean(one) for way, one in tokens.items()},
            "tokens_effort_over_plain": ratio(tokens["effort"], tokens["plain"]),
            "rates": {way: mean(one) for way, one in rates.items()},
            "rate_lower_by": mean(lower),
            "gave_up": {way: mean([pair[way]["gave_up_last"] for pair in both]) for way in COMPARED},
            "goal": GOAL,
        }
        found["reached"] = {
            "tokens_effort_over_plain": found["tokens_effort_over_plain"]["ratio"] <= GOAL["tokens_effort_over_plain"],
            "rate_lower_by": found["rate_lower_by"]["mean"] <= GOAL["rate_lower_by"],
        }
    return found | {"rows": rows}


def _paired(rows: list[Row], ways: tuple[str, ...]) -> list[dict[str, Row]]:
    """The rows by way of each seed that has all of `ways`."""
    by_seed = {seed: {row["way"]: row for row in rows if row["seed"] == seed} for seed in {row["seed"] for row in rows}}
    return [found for _, found in sorted(by_seed.items()) if set(ways) <= set(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=COMPARED, default=[*COMPARED])
    parser.add_argument("--start-steps", type=int, default=25, help="of a start")
    parser.add_argument("--steps", type=int, default=25, help="of the two runs from a start")
    parser.add_argument("--heldout", type=int, default=512)
    parser.add_argument("--target", type=float, default=0.5, help="share of the first step's tokens")
    parser.add_argument("--weight", type=float, default=0.8, help="the largest weight")
    parser.add_argument("--most", type=int, default=100, help="runs to make now")
    args = parser.parse_args()
    kept = Path("runs") / "effort-rows.json"
    state: Row = json.loads(kept.read_text()) if kept.is_file() else {"mid": "", "rows": []}

    def made(way: str, seed: int) -> Row | None:
        return next((row for row in state["rows"] if (row["way"], row["seed"]) == (way, seed)), None)

    num_steps = {START: args.start_steps, **dict.fromkeys(COMPARED, args.steps)}
    order = [(way, seed) for seed in args.seeds for way in (START, *COMPARED)]
    wanted = [(way, seed) for way, seed in order if way in (START, *args.ways) and made(way, seed) is None]
    for way, seed in wanted[: args.most]:
        if not state["mid"]:
            state["mid"] = str(start_run(CONFIG, "effort-mid", SHORT) / "checkpoints" / "mid")
            kept.write_text(json.dumps(state))
        start, checkpoint = made(START, seed), Path(state["mid"])
        if way in COMPARED and start is not None:
            checkpoint = Path(start["folder"]) / "checkpoints" / f"step-{args.start_steps:06d}"
        state["rows"].append(one(way, seed, checkpoint, num_steps[way], args.heldout, args.target, args.weight))
        kept.write_text(json.dumps(state))
    names = ("start_steps", "steps", "target", "weight")
    settings = {"config": CONFIG.name, "cost": COST, **{name: getattr(args, name) for name in names}}
    rows = [{name: value for name, value in row.items() if name != "folder"} for row in state["rows"]]
    report("effort", {**settings, **result(rows)})


if __name__ == "__main__":
    main()
