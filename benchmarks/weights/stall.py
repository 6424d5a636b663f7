"""How long a learner waits for a publish, as a share of a step: for its weights to be read, and for nothing else.

A learner trains and offers its weights after each step to a `Publisher`, which digests, encodes and stores them in the
background. *Waited* is for the publish before, *read* is turning masters' bf16 into codes and copying them: together
the stall. Beside it, what a step takes without and with a publish in the background, which shares the cores. Two
models: the laptop example's, and one of 1 GB in bf16 (with float32 weights, gradients, masters and two moments in
memory, about 17 GB in all). `python -m benchmarks.weights.stall [--models laptop 1gb] [--publishes N]`
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.report import report
from benchmarks.runs import LAPTOP
from etude.config import load
from etude.loop.config import RunConfig
from etude.models import ModelConfig, Transformer
from etude.models.attention import Packed
from etude.stores import DirectoryStore
from etude.training.config import LiveWeights
from etude.training.exports import export
from etude.training.optimizer import AdamW
from etude.weights import Channel
from etude.weights.chain.publisher import Publisher

GOAL_SHARE = 0.01
LR = 1e-6


@dataclass(frozen=True)
class Case:
    """A model, and what a step of it reads."""

    sizes: ModelConfig
    tokens: int
    row_tokens: int


def cases() -> dict[str, Case]:
    """By name; `tiny` is for tests. A step on the laptop takes .4 s of the learner, as in its runs."""
    large = ModelConfig(
        vocab_size=8192, hidden_size=1024, num_layers=8, num_heads=16, num_kv_heads=4, head_dim=64, expert_size=640,
        num_experts=32,
    )  # fmt: skip
    laptop = load(LAPTOP, RunConfig).model
    return {
        "laptop": Case(laptop, 3072, laptop.context_tokens),
        "1gb": Case(large, 2048, 1024),
        "tiny": Case(replace(laptop, num_layers=1), 128, 64),
    }


class Learner:
    """A model, its optimiser and some tokens; only the time that it takes is meant."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, Transformer(case.sizes, seed=0)
        self.optimizer = AdamW(self.model, weights=LiveWeights.BF16)
        self.tokens = torch.randint(
            case.sizes.vocab_size, (case.tokens + 1,), generator=torch.Generator().manual_seed(0)
        )

    def step(self) -> float:
        """Seconds of one step: forward and backward of each row's tokens, and the optimiser."""
        started = time.perf_counter()
        rows = [self.case.row_tokens] * (self.case.tokens // self.case.row_tokens)
        done = self.model.train().run(self.tokens[: sum(rows)], Packed(rows, self.model.operators))
        F.cross_entropy(done.logits, self.tokens[1 : sum(rows) + 1]).backward()
        self.optimizer.step(LR)
        return time.perf_counter() - started


def measure(case: Case, num_publishes: int, folder: Path) -> dict[str, Any]:
    """Publish after each step; what the learner waited for. The first publish, of an anchor, is not counted."""
    learner = Learner(case)
    learner.step()
    alone = [learner.step() for _ in range(max(2, num_publishes // 2))]
    beside, waits, reads, changed = [], [], [], []
    with Publisher(Channel(DirectoryStore(folder))) as publisher:
        publisher.offer(export(learner.model, LiveWeights.BF16), step=0, rollout_ids=[])
        publisher.wait()
        for number in range(1, num_publishes + 2):
            beside.append(learner.step())
            offered = time.perf_counter()
            published = publisher.wait()
            waited = time.perf_counter()
            publisher.offer(export(learner.model, LiveWeights.BF16), step=number, rollout_ids=[])
            waits.append(waited - offered)
            reads.append(time.perf_counter() - waited)
            assert published is not None
            changed.append(published.changed_share)
        publisher.wait()
    step_s, stalls = median(alone), [wait + read for wait, read in zip(waits[1:], reads[1:], strict=True)]
    return {
        "parameters": case.sizes.num_parameters,
        "bf16_bytes": 2 * case.sizes.num_parameters,
        "tokens_a_step": case.tokens,
        "changed_share": round(median(changed[1:]), 5),
        "step_s": round(step_s, 4),
        "step_s_beside_a_publish": round(median(beside[1:]), 4),
        "read_s": round(median(reads[1:]), 5),
        "wait_s": round(median(waits[1:]), 5),
        "stall_s_max": round(max(stalls), 5),
        "stall_share_of_a_step": round(median(stalls) / step_s, 5),
        "stall_share_of_a_step_max": round(max(stalls) / step_s, 5),
    }


def main() -> None:
    known = cases()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=known, default=["laptop", "1gb"])
    parser.add_argument("--publishes", type=int, default=8, help="counted ones")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {}
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(known[name], args.publishes, Path(folder))
    report("weights_stall", {"goal_share": GOAL_SHARE, "threads": args.threads, "models": found})


if __name__ == "__main__":
    main()
