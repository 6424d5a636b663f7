"""The laptop example with vLLM's CPU build as one of its two engines, against the example as it is.

One whole run in native mode, `fleet.engines = ["reference", "vllm"]`, float32 unless set otherwise; the example's own
solve rates are read from its committed result. vLLM has to be installed (`etude engines install vllm`). With `--start`
a run begins from a mid-trained checkpoint: what comes before RL is the same program, whatever the engines are.
`python -m benchmarks.vllm_run [--seed 0] [--start CHECKPOINT] [--set a.b=c ...]`
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, report
from benchmarks.runs import LAPTOP, ahead, brief, interval, start_run, summary
from etude.dashboard.read import RunView
from etude.evals.parity import budget_of
from etude.inference.vllm.environment import required_version

SETTINGS = ["numerics.mode=native", 'fleet.engines=["reference","vllm"]']
COPIED = ("wall_s", "cpu_s", "lag", "parity", "invalid", "rollouts", "rl", "peak_memory_bytes")


def engines(run: Path) -> dict[str, dict[str, Any]]:
    """What each engine did and how far its probes were from the learner."""
    view, found = RunView(run), defaultdict[str, dict[str, Any]](dict)
    for name in ("engine-0", "engine-1"):
        loads = [event for event in view.of("engine.load") if event["process"] == name]
        found[name]["tokens"] = sum(event["tokens"] for event in loads)
        probes = [event for event in view.of("engine.probe") if event["engine"] == name]
        found[name]["probes"] = len(probes)
        for field in ("k3", "ratio_p99", "ratio_max"):
            found[name][f"{field}_max"] = max((event[field] for event in probes), default=None)
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="a mid-trained checkpoint of the same seed")
    parser.add_argument("--run", type=Path, help="read this run, which has ended, in place of making one")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    args = parser.parse_args()
    settings = [f"seed={args.seed}", f"tasks.seed={args.seed}", *SETTINGS, *args.set]
    start = [f"start={args.start}"] if args.start else []
    run = args.run or start_run(LAPTOP, f"vllm-{args.seed}", [*settings, *start])
    found = summary(run)
    usual = {row["seed"]: row for row in json.loads((RESULTS / "laptop.json").read_text())["rows"]}[args.seed]
    before, after = found["heldout"]["before"], found["heldout"]["after"]
    dtype = next((one.partition("=")[2] for one in args.set if one.startswith("engine.dtype=")), "float32")
    budget = budget_of(dtype)
    report(
        "vllm_run",
        {
            "config": str(LAPTOP),
            "settings": settings,
            "vllm": required_version(),
            "started_from": "the mid-trained checkpoint of the example's run of this seed" if args.start else "nothing",
            "before": brief(before),
            "after": brief(after),
            "default": {"before": usual["before"], "after": usual["after"]},
            "ahead_of_default": ahead(usual["after"], after),
            "intervals_overlap": not interval(after).disjoint(interval(usual["after"])),
            "budget": {"k3": budget.k3, "ratio_p99": budget.ratio_p99},
            "engines": engines(run),
            **{name: found[name] for name in COPIED},
        },
    )


if __name__ == "__main__":
    main()
