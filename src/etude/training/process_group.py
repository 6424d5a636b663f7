"""The interface between the learner and the group of ranks that it may be spread over.

`One` is a process by itself. `training.sharded` has ranks with FSDP2 and a device mesh. What differs between them is
what is asked here: which samples are mine, which tensors, how sums and troubles meet, how weights get in and out.
Losses, checks and reports are the learner's, the same for both.

A batch is packed into rows of one bin a *share* (`training.packing`), as many shares as there are data-parallel ranks;
a row's gradient is the binary tree over its shares. `One` computes all of them in turn and adds in that tree: what
ranks compute, to the bit, where their layout allows it (docs/decisions/0022-a-learner-over-ranks.md).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from etude.errors import CheckpointError
from etude.models.attention import Cache, Packed
from etude.models.checkpoint import atomic_directory, load_tensors, save_tensors
from etude.models.transformer import Transformer
from etude.numerics.device import device_for
from etude.numerics.exact import tree_sum
from etude.numerics.operators import Operators
from etude.sums import files_in, prove
from etude.training.exact_sum import exact_sum, rounded_sum
from etude.training.flat_batch import FlatBatch
from etude.training.trainable import LoadRequest, Trainable, load_trainable

if TYPE_CHECKING:
    from etude.training.optimizer import AdamW

T = TypeVar("T")
OPTIMIZER_FILE, OPTIMIZER_SHARDS = "learner.state", "learner.shards"
"""An optimiser's state in a checkpoint: one file of one process, or torch's distributed checkpoint of ranks. No
*.safetensors: vLLM takes every such file for weights."""


class ProcessGroup(Protocol):
    """The ranks of a learner, seen from one of them. Every call but `device` and `own` is collective."""

    rank: int
    size: int

    def device(self, name: str) -> torch.device:
        """Where this rank computes: `learner.device`, or the GPU that is its own."""
        ...

    def own_shares(self, shares: int) -> range:
        """Which shares of each row this rank computes."""
        ...

    def local_tokens(self, rows: FlatBatch) -> FlatBatch:
        """The rows of a share that this rank forwards: all, or a part of each text."""
        ...

    def cache(self, rows: FlatBatch, operators: Operators) -> Cache:
        """The `Cache` by which the tokens of `part` attend to each other."""
        ...

    def propagate_errors(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A block without collectives: where it raises on one rank, all raise that. A rank that does not come in time
        is a `RankLost`."""
        ...

    def collective(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A block with collectives of torch's own: one that fails is a `RankLost` that names who is missing."""
        ...

    def all_reduce(self, counts: torch.Tensor) -> None:
        """Replace integers by their sum over all ranks."""
        ...

    def global_norm(self, squares: Mapping[str, torch.Tensor]) -> float:
        """√ of the sum of all ranks' squares (float64, by parameter), rounded once: independent of which rank holds
        which."""
        ...

    def all_gather(self, one: T) -> list[T]:
        """The `one` of every rank, in order of rank, on every rank."""
        ...

    def load(self, loading: LoadRequest) -> Trainable:
        """What trains of a checkpoint, or this rank's part of it: as `trained.load_trained`."""
        ...

    def accumulator(self, optimizer: AdamW, shares: int) -> ShareAccumulator | None:
        """What adds a row's gradients of so many shares of this rank, where backward passes alone do not."""
        ...

    def restore_optimizer(self, path: Path, optimizer: AdamW) -> None:
        """The optimiser's state in a checkpoint, whichever ranks saved it. Raises `CheckpointError`."""
        ...

    def checkpoint_directory(self, path: Path) -> contextlib.AbstractContextManager[Path]:
        """A hidden directory that all ranks fill, which becomes `path` when the block ends well on all of them."""
        ...

    def save_optimizer(self, folder: Path, optimizer: AdamW) -> None:
        """Put the optimiser's state into a checkpoint."""
        ...

    def gather(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Exchange rows: from this rank's rows of each parameter to the whole parameters that this rank gets."""
        ...

    def shard(self, wholes: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The reverse: from the whole parameters that this rank has to its rows of each parameter, shaped as `like`."""
        ...

    def reset(self, model: Transformer) -> None:
        """Forget a forward or backward pass that was cut short."""
        ...


class SingleProcess:
    """The group of a learner in one process. Its calls never wait."""

    rank, size = 0, 1

    def device(self, name: str) -> torch.device:
        return device_for(name)

    def own_shares(self, shares: int) -> range:
        return range(shares)

    def local_tokens(self, rows: FlatBatch) -> FlatBatch:
        return rows

    def cache(self, rows: FlatBatch, operators: Operators) -> Cache:
        return Packed(rows.forward_lengths, operators, device=rows.tokens_N.device)

    def propagate_errors(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def collective(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def all_reduce(self, counts: torch.Tensor) -> None:
        pass

    def global_norm(self, squares: Mapping[str, torch.Tensor]) -> float:
        return math.sqrt(rounded_sum([exact_sum(torch.cat(list(squares.values())))]))

    def all_gather(self, one: T) -> list[T]:
        return [one]

    def load(self, loading: LoadRequest) -> Trainable:
        return load_trainable(loading)

    def accumulator(self, optimizer: AdamW, shares: int) -> ShareAccumulator | None:
        return ShareAccumulator(optimizer.grad) if shares > 1 else None

    def restore_optimizer(self, path: Path, optimizer: AdamW) -> None:
        if (path / OPTIMIZER_SHARDS).is_dir():
            prove(
                path, [name for name in files_in(path) if name.startswith(f"{OPTIMIZER_SHARDS}/")], kind=CheckpointError
            )
            from etude.training.sharded.checkpoint import restore  # which needs torch.distributed

            return restore(path / OPTIMIZER_SHARDS, optimizer)
        return optimizer.restore(load_tensors(path / OPTIMIZER_FILE))

    def checkpoint_directory(self, path: Path) -> contextlib.AbstractContextManager[Path]:
        return atomic_directory(path)

    def gather(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(rows)

    def shard(self, wholes: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(wholes)

    def save_optimizer(self, folder: Path, optimizer: AdamW) -> None:
        save_tensors(optimizer.state(), folder / OPTIMIZER_FILE)

    def reset(self, model: Transformer) -> None:
        pass


SINGLE_PROCESS = SingleProcess()


class ShareAccumulator:
    """Several shares' gradients in one process, added as ranks add theirs: a row as a tree, then row after row."""

    def __init__(self, gradient: torch.Tensor) -> None:
        """`gradient`: what every backward pass adds to."""
        self._gradient, self._before = gradient, gradient.clone()
        self._shares: list[torch.Tensor] = []
        gradient.zero_()

    def add_share(self) -> None:
        """A share's backward pass has ended."""
        self._shares.append(self._gradient.clone())
        self._gradient.zero_()

    def finish_row(self) -> None:
        """A row has ended."""
        self._gradient.copy_(self._before + tree_sum(self._shares))
