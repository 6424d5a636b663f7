"""A learner over two ranks against one process: the same losses, and in exact mode the same bytes; and a run with it.

`steps`: 20 steps of the laptop's model over two ranks of FSDP2, with and without expert parallelism, with AdamW and
with Muon; against one process that computes the ranks' shares in turn (digests of what both publish), and against one
that knows of no shares (losses). Rewards alternate, samples are the first weights' own once rounded to bf16, so ratios
leave 1 step by step.

`run`: `etude run` with `learner.ranks = 2` from a mid-trained checkpoint, its solve rate beside those of the default's
seeds from the same start (`benchmarks.numerics_runs`). A run that has ended is read, one that was broken off gone on
with.

`python -m benchmarks.sharded [--only steps run] --start CHECKPOINT [--steps 20] [--defaults ROWS]`
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.numerics_runs import learned
from benchmarks.report import RESULTS, report
from benchmarks.runs import LAPTOP, ahead
from benchmarks.sharded_ranks import Job, Trained, alone, batches, together
from etude.evals.intervals import wilson
from etude.numerics.config import ComputeDtype, Mode, NumericsConfig
from etude.training import LearnerConfig
from etude.training.config import LiveWeights, OptimizerKind
from etude.training.ranks import run_ranks

LENGTHS = [90, 160, 48, 120, 70, 110]
EXACT, NATIVE = NumericsConfig(), NumericsConfig(mode=Mode.NATIVE)
RUN = ["learner.ranks=2", "learner.expert_parallel=2"]
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


def ran(start: Path, steps: int, defaults: Path) -> Row:
    """One whole run of a learner of two ranks, and the default's seeds beside it."""
    sizes = [f"start={start.resolve()}", "evals.baseline_tasks=1", f"rl.steps={steps}", "evals.every=10"]
    row = learned("sharded-0", LAPTOP, [*sizes, "evals.heldout_tasks=512", "seed=0", *RUN])
    del row["command_wall_s"]  # of what was left to do
    default = [one for one in json.loads(defaults.read_text()).values() if one["way"] == "default"]
    seeds = {str(one["seed"]): one["after"] for one in default}
    solved, tasks = (sum(one["after"][key] for one in default) for key in ("solved", "num_tasks"))
    pooled = wilson(solved, tasks)
    together_ = {"rate": pooled.value, "low": pooled.low, "high": pooled.high}
    return {
        "settings": [*sizes[1:], "seed=0", *RUN],
        **row,
        "default_after_by_seed": seeds,
        "default_after": {key: round(value, 4) for key, value in together_.items()},
        "after_minus_default": ahead(together_, row["after"]),
        "after_minus_default_of_the_same_seed": ahead(seeds["0"], row["after"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, required=True, help="a mid-trained checkpoint")
    parser.add_argument("--only", nargs="+", choices=["steps", "run"], default=["steps", "run"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--run-steps", type=int, default=40)
    parser.add_argument("--defaults", type=Path, default=Path("runs/numerics-rows.json"), help="numerics_runs' rows")
    args = parser.parse_args()
    kept = RESULTS / "sharded.json"
    before = json.loads(kept.read_text()) if kept.is_file() else {}
    found = {part: before[part] for part in ("steps", "run") if part in before}
    if "steps" in args.only:
        found["steps"] = stepped(args.start, args.steps)
    if "run" in args.only:
        found["run"] = ran(args.start, args.run_steps, args.defaults)
    report("sharded", found)


if __name__ == "__main__":
    main()
