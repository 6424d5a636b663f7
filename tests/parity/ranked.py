"""What two ranks compute together, and one by itself: an engine's steps, a learner's packed forward and its gradients.
Importable by name in spawned ranks."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from benchmarks.numerics.exact_ranks import served
from tests.parity.same_bits import asked, learned, prompts, sharp
from torch import distributed

from etude.models import ModelConfig, Transformer, hf_views
from etude.models.tensor_parallel import shard_model
from etude.numerics.native import Native
from etude.numerics.operators import Operators
from etude.numerics.parallel import SINGLE_RANK, Parallel, RankLost, Split
from etude.training.data_parallel import RankGroup

LENGTHS, NUM = (3, 33, 17, 50), 4
Said = list[tuple[list[int], list[float]]]


@dataclass(frozen=True)
class Case:
    """A model, its operators, and what ranks share it by."""

    config: ModelConfig
    operators: Operators
    split: Split


@dataclass(frozen=True)
class Told:
    """Of each text of this rank: tokens and log-probabilities of the engine, log-probabilities of the learner; and
    gradients by Hugging Face name, with whether a second run has the same bits."""

    engine: Said
    learner: list[list[float]]
    gradients: dict[str, np.ndarray]  # a tensor would be a file of a process that has ended
    repeated: bool


def gradients(model: Transformer) -> dict[str, np.ndarray]:
    """By Hugging Face name; the model is a model no more."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    return {name: view.numpy() for name, view in hf_views(model).items()}


def told(case: Case, ranks: RankGroup) -> Told:
    """What this rank says of its texts: of all in tensor-parallel ranks, of half of them in expert-parallel ones."""
    parallel = Parallel(ranks.size, ranks.rank, case.split, deadline_s=600.0) if ranks.size > 1 else SINGLE_RANK
    whole = sharp(case.config, case.operators)
    half = len(LENGTHS) // 2
    numbers = range(len(LENGTHS)) if parallel.tensor is parallel else range(half * ranks.rank, half * (ranks.rank + 1))
    given = prompts(case.config, LENGTHS)
    requests = [asked(n, given[n], tokens=NUM) for n in numbers]
    done = served(shard_model(whole, parallel), requests, ranks, slots=4, chunk_tokens=16)
    engine = [(one.token_ids, one.logprobs) for one in done]
    texts = [[*given[n].tolist(), *ids] for n, (ids, _) in zip(numbers, engine, strict=True)]
    runs = []
    for _ in range(2):
        model = shard_model(whole, parallel)
        runs.append((learned(model, texts), gradients(model)))
    (scores, first), (_, again) = runs
    return Told(engine, scores, first, all(np.array_equal(first[name], again[name]) for name in first))


def everything(ranks: RankGroup, cases: dict[str, Case]) -> dict[str, Told]:
    return {name: told(case, ranks) for name, case in cases.items()}


def alone(case: Case) -> Told:
    return told(case, RankGroup(0, 1))


def lose(rank: int, folder: Path) -> None:
    """Rank 1 hangs where rank 0 needs its part, then dies; rank 0 writes what it was told of both to `said`."""
    where = {"init_method": f"file://{folder / 'store'}", "rank": rank, "world_size": 2}
    distributed.init_process_group("gloo", **where)
    groups = [distributed.new_group(), distributed.new_group()]
    patient = Parallel(2, rank, group=groups[1], deadline_s=600.0)
    patient.all_reduce(torch.ones(1), "first parts")
    if rank == 1:
        while not (folder / "said").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    for parallel, what in (Parallel(2, rank, group=groups[0], deadline_s=0.5), "attention.out"), (patient, "mlp.down"):
        begin = time.monotonic()
        try:
            parallel.sum_over_ranks(Native(), torch.ones(1), what)
        except RankLost as error:
            with (folder / "said").open("a") as said:
                said.write(f"{time.monotonic() - begin < 300} {error}\n")
    os._exit(0)  # the group is of no use any more, and waits for its other rank as it is taken down
