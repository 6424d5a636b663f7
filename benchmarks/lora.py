"""Reinforcement learning of adapters (LoRA) against that of all weights from one checkpoint, and what versions weigh.

Everything else is alike: start, tasks, seeds. Adapters take four times the learning rate. Of a mixture of experts, and
of a dense model, which is mid-trained first unless `--dense-start` gives one. Each run is `etude run`, gone on with
where it was broken off; its row is kept beside the runs, and the result is written anew after each. Bytes are of the
delta that an engine fetches for a version, and of a whole snapshot, where a new engine begins.

`python -m benchmarks.lora --start CHECKPOINT [--ways all "rank 4" ...] [--seeds 0] [--steps 40]`
About two minutes a run on two cores; `--table` reports what there is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.numerics_runs import learned, pooled
from benchmarks.report import report
from benchmarks.runs import ETUDE, LAPTOP, ahead, overrides
from etude.dashboard.read import RunView
from etude.training import LearnerConfig, TorchLearner

Row = dict[str, Any]
ALL, DENSE = "all weights", "dense, all weights"
ADAPTERS = "learner.lr=2e-3"  # 4 times that of all weights


TIMES = ("rl_wall_s", "rl_cpu_s", "command_wall_s", "pause_ms_median")
WAYS: dict[str, list[str]] = {
    ALL: [],
    **{f"rank {rank}": [f"learner.lora_rank={rank}", ADAPTERS] for rank in (1, 4, 16)},
    "rank 4 at 10 times": ["learner.lora_rank=4", "learner.lr=5e-3"],
    DENSE: [],
    **{f"dense, rank {rank}": [f"learner.lora_rank={rank}", ADAPTERS] for rank in (1, 4)},
}
DENSE_MODEL = [
    "model.family=qwen3",
    "model.num_experts=0",
    "model.top_k=0",
    "model.dense_size=384",
    "model.hidden_size=160",
    "mid_training.balance=0",
]


def weighed(run: Path) -> Row:
    """What versions took: bytes of the median delta, of a snapshot, and of a learner's checkpoint."""
    view = RunView(run)
    events = view.of("weights.publish")
    return {
        "delta_bytes": round(statistics.median(event["object_bytes"] for event in events[1:])),
        "snapshot_bytes": events[0]["snapshot_bytes"],
        "anchor_bytes": events[0]["anchor_bytes"] or events[0]["object_bytes"],
        "changed_share": round(statistics.median(event["changed_share"] for event in events[1:]), 4),
        "num_versions": len(events),
        "learner_state_bytes": sum(f.stat().st_size for f in (run / "checkpoints" / "final").iterdir()),
    }


def merging(start: Path, rank: int) -> float:
    """CPU milliseconds to merge adapters of a rank into a checkpoint's model: what an adoption adds to a pause, and a
    learner to each step. The median of 20."""
    torch.set_num_threads(1)
    learner = TorchLearner(LearnerConfig(lora_rank=rank))
    learner.load(start)
    took = []
    for _ in range(21):  # the first measures how products are computed
        began = time.process_time()
        learner.trained.settle()
        took.append(1e3 * (time.process_time() - began))
    return round(statistics.median(took[1:]), 2)


def dense_start() -> Path:
    """A dense model, mid-trained as the example's is; gone on with where that was broken off."""
    run = Path("runs") / "lora-dense-start"
    settings = [*DENSE_MODEL, "rl.steps=0", "evals.heldout_tasks=8", "evals.baseline_tasks=1"]
    argv = [*ETUDE, "run", str(LAPTOP), *overrides(settings)]
    argv += ["--resume", str(run)] if (run / "run.json").is_file() else ["--name", run.name]
    if subprocess.run(argv, stdout=sys.stderr).returncode:
        raise SystemExit(f"{' '.join(argv)} failed; see {run}/logs")
    return run / "checkpoints" / "mid"


def result(rows: dict[str, Row], start: Path | None) -> Row:
    """What is reported of the runs that there are. No times of theirs: they were beside others' work, and some were
    broken off."""
    of = {way: found for way in WAYS if (found := [row for row in rows.values() if row["way"] == way])}
    ways = {way: pooled(found) for way, found in of.items()}
    bytes_of = {way: statistics.median(row["delta_bytes"] for row in found) for way, found in of.items()}
    base = {way: DENSE if way.startswith("dense") else ALL for way in of}
    compared = [way for way in of if base[way] != way and base[way] in of]
    against = {way: ahead(ways[base[way]]["after"], ways[way]["after"]) for way in compared}
    return {
        "ways": ways,
        "after_minus_all_weights": against,
        "within_intervals_of_all_weights": {way: found["low"] <= 0 <= found["high"] for way, found in against.items()},
        "delta_bytes": bytes_of,
        "delta_bytes_to_those_of_all_weights": {way: round(bytes_of[way] / bytes_of[base[way]], 4) for way in compared},
        "merging_cpu_ms": {rank: merging(start, rank) for rank in (1, 4, 16)} if start else {},
        "rows": [{key: value for key, value in row.items() if key not in TIMES} for row in rows.values()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, help="a mid-trained checkpoint of the example's model")
    parser.add_argument("--dense-start", type=Path, help="one of a dense model; none: one is made")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations on validation tasks")
    parser.add_argument("--heldout", type=int, default=512)
    parser.add_argument("--name", default="lora", help="what the runs' folders begin with")
    parser.add_argument("--table", action="store_true", help="report the runs that have ended")
    args = parser.parse_args()
    kept = Path("runs") / f"{args.name}-rows.json"
    rows: dict[str, Row] = json.loads(kept.read_text()) if kept.is_file() else {}
    sizes = [f"rl.steps={args.steps}", f"evals.every={args.every}", f"evals.heldout_tasks={args.heldout}"]
    shared, dense = ["evals.baseline_tasks=1", *sizes], args.dense_start
    for seed, way in [] if args.table else [(seed, way) for seed in args.seeds for way in args.ways]:
        name = f"{args.name}-{way.replace(', ', '-').replace(' ', '-')}-{seed}"
        if name in rows:
            continue
        if way.startswith("dense"):
            start = dense = dense or dense_start()
        else:
            start = args.start
        if start is None:
            parser.error("--start CHECKPOINT is wanted")
        settings = [f"start={start.resolve()}", *shared, f"seed={seed}", *WAYS[way]]
        found = learned(name, LAPTOP, settings)
        rows[name] = {"way": way, "seed": seed} | found | weighed(Path("runs") / name)
        kept.write_text(json.dumps(rows))
        report("lora", {"settings": shared, **result(rows, None)})
    report("lora", {"settings": shared, **result(rows, args.start)})


if __name__ == "__main__":
    main()
