"""Reinforcement learning under each way to keep engine and learner together, from one mid-trained checkpoint.

The default is exact float32 without replay. Against it: native arithmetic in float32, engines in bfloat16 with routes
replayed, and each low-precision format. Everything else is alike, so only RL differs: the same start, tasks and seeds.
Each run is `etude run`; one that was broken off is gone on with, one that has ended is not run again: its row is kept
beside the runs, and the result is written anew after each. Solve rates are on validation tasks during RL and on
held-out tasks before and after, with 95 % intervals; seeds are pooled for the difference from the default. How long RL
took is told as the median over seeds, native float32 beside it: what exactness costs from end to end.

`python -m benchmarks.numerics_runs --start CHECKPOINT [--ways default native ...] [--seeds 0 1 2] [--steps 40]`
A minute and a half a run on two cores; `--table` prints what there is, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import report
from benchmarks.runs import ETUDE, LAPTOP, ahead, brief, overrides, rl_cpu_s, summary
from etude.dashboard.read import RunView
from etude.evals.intervals import wilson

Row = dict[str, Any]
DEFAULT, NATIVE = "default", "native"
WAYS = {
    DEFAULT: [],
    NATIVE: ["numerics.mode=native"],
    "bf16 engines, replayed": ["numerics.mode=native", "engine.dtype=bfloat16"],
    **{kind: [f"numerics.quantise={kind}"] for kind in ("mxfp8", "nvfp4", "mxfp4")},
}


def learned(name: str, config: Path, settings: Sequence[str]) -> Row:
    """A run's row, once it has ended; gone on with where its folder is there."""
    folder, began = Path("runs") / name, time.perf_counter()
    argv = [*ETUDE, "run", str(config), *overrides(settings)]
    argv += ["--resume", str(folder)] if (folder / "run.json").is_file() else ["--name", name]
    done = subprocess.run(argv, stdout=sys.stderr)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with exit code {done.returncode}; see {folder}/logs")
    facts, view = summary(folder), RunView(folder)
    during = [{"step": event["step"], **brief(event)} for event in view.evaluations_during()]
    rewards = [{"step": event["step"], "reward": round(event["reward_mean"], 4)} for event in view.of("rl.step")]
    return {
        "before": brief(facts["heldout"]["before"]),
        "during": during,
        "after": brief(facts["heldout"]["after"]),
        "rewards": rewards,
        "parity": facts["parity"],
        "bytes_per_version": round(facts["weights"]["object_bytes"] / max(1, facts["weights"]["num_publishes"])),
        "rl_wall_s": facts["wall_s"]["rl"],
        "rl_cpu_s": round(sum(rl_cpu_s(folder).values()), 1),
        "command_wall_s": round(time.perf_counter() - began, 1),
    }


def pooled(rows: Sequence[Row]) -> Row:
    """The seeds of a way as one: solve rates before, during and after, with their intervals."""
    steps = [point["step"] for point in rows[0]["during"]]
    points = {"before": [row["before"] for row in rows], "after": [row["after"] for row in rows]}
    points |= {str(step): [p for row in rows for p in row["during"] if p["step"] == step] for step in steps}
    return {when: _together(found) for when, found in points.items()}


def _together(rates: Sequence[Row]) -> Row:
    solved, tasks = sum(rate["solved"] for rate in rates), sum(rate["num_tasks"] for rate in rates)
    one = wilson(solved, tasks)
    return {"rate": round(one.value, 4), "low": round(one.low, 4), "high": round(one.high, 4), "num_tasks": tasks}


def result(rows: dict[str, Row]) -> Row:
    """What is reported of the runs that there are; the default is ahead of or behind each way by an interval."""
    of = {way: found for way in WAYS if (found := [row for row in rows.values() if row["way"] == way])}
    ways = {way: pooled(found) for way, found in of.items()}
    seconds = {
        way: {key: statistics.median(row[key] for row in found) for key in ("rl_wall_s", "rl_cpu_s")}
        for way, found in of.items()
    }
    base, paired = ways.get(DEFAULT), {DEFAULT, NATIVE} <= ways.keys()
    against = {way: ahead(base["after"], own["after"]) for way, own in ways.items() if base and way != DEFAULT}
    within = {way: found["low"] <= 0 <= found["high"] for way, found in against.items()}
    costs = {key: round(s / seconds[NATIVE][key], 3) for key, s in seconds[DEFAULT].items()} if paired else None
    return {
        "ways": ways,
        "after_minus_default": against,
        "within_intervals_of_the_default": within,
        "seconds": seconds,
        "exact_to_native_from_end_to_end": costs,
        "rows": list(rows.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, help="a mid-trained checkpoint")
    parser.add_argument("--config", type=Path, default=LAPTOP)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations on validation tasks")
    parser.add_argument("--heldout", type=int, default=512)
    parser.add_argument("--name", default="numerics", help="what the runs' folders begin with")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--table", action="store_true", help="report the runs that have ended")
    args = parser.parse_args()
    kept = Path("runs") / f"{args.name}-rows.json"
    rows: dict[str, Row] = json.loads(kept.read_text()) if kept.is_file() else {}
    sizes = [f"rl.steps={args.steps}", f"evals.every={args.every}", f"evals.heldout_tasks={args.heldout}"]
    alike = ["evals.baseline_tasks=1", *sizes, *args.set]
    if not args.table:
        if args.start is None:
            parser.error("--start CHECKPOINT is wanted")
        shared = [f"start={args.start.resolve()}", *alike]
        for seed in args.seeds:  # so that one seed of all ways is there early
            for way in args.ways:
                name = f"{args.name}-{way.replace(', ', '-').replace(' ', '-')}-{seed}"
                if name not in rows:
                    settings = [*shared, f"seed={seed}", *WAYS[way]]
                    rows[name] = {"way": way, "seed": seed} | learned(name, args.config, settings)
                    kept.write_text(json.dumps(rows))
                    report("numerics_runs", {"settings": alike, **result(rows)})
    report("numerics_runs", {"settings": alike, **result(rows)})


if __name__ == "__main__":
    main()
