"""Reinforcement learning of adapters (LoRA) against that of all weights from one checkpoint, and what versions weigh.

Adapters take four times the learning rate. Of a mixture of experts, and of a dense model, which is mid-trained first
unless `--dense-start` gives one. Runs as in `benchmarks.learning.ways`. Bytes are of the delta that an engine fetches
for a version, and of a whole snapshot, where a new engine begins.

`python -m benchmarks.learning.lora --start CHECKPOINT [--ways all "rank 4" ...] [--seeds 0] [--steps 40]`
About two minutes a run on two cores; `--table` reports what there is.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.learning.ways import Row, Rows, against, arguments, by_way, play, pooled, within
from benchmarks.report import report
from benchmarks.runs import ETUDE, LAPTOP, overrides
from etude.dashboard.run_view import RunView
from etude.training import LearnerConfig, TorchLearner

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
    events = view.events("weights.publish")
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
        learner.trainable.sync_model()
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


def result(rows: Rows) -> Row:
    """What is reported of the runs that there are. No times of theirs: they were beside others' work, and some were
    broken off."""
    of = by_way(rows, WAYS)
    ways = {way: pooled(found) for way, found in of.items()}
    bytes_of = {way: statistics.median(row["delta_bytes"] for row in found) for way, found in of.items()}
    differences = against(ways, base_of)
    shares = {way: round(bytes_of[way] / bytes_of[base_of(way)], 4) for way in differences}
    return {
        "ways": ways,
        "after_minus_all_weights": differences,
        "within_intervals_of_all_weights": within(differences),
        "delta_bytes": bytes_of,
        "delta_bytes_to_those_of_all_weights": shares,
        "rows": [{key: value for key, value in row.items() if key not in TIMES} for row in rows.values()],
    }


def base_of(way: str) -> str:
    """What a way is compared with."""
    return DENSE if way.startswith("dense") else ALL


def main() -> None:
    parser = arguments(__doc__, WAYS, name="lora", seeds=[0])
    parser.add_argument("--dense-start", type=Path, help="one of a dense model; none: one is made")
    args = parser.parse_args()

    def start_of(way: str) -> Path | None:
        if base_of(way) == ALL:
            return Path(args.start) if args.start else None
        args.dense_start = args.dense_start or dense_start()
        return Path(args.dense_start)

    alike, rows = play(args, "lora", WAYS, result, start_of=start_of, more=weighed)
    merged = {rank: merging(args.start, rank) for rank in (1, 4, 16)} if args.start else {}
    report("lora", {"settings": alike, "merging_cpu_ms": merged, **result(rows)})


if __name__ == "__main__":
    main()
