"""CPU seconds to a solve rate: groups of a fixed size against groups that go on only where the outcome is undecided.

Each run trains from one mid-trained checkpoint at a constant learning rate on one core, until RL has taken so many CPU
seconds or steps (`--budget-s`, `--steps`), and leaves checkpoints. `etude eval` solves the held-out tasks with them,
until two neighbours are found of which one is below the rate and the next one reaches it
(`benchmarks.learning.trl.neighbours`); the CPU seconds at the rate are interpolated between the two. They are those of
all processes of the run. The ones that TRL's run of `benchmarks.learning.trl` has, too, are told apart: machines and
graders (`machines`), and the rest. `rollouts_to_rate` does not depend on how busy the machine is.

`fixed` is the example as it is. `half` has groups of half the size, so that a step takes half the rollouts: what small
steps gain alone. `staged` begins each group with three rollouts, and goes on where their rewards differ
(`experience.min_group_size`). In `dynamic` a step takes two groups, and up to eight until two have a signal. Other ways
are tried with one seed. Shares have the interval of the seeds' ratios.

`signal_until_rate` is the mean variance of the rewards within a group until the rate (p (1 − p) for a task with solve
rate p) as a share of the highest possible one, 1/4. As far as learning goes by the sum of this variance over rollouts,
no choice of tasks needs a smaller share of the rollouts than that: all of its tasks would be solved half of the time.

`beside_trl` puts a way's share of `fixed` beside etude's share of TRL's best setting in `results/trl.json`, which was
measured in the same manner (one core, one engine, the same rate and tasks) with groups of a fixed size, but from
another checkpoint and by another commit. It is a product of two measurements, not a measurement.

`python -m benchmarks.learning.difficulty --start CHECKPOINT [CHECKPOINT ...] [--ways fixed staged] [--seeds 0 1 2]`
`--start`: one checkpoint for all seeds, or one for each. Three minutes a run; rows are kept in `runs/`, so it goes on
where it broke off. `--table` reports what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.journal import digest
from benchmarks.learning import seeds
from benchmarks.learning.reinforcing import reinforce
from benchmarks.learning.trl import ONE_CORE, between, neighbours, one_core
from benchmarks.report import RESULTS, commit, report
from benchmarks.runs import LAPTOP, brief, evaluate, new_folder, rl_cpu_s
from etude.config import load, to_toml
from etude.dashboard.run_view import RunView
from etude.experience.trace_reader import read_outcomes
from etude.experience.traces import trace_path
from etude.loop.config import RunConfig

FIXED = "fixed"
WAYS = {
    FIXED: [],
    "half": ["experience.group_size=4"],
    "dynamic": ["experience.groups_per_step=2", "experience.signal_groups=2"],
    "staged": ["experience.min_group_size=3"],
    "staged, source": ["experience.min_group_size=3", "experience.curriculum=source"],
    "staged, 16": ["experience.min_group_size=3", "experience.group_size=16", "experience.groups_per_step=6"],
}
BOTH = ("worker", "grader", "machines")
"""What the names of processes begin with whose work TRL's run has, too: machines and grading."""
Row = dict[str, Any]
Rows = dict[str, Row]


def train(way: str, seed: int, start: Path, args: argparse.Namespace) -> Row:
    """Train for the budget: checkpoints with what they had cost, by process."""
    settings = [f"start={start.resolve()}", f"seed={seed}", *ONE_CORE, *WAYS[way], *args.set]
    config, folder = load(LAPTOP, RunConfig, settings), new_folder(f"difficulty-{way.replace(', ', '-')}-{seed}")
    every = max(1, round(args.every * 64 / (config.experience.groups_per_step * config.experience.group_size)))
    never = ["evals.every=100000", "rl.steps=1000", f"rl.checkpoint_every={every}"]
    config = load(LAPTOP, RunConfig, [*settings, *never])
    held = list[int]()

    def spent(step: Mapping[str, Any]) -> bool:
        enough = step["step"] >= args.steps or sum(rl_cpu_s(folder, time.time()).values()) >= args.budget_s
        if step["step"] % every == 0 and enough:
            held.append(int(step["step"]))
        return bool(held) and int(step["step"]) > held[0]  # the checkpoint is written

    with one_core():
        asyncio.run(reinforce(folder, config, until=spent))
    steps = RunView(folder).by_step("rl.step")
    rollouts = list(itertools.accumulate(sum(step["lag"].values()) for step in steps))
    points = [
        {
            "step": int(step["step"]),
            "rollouts": num,
            "parts": rl_cpu_s(folder, until=float(step["t"])),
            "checkpoint": str((folder / "checkpoints" / f"step-{int(step['step']):06d}").absolute()),
        }
        for step, num in zip(steps, rollouts, strict=True)
        if step["step"] % every == 0
    ]
    told = ("step", "reward_mean", "num_groups", "no_signal_share", "turns_mean", "sampled_mean")
    rows = [
        {name: round(float(step[name]), 4) for name in told} | {"variance": _variance(folder, int(step["step"]))}
        for step in steps
    ]
    (folder / "config.toml").write_text(to_toml(replace(config, seed=0)))  # the same draws for every evaluation
    size = config.experience.group_size
    return {
        "way": way,
        "seed": seed,
        "start": digest(start),
        "group_size": size,
        "points": points,
        "steps": rows,
        "judged": {},
    }


