"""Reinforcement learning in each low-precision format against the default, from one mid-trained checkpoint.

Everything but `numerics.quantise` is alike, so only RL differs: the same start, tasks and seeds. Each run is
`etude run`; one that was broken off is gone on with, one that has ended is not run again: its row is kept beside the
runs, and the result is written anew after each. Solve rates are on validation tasks during RL and on held-out tasks
before and after, with 95 % intervals; seeds are pooled for the difference from the default.

`python -m benchmarks.quantised_runs --start CHECKPOINT [--formats none mxfp8 nvfp4 mxfp4] [--seeds 0 1 2] [--steps 40]`
A minute and a half a run on two cores; `--table` prints what there is, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
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
from etude.numerics.config import Quantise

Row = dict[str, Any]


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
    """The seeds of a format as one: solve rates before, during and after, with their intervals."""
    steps = [point["step"] for point in rows[0]["during"]]
    points = {"before": [row["before"] for row in rows], "after": [row["after"] for row in rows]}
    points |= {str(step): [p for row in rows for p in row["during"] if p["step"] == step] for step in steps}
    return {when: _together(found) for when, found in points.items()}


def _together(rates: Sequence[Row]) -> Row:
    solved, tasks = sum(rate["solved"] for rate in rates), sum(rate["num_tasks"] for rate in rates)
    one = wilson(solved, tasks)
    return {"rate": round(one.value, 4), "low": round(one.low, 4), "high": round(one.high, 4), "num_tasks": tasks}


def result(rows: dict[str, Row]) -> Row:
    """What is reported of the runs that there are; the default is ahead of or behind each format by an interval."""
    of = {kind: [row for row in rows.values() if row["quantise"] == kind] for kind in Quantise}
    formats = {str(kind): pooled(found) for kind, found in of.items() if found}
    base = formats.get(str(Quantise.NONE))
    against = {kind: ahead(base["after"], own["after"]) for kind, own in formats.items() if base and kind != "none"}
    within = {kind: found["low"] <= 0 <= found["high"] for kind, found in against.items()}
    return {
        "formats": formats,
        "after_minus_default": against,
        "within_intervals_of_the_default": within,
        "rows": list(rows.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, help="a mid-trained checkpoint")
    parser.add_argument("--config", type=Path, default=LAPTOP)
    parser.add_argument("--formats", nargs="+", type=Quantise, default=list(Quantise))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations on validation tasks")
    parser.add_argument("--heldout", type=int, default=512)
    parser.add_argument("--name", default="quantised", help="what the runs' folders begin with")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--table", action="store_true", help="report the runs that have ended")
    args = parser.parse_args()
    kept = Path("runs") / f"{args.name}-rows.json"
    rows: dict[str, Row] = json.loads(kept.read_text()) if kept.is_file() else {}
    if not args.table:
        if args.start is None:
            parser.error("--start CHECKPOINT is wanted")
        sizes = [f"rl.steps={args.steps}", f"evals.every={args.every}", f"evals.heldout_tasks={args.heldout}"]
        shared = [f"start={args.start.resolve()}", "evals.baseline_tasks=1", *sizes, *args.set]
        for seed in args.seeds:  # so that a few seeds of all formats are there early
            for kind in args.formats:
                name = f"{args.name}-{kind}-{seed}"
                if name not in rows:
                    settings = [*shared, f"seed={seed}", f"numerics.quantise={kind}"]
                    rows[name] = {"quantise": str(kind), "seed": seed} | learned(name, args.config, settings)
                    kept.write_text(json.dumps(rows))
                    report("quantised_runs", {"settings": shared[1:], **result(rows)})
    report("quantised_runs", {"settings": args.set, **result(rows)})


if __name__ == "__main__":
    main()
