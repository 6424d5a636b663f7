"""The laptop example on what clusters are made of, against the example as it is, from one mid-trained checkpoint.

Ways: a learner of two ranks (FSDP2, expert parallel); vLLM's CPU build as one of two engines, in native mode and
float32 (`etude engines install vllm`), with what each engine did and how far its probes were from the learner. Solve
rates on held-out tasks with their intervals, pooled over seeds.
`python -m benchmarks.learning.cluster_runs --start CHECKPOINT [--ways default "two ranks" vLLM] [--seeds 0 1 2]
[--steps 40]`
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from benchmarks.learning.ways import Row, Rows, against, arguments, by_way, play, pooled, within
from benchmarks.report import report
from etude.dashboard.run_view import RunView
from etude.evals.parity import budget_of

DEFAULT = "default"
WAYS = {
    DEFAULT: [],
    "two ranks": ["learner.ranks=2", "learner.expert_parallel=2"],
    "vLLM": ["numerics.mode=native", 'fleet.engines=["reference","vllm"]'],
}


def engines(run: Path) -> Row:
    """What each engine did and how far its probes were from the learner."""
    view, found = RunView(run), defaultdict[str, Row](dict)
    for name in ("engine-0", "engine-1"):
        loads = [event for event in view.events("engine.load") if event["process"] == name]
        found[name]["tokens"] = sum(event["tokens"] for event in loads)
        probes = [event for event in view.events("engine.probe") if event["engine"] == name]
        found[name]["probes"] = len(probes)
        for field in ("k3", "ratio_p99", "ratio_max"):
            found[name][f"{field}_max"] = max((event[field] for event in probes), default=None)
    return {"engines": dict(found)}


def result(rows: Rows) -> Row:
    """What is reported of the runs that there are. Their times are not compared: some ran beside other work."""
    ways = {way: pooled(found) for way, found in by_way(rows, WAYS).items()}
    differences, budget = against(ways, lambda way: DEFAULT), budget_of("float32")
    return {
        "ways": ways,
        "after_minus_default": differences,
        "within_intervals_of_the_default": within(differences),
        "probes_budget": {"k3": budget.k3, "ratio_p99": budget.ratio_p99},
        "rows": list(rows.values()),
    }


def main() -> None:
    args = arguments(__doc__, WAYS, name="cluster", seeds=[0, 1, 2]).parse_args()
    alike, rows = play(args, "cluster_runs", WAYS, result, more=engines)
    report("cluster_runs", {"settings": alike, **result(rows)})


if __name__ == "__main__":
    main()
