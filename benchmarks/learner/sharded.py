"""A learner over two ranks against one process: the same losses, and in exact mode the same bytes.

20 steps of the laptop's model over two ranks of FSDP2, with and without expert parallelism, with AdamW and with Muon;
against one process that computes the ranks' shares in turn (digests of what both publish), and against one that knows
of no shares (losses). Rewards alternate, samples are the first weights' own once rounded to bf16, so ratios leave 1
step by step.

Whole runs with such a learner are in `benchmarks.learning.cluster_runs`.

`python -m benchmarks.learner.sharded --start CHECKPOINT [--steps 20]`
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.learner.sharded_ranks import Job, Trained, alone, batches, together
from benchmarks.report import report
from etude.numerics.config import ComputeDtype, Mode, NumericsConfig
from etude.training import LearnerConfig
from etude.training.config import LiveWeights, OptimizerKind
from etude.training.data_parallel import run_ranks

LENGTHS = [90, 160, 48, 120, 70, 110]
EXACT, NATIVE = NumericsConfig(), NumericsConfig(mode=Mode.NATIVE)
Row = dict[str, Any]


def cases(start: Path, folder: Path, steps: int) -> dict[str, Job]:
    """What two ranks are asked."""
    two = LearnerConfig(ranks=2, replay_routes=False)
    experts = replace(two, expert_parallel=2)
    exact = batches(start, LENGTHS, steps=steps, numerics=EXACT)
    bf16 = batches(start, LENGTHS, steps=steps, numerics=NATIVE, dtype="bfloat16")
    settings = {
        "FSDP2": (two, exact, EXACT),
        "FSDP2, expert parallel": (experts, exact, EXACT),
        "FSDP2, expert parallel, Muon": (replace(experts, optimizer=OptimizerKind.MUON), exact, EXACT),
        "FSDP2, expert parallel, float32 weights": (replace(experts, weights=LiveWeights.F32), exact, EXACT),
        "FSDP2, context parallel": (replace(two, context_parallel=2), exact, EXACT),
        "FSDP2, expert parallel, native bf16": (replace(experts, dtype=ComputeDtype.BFLOAT16), bf16, NATIVE),
    }
    return {
        name: Job(start, folder / str(i), config, given, numerics)
        for i, (name, (config, given, numerics)) in enumerate(settings.items())
    }


def apart(ranks: Trained, one: Trained) -> Row:
    """Largest differences of two trainings, step by step, by the largest number that the one had: a loss may be 0."""
    pairs = {"loss": (ranks.losses, one.losses), "grad_norm": (ranks.norms, one.norms)}
    return {
        what: max(abs(a - b) for a, b in zip(*both, strict=True)) / max(map(abs, both[1]))
        for what, both in pairs.items()
    }


def compared(name: str, job: Job, ranks: list[Trained]) -> Row:
    """Two ranks' steps against one process's."""
    shares = alone(replace(job, store=job.store.with_suffix(".shares")))
    plain = replace(job.config, ranks=1, expert_parallel=1, context_parallel=1)
    one = alone(replace(job, config=plain, store=job.store.with_suffix(".one")))
    same = [a == b for a, b in zip(ranks[0].digests, shares.digests, strict=True)]
    return {
        "case": name,
        "steps": len(job.batches),
        "ranks_agree": all(rank == ranks[0] for rank in ranks),
        "versions_with_the_digest_of_one_process": sum(same),
        "first_ratio_off_one": ranks[0].fresh[0],
        "largest_relative_difference_to_one_process": apart(ranks[0], shares),
        "largest_relative_difference_to_one_without_shares": apart(ranks[0], one),
        "largest_relative_difference_of_those_two": apart(shares, one),
        "losses": {"ranks": [round(x, 7) for x in ranks[0].losses], "one": [round(x, 7) for x in one.losses]},
    }


def stepped(start: Path, steps: int) -> list[Row]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        jobs = cases(start, Path(folder), steps)
        by_rank = run_ranks(together, list(jobs.values()), ranks=2, stall_s=300.0)
        return [compared(name, job, [told[i] for told in by_rank]) for i, (name, job) in enumerate(jobs.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, required=True, help="a mid-trained checkpoint")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    report("sharded", {"steps": stepped(args.start, args.steps)})


if __name__ == "__main__":
    main()
