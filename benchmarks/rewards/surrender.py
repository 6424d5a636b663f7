"""Whether giving up early pays, with the effort term and with a naive price of length, where half of the attempts fail.

Half of the tasks of `wordy` do not say the number that a function should return, so an attempt at them is right by
chance, one time in ten; and one demonstration in seven submits at once. Each seed trains two runs from one mid-trained
checkpoint, with equal settings except for one term of weight 1, from the first step on: `effort` has the built-in term,
`length` charges the same cost to every rollout, solved or not. A sampled token costs 1/60, up to 1.

Reported over the seeds, with 95 % intervals, for tasks with and without the number: the shares of rollouts that were
submitted without an edit and that were solved, in the first and the last steps; and in the first steps the mean reward
of rollouts that gave up minus that of the others: giving up pays where this is above 0.

`python -m benchmarks.rewards.surrender [--seeds 0 1 2] [--steps 16]`
Two minutes a run on one core. Rows are kept (`benchmarks.journal`), so it goes on where it broke off.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.journal import Journal, digest
from benchmarks.learning.reinforcing import reinforce
from benchmarks.learning.seeds import mean
from benchmarks.report import report
from benchmarks.rewards.effort import CONFIG, SHORT, WATCHED
from benchmarks.runs import new_folder, start_run
from etude.config import load
from etude.experience.trace_reader import RecordedRollout, read_outcomes
from etude.experience.traces import trace_path
from etude.loop.config import RunConfig
from etude.records import Graded

WAYS = {"effort": "effort", "length": "benchmarks.rewards.wordy:LengthPenalty"}
SOURCE = 'tasks.source={kind = "benchmarks.rewards.wordy:Wordy", seed = 0, unknowable = 0.5, gives_up = 0.15}'
COST = "q = 0.0, limit = 60.0, tool_output = 0.0, call = 0.0, turn = 0.0"
FAMILIES = {"wordy": "with the number", "unknowable": "without the number"}
ENDS = 3
"""How many of the first steps, and how many of the last ones, are reported."""
Row = dict[str, Any]


def one(way: str, seed: int, *, start: Path, steps: int) -> Row:
    """Train, and return what became of the rollouts of the first and the last steps."""
    cost = f'{{name = "cost", weight = 1.0, kind = {{kind = "{WAYS[way]}", {COST}}}}}'
    settings = [
        f"start={start.resolve()}",
        f"seed={seed}",
        f"rl.steps={steps}",
        f"rl.checkpoint_every={steps}",
        f"rewards.terms=[{WATCHED}, {cost}]",
        SOURCE,
    ]
    folder, began = new_folder(f"surrender-{way}-{seed}"), time.perf_counter()
    asyncio.run(reinforce(folder, load(CONFIG, RunConfig, settings)))
    rollouts = {step: read_outcomes(trace_path(folder / "traces", step))[1] for step in range(1, steps + 1)}
    ends = {
        "first": [one for step in range(1, ENDS + 1) for one in rollouts[step]],
        "last": [one for step in range(steps + 1 - ENDS, steps + 1) for one in rollouts[step]],
    }
    row: Row = {"way": way, "seed": seed, "gave_up_by_step": [shares(rollouts[step])["gave_up"] for step in rollouts]}
    for family, name in FAMILIES.items():
        row[name] = {end: shares([one for one in found if one.family == family]) for end, found in ends.items()}
    return row | {"wall_s": round(time.perf_counter() - began, 1)}


def shares(rollouts: Sequence[RecordedRollout]) -> dict[str, float]:
    """The shares of graded rollouts that gave up and that were solved, and what giving up gained in mean reward."""
    graded = [(one.outcome, one.reward) for one in rollouts if isinstance(one.outcome, Graded)]
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for outcome, reward in graded:
        if reward is not None:
            rewards[bool(outcome.values["gave_up"])].append(reward)
    found = {
        "num_rollouts": float(len(graded)),
        "gave_up": round(statistics.fmean(bool(outcome.values["gave_up"]) for outcome, _ in graded), 4),
        "solved": round(statistics.fmean(outcome.grade > 0 for outcome, _ in graded), 4),
    }
    if all(rewards.values()):
        gain = statistics.fmean(rewards[True]) - statistics.fmean(rewards[False])
        found["gain_of_giving_up"] = round(gain, 4)
    return found


def result(rows: Sequence[Row]) -> Row:
    """The means over the seeds, and whether giving up became more or less frequent in every seed."""
    found: Row = {}
    for way in WAYS:
        of = [row for row in rows if row["way"] == way]
        found[way] = {
            name: {
                end: {key: mean([row[name][end][key] for row in of]) for key in ("gave_up", "solved")}
                for end in ("first", "last")
            }
            for name in FAMILIES.values()
        }
        for name in FAMILIES.values():
            gains = [row[name]["first"].get("gain_of_giving_up") for row in of]
            found[way][name]["gain_of_giving_up"] = mean([gain for gain in gains if gain is not None])
            ends = [(row[name]["first"]["gave_up"], row[name]["last"]["gave_up"]) for row in of]
            found[way][name]["seeds_in_which_it_spread"] = sum(last > first for first, last in ends)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    journal = Journal("surrender")
    mid = journal.once({"mid": SOURCE}, lambda: {"run": str(start_run(CONFIG, "surrender-mid", [*SHORT, SOURCE]))})
    start = Path(mid["run"]) / "checkpoints" / "mid"
    key = {"start": digest(start), "steps": args.steps, "cost": COST}
    rows = [
        journal.once({"way": way, "seed": seed, **key}, partial(one, way, seed, start=start, steps=args.steps))
        for seed in args.seeds
        for way in WAYS
    ]
    settings = {"config": CONFIG.name, "source": SOURCE, "cost": COST, "steps": args.steps, "ends": ENDS}
    report("surrender", {**settings, "seeds": args.seeds, **result(rows), "rows": rows})


if __name__ == "__main__":
    main()