def _variance(folder: Path, step: int) -> float:
    """The mean over a step's groups of the unbiased variance of their rewards, an estimate of the mean p (1 − p)."""
    _, rollouts = read_outcomes(trace_path(folder / "traces", step))
    groups: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            groups.setdefault(rollout.group_id, []).append(rollout.reward)
    return round(statistics.fmean(statistics.variance(of) for of in groups.values() if len(of) > 1), 4)


def judge(row: Row, at: int, start: Path, args: argparse.Namespace, keep: Any) -> Row:
    """A checkpoint's cost and solve rate; -1 is the start."""
    point = row["points"][at] if at >= 0 else {"step": 0, "parts": {}, "checkpoint": str(start)}
    found = row["judged"].get(str(point["step"]))
    if found is None:
        with one_core():
            config = Path(row["points"][0]["checkpoint"]).parents[1] / "config.toml"
            found = brief(evaluate(Path(point["checkpoint"]), config, split="heldout", num_tasks=args.tasks))
        row["judged"][str(point["step"])] = found
        keep()
    return {"step": point["step"], "cpu_s": math.fsum(point["parts"].values()), **found}


def crossing(row: Row, start: Path, args: argparse.Namespace, keep: Any) -> None:
    """Find where the run reaches the rate: its CPU seconds there, in all and of what TRL has, too."""

    def rate_at(at: int) -> float:
        return float(judge(row, at, start, args, keep)["rate"])

    points = row["points"]
    first = min(range(len(points)), key=lambda at: abs(math.fsum(points[at]["parts"].values()) - args.first_s))
    pair = neighbours(len(points), rate_at, args.rate, first)
    row["cpu_s_to_rate"] = row["machines_s"] = row["rollouts_to_rate"] = None
    if pair is not None:
        low, high = (judge(row, at, start, args, keep) for at in pair)
        row["cpu_s_to_rate"] = between(low, high, args.rate)
        for name, of in (("machines_s", lambda point: _machines(point["parts"])), ("rollouts_to_rate", _rollouts)):
            ends = [of(points[at]) if at >= 0 else 0.0 for at in pair]
            line = [{"rate": one["rate"], "cpu_s": end} for one, end in zip((low, high), ends, strict=True)]
            row[name] = between(*line, args.rate)
    keep()


def _rollouts(point: Row) -> float:
    return float(point["rollouts"])


def _signal(row: Row) -> float:
    """The mean variance of the rewards of a group until the rate, as a share of the highest possible one, 1/4."""
    ended = itertools.accumulate(step["num_groups"] * row["group_size"] for step in row["steps"])
    early = [step for step, num in zip(row["steps"], ended, strict=True) if num <= row["rollouts_to_rate"]]
    variance = math.fsum(step["num_groups"] * step["variance"] for step in early)
    return 4 * variance / math.fsum(step["num_groups"] for step in early)


def _machines(parts: Mapping[str, float]) -> float:
    return math.fsum(cpu_s for name, cpu_s in parts.items() if name.startswith(BOTH))


