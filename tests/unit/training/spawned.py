"""What test_mid_training runs in spawned ranks: importable by name there."""

from __future__ import annotations

import os
import signal

import torch
from torch import distributed

from etude.errors import TaskError
from etude.models import Transformer
from etude.training.data_parallel import RankGroup


@torch.no_grad()
def first_logit(model: Transformer) -> float:
    """A probe that reads something off the model."""
    assert not model.training
    return float(model(torch.tensor([1], device=model.cos.device))[0][0, 0])


class Killed(BaseException):
    """Stands for a kill -9."""


def die(at: list[int], model: Transformer) -> float:
    """A probe that ends the run at one of its calls."""
    at[0] -= 1
    if at[0] == 0:
        raise Killed
    return 0.0


def end_process(at: list[int], model: Transformer) -> float:
    """A probe that ends the rank's process at one of its calls."""
    at[0] -= 1
    if at[0] == 0:
        os._exit(9)
    return 0.0


def fail(ranks: RankGroup, how: str) -> None:
    """Rank 1 fails or dies while rank 0 waits for it; or both go on without a step."""
    if how == "error" and ranks.rank == 1:
        raise TaskError("the corpus moved", hint="put it back")
    if how == "death" and ranks.rank == 1:
        os._exit(9)
    distributed.all_reduce(torch.ones(1))
    if how == "stall":
        signal.pause()


def size(ranks: RankGroup, job: None) -> int:
    """How many ranks there are."""
    return ranks.size
