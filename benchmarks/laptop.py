"""The whole circle, seed by seed: `examples/laptop` from nothing through the real command line.

Each seed is the run's and the tasks', so that held-out tasks differ, too. What is reported is each run's own
`summary.json`. `python -m benchmarks.laptop [--seeds 0 1 2] [--set a.b=c ...]`
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.report import report
from benchmarks.runs import LAPTOP, brief, interval, start_run, summary
from etude.evals.intervals import over_seeds

COPIED = ("wall_s", "cpu_s", "idle", "lag", "weights", "parity", "invalid", "rollouts", "rl", "peak_memory_bytes")
GOAL = {"before": 0.35, "after": 0.90, "wall_s": 360.0, "peak_memory_bytes": 4 << 30}


def row(seed: int, settings: Sequence[str]) -> dict[str, Any]:
    """One run in numbers. `command_wall_s` is the whole command, starting and stopping included."""
    began = time.perf_counter()
    run = start_run(LAPTOP, f"laptop-{seed}", settings)
    command_wall_s = round(time.perf_counter() - began, 2)
    found = summary(run)
    before, after = found["heldout"]["before"], found["heldout"]["after"]
    during = [{"step": e["step"], "rate": round(e["rate"], 4)} for e in found["heldout"]["during"]]
    return {
        "seed": seed,
        "before": brief(before),
        "during": during,
        "after": brief(after),
        "transfer": {name: brief(one) for name, one in found["transfer"].items()},
        "disjoint": interval(before).disjoint(interval(after)),
        "command_wall_s": command_wall_s,
        "baselines": found["baselines"],
        **{name: found[name] for name in COPIED},
    }


def between_seeds(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean over the seeds with the interval of the variance between them; empty for one seed."""
    if len(rows) < 2:
        return {}
    rates = {
        "before": [r["before"]["rate"] for r in rows],
        "after": [r["after"]["rate"] for r in rows],
        "transfer before": [r["transfer"]["before"]["rate"] for r in rows],
        "transfer after": [r["transfer"]["after"]["rate"] for r in rows],
    }
    found = {name: over_seeds(values) for name, values in rates.items()}
    return {n: {"rate": round(i.value, 4), "low": round(i.low, 4), "high": round(i.high, 4)} for n, i in found.items()}


def verdict(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Which goals every run reached."""
    return {
        "before": all(r["before"]["rate"] <= GOAL["before"] for r in rows),
        "after": all(r["after"]["rate"] >= GOAL["after"] for r in rows),
        "disjoint": all(r["disjoint"] for r in rows),
        "wall_s": all(r["command_wall_s"] <= GOAL["wall_s"] for r in rows),
        "memory": all((r["peak_memory_bytes"] or float("inf")) <= GOAL["peak_memory_bytes"] for r in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="for every run")
    args = parser.parse_args()
    rows = [row(seed, [f"seed={seed}", f"tasks.seed={seed}", *args.set]) for seed in args.seeds]
    result = {"config": str(LAPTOP), "settings": args.set, "goal": GOAL, "reached": verdict(rows)}
    report("laptop", {**result, "seeds": between_seeds(rows), "rows": rows})


if __name__ == "__main__":
    main()