def result(rows: Sequence[Row]) -> Row:
    """Mean CPU seconds of each way that has all seeds of `fixed`, its share of these, and the product with TRL's."""
    by_way: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_way.setdefault(row["way"], {})[row["seed"]] = row
    wanted = sorted(by_way.get(FIXED, {}))
    whole = {
        way: [of[seed] for seed in wanted]
        for way, of in by_way.items()
        if wanted and all(seed in of and of[seed]["cpu_s_to_rate"] is not None for seed in wanted)
    }
    cpu_s = {way: [float(row["cpu_s_to_rate"]) for row in of] for way, of in whole.items()}
    machines = {way: [float(row["machines_s"]) for row in of] for way, of in whole.items()}
    rollouts = {way: [float(row["rollouts_to_rate"]) for row in of] for way, of in whole.items()}
    rest = {way: [a - b for a, b in zip(cpu_s[way], machines[way], strict=True)] for way in whole}
    shares = {way: seeds.ratio(of, cpu_s[FIXED]) for way, of in cpu_s.items() if FIXED in cpu_s and way != FIXED}
    return {
        "seeds": wanted,
        "cpu_s_to_rate": {way: seeds.mean(of) for way, of in cpu_s.items()},
        "rollouts_to_rate": {
            way: seeds.mean([float(row["rollouts_to_rate"]) for row in of]) for way, of in whole.items()
        },
        "of_which_machines_s": {way: seeds.mean(of) for way, of in machines.items()},
        "not_in_every_seed": sorted(set(by_way) - set(whole)),
        "share_of_fixed": shares,
        "share_of_fixed_by_rollouts": {way: seeds.ratio(rollouts[way], rollouts[FIXED]) for way in shares},
        "share_of_fixed_without_machines": {way: seeds.ratio(rest[way], rest[FIXED]) for way in shares},
        "signal_until_rate": {way: seeds.mean([_signal(row) for row in of]) for way, of in whole.items()},
        "beside_trl": _beside_trl(shares),
    }


def _beside_trl(shares: Mapping[str, Mapping[str, float]]) -> Row:
    """Each way's share of `fixed`, times etude's share of TRL's best setting."""
    trl = json.loads((RESULTS / "trl.json").read_text())
    share, best = trl["compared"]["share"]["ratio"], trl["compared"]["best_of_trl"]
    apart = {
        name: round(
            statistics.fmean(_machines(row["judged"][0]["parts"]) / row["judged"][0]["cpu_s"] for row in rows), 3
        )
        for name in ("etude", best)
        if (rows := [row for row in trl["rows"] if row["name"] == name])
    }
    return {
        "measured": {"commit": trl["commit"], "start": trl["start"], "best_of_trl": best, "etude_share": share},
        "machines_share": apart,
        "product": {way: round(share * found["ratio"], 4) for way, found in shares.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, nargs="+", default=[], help="mid-trained checkpoints")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rate", type=float, default=0.85)
    parser.add_argument("--budget-s", type=float, default=100.0, help="CPU seconds of RL")
    parser.add_argument("--steps", type=int, default=1000, help="of RL, at most")
    parser.add_argument("--first-s", type=float, default=70.0, help="the checkpoint of so many is evaluated first")
    parser.add_argument("--every", type=int, default=4, help="steps of 64 rollouts between checkpoints")
    parser.add_argument("--tasks", type=int, default=512, help="of each evaluation")
    parser.add_argument("--name", default="difficulty", help="of the file in runs/ that keeps the rows")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--no-judge", action="store_true", help="train only")
    parser.add_argument("--table", action="store_true", help="report what there is")
    args = parser.parse_args()
    kept = Path("runs") / f"{args.name}-rows.json"
    rows: Rows = json.loads(kept.read_text()) if kept.is_file() else {}

    def keep() -> None:
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(rows))

    for number, seed in enumerate([] if args.table else args.seeds):
        start = args.start[number if len(args.start) > 1 else 0]
        for way in args.ways:
            name = f"{way} {seed}"
            if name not in rows:
                rows[name] = {**train(way, seed, start, args), "commit": commit()}
                keep()
            if not args.no_judge and "cpu_s_to_rate" not in rows[name]:
                crossing(rows[name], start, args, keep)
    done = [row for row in rows.values() if "cpu_s_to_rate" in row]
    if done:
        told = [{**row, "points": [{**p, "checkpoint": None} for p in row["points"]]} for row in done]
        settings = {way: WAYS[way] for way in WAYS if any(row["way"] == way for row in done)}
        report("difficulty", {"rate": args.rate, "ways": settings, **result(done), "rows": told})


if __name__ == "__main__":
    main()
