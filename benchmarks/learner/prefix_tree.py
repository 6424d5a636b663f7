"""What computing shared prefixes once saves a learner: time and memory of forward and backward, and what it changes.

The laptop example's model, with a context of 4,096 tokens, trains on made-up batches: eight siblings of one prompt of
2,000 tokens; rollouts with side calls that branch off their turns; siblings of short prompts; and samples that share
nothing. Each batch is trained on with shared prefixes computed once, and with every path by itself. Times are CPU
seconds, the least of the repeats, taken in turn; memory is the growth of the resident set over the loaded model, first
with shared prefixes.
`python -m benchmarks.learner.prefix_tree [--cases siblings …] [--modes exact native] [--repeats N]`
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import report
from benchmarks.runs import LAPTOP
from etude.config import load
from etude.loop.config import RunConfig
from etude.models import Transformer, save_model
from etude.numerics import Mode, NumericsConfig
from etude.records import Batch, Sample
from etude.records.rollout import Path as TokenPath
from etude.training import LearnerConfig, TorchLearner
from etude.training.config import LiveWeights

GOAL_FORWARDED_PER_UNIQUE, GOAL_SLOWER, GOAL_GRADIENT = 1.05, 0.02, 1e-6
CONTEXT_TOKENS = 4096
Turns = list[tuple[np.ndarray[Any, Any], bool]]
"""Tokens of a path, and whether they have a loss."""


def cases(vocabulary: int) -> dict[str, list[Sample]]:
    """Return the samples of each batch."""
    draw = np.random.default_rng(0)

    def new(number: int, *, loss: bool) -> tuple[np.ndarray[Any, Any], bool]:
        return draw.integers(0, vocabulary, number).astype(np.int32), loss

    prompt, shorts = new(2000, loss=False), [new(64, loss=False) for _ in range(4)]
    branched: list[Turns] = []
    for _ in range(4):
        line: Turns = [new(300, loss=False)]
        for turn in range(10):
            if turn % 3 == 2:  # a side call: what was sampled before it is context there
                branched.append([*((ids, False) for ids, _ in line), new(30, loss=False), new(50, loss=True)])
            line += [new(60, loss=True), new(40, loss=False)]
        branched.append([*line, new(60, loss=True)])
    return {
        "siblings": _samples([[prompt, new(300, loss=True)] for _ in range(8)], draw),
        "branches": _samples(branched, draw),
        "short prompts": _samples([[short, new(400, loss=True)] for short in shorts for _ in range(8)], draw),
        "nothing shared": _samples([[new(64, loss=False), new(400, loss=True)] for _ in range(32)], draw),
    }


def _samples(paths: list[Turns], draw: np.random.Generator) -> list[Sample]:
    found = []
    for number, turns in enumerate(paths):
        tokens = np.concatenate([ids for ids, _ in turns])
        mask = np.concatenate([np.full(len(ids), loss) for ids, loss in turns])
        path = TokenPath(
            token_ids=tokens,
            mask=mask,
            logprobs=np.where(mask, -float(np.log(600)), 0).astype(np.float32),
            steps=np.where(mask, 5, -1).astype(np.int32),
            kv_epochs=np.zeros(len(tokens), np.int32),
            routes=np.zeros((0, 0, 0), np.uint8),
        )
        found.append(Sample.uniform(f"g{number:03}", path, float(draw.normal())))
    return found


def trained(start: str, case: str, mode: str, repeats: int, out: str) -> None:
    """In a process of its own: train on a batch with shared prefixes (True) and without, in turn; write results."""
    torch.set_num_threads(1)
    config = LearnerConfig(weights=LiveWeights.F32, replay_routes=False)
    learner = TorchLearner(config, numerics=NumericsConfig(Mode(mode)))
    learner.load(start)
    samples = cases(learner.model.config.vocab_size)[case]
    batch = Batch(
        batch_id="b000001",
        step=1,
        samples=tuple(samples),
        rollout_ids=tuple(sample.rollout_id for sample in samples),
        num_loss_tokens=sum(int(sample.path.mask.sum()) for sample in samples),
    )
    before, found = _peak_mb(), {}
    times: dict[bool, list[float]] = {True: [], False: []}
    peaks: dict[bool, float] = {}
    for way in [True, False] * repeats:
        learner.share_prefixes = way
        learner.optimizer.clear()
        began = time.process_time()
        done = learner.forward_backward(batch)
        times[way].append(time.process_time() - began)
        peaks.setdefault(way, _peak_mb() - before)
        found[way] = min(times[way]), peaks[way], done, learner.optimizer.grad.clone()
    torch.save(found, out)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def compared(start: str, case: str, mode: str, repeats: int) -> dict[str, Any]:
    """Train on a batch in both ways."""
    with tempfile.TemporaryDirectory() as folder:
        args = (start, case, mode, repeats, f"{folder}/found.pt")
        process = multiprocessing.get_context("spawn").Process(target=trained, args=args)
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{case} in {mode} mode ended with exit code {process.exitcode}")
        found = torch.load(args[-1], weights_only=False)
    (shared_s, shared_mb, shared, gradient), (each_s, each_mb, each, expected) = found[True], found[False]
    return {
        "tokens_of_paths": each.num_tokens,
        "forwarded": shared.num_forwarded,
        "forwarded_per_unique": round(shared.forwarded_per_unique, 4),
        "forwarded_per_unique_by_path": round(each.forwarded_per_unique, 4),
        "cpu_s": round(shared_s, 3),
        "cpu_s_by_path": round(each_s, 3),
        "cpu_share": round(shared_s / each_s, 3),
        "peak_mb": round(shared_mb),
        "peak_mb_by_path": round(each_mb),
        "gradient_difference": float((gradient - expected).norm() / expected.norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["siblings", "branches", "short prompts", "nothing shared"])
    parser.add_argument("--modes", nargs="+", default=["exact", "native"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    sizes = replace(load(LAPTOP, RunConfig).model, context_tokens=CONTEXT_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Transformer(sizes, seed=0), Path(folder) / "start", dtype="f32")
        found = {
            f"{case}, {mode}": compared(f"{folder}/start", case, mode, args.repeats)
            for case in args.cases
            for mode in args.modes
        }
    goals = {
        "forwarded_per_unique": GOAL_FORWARDED_PER_UNIQUE,
        "cpu_share_without_long_prefixes": 1 + GOAL_SLOWER,
        "gradient_difference": GOAL_GRADIENT,
    }
    report("prefix_tree", {"goals": goals, "cases": found})


if __name__ == "__main__":
    main()
