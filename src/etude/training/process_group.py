"""The interface between the learner and the ranks that share its work.

`SingleProcess` is one process. `training.sharded` has ranks with FSDP2 and a device mesh. The interface is what differs
between them: which samples and tensors a rank has, how sums and errors are exchanged, how weights are loaded and saved.
Losses, checks and reports are the learner's, the same for both.

A batch is packed into rows of one bin per *share* (`training.packing`), with as many shares as there are data-parallel
ranks. The gradients of a row's shares are summed in a binary tree. `SingleProcess` computes the shares in turn and adds
them in the same tree, so the result equals that of ranks bit for bit, where their layout allows it
(docs/decisions/0022-a-learner-over-ranks.md)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from etude.errors import CheckpointError
from etude.file_checksums import files_in, verify_files
from etude.models.attention import Cache
from etude.models.checkpoint_files import atomic_directory, load_tensors, save_tensors
from etude.models.transformer import Transformer
from etude.numerics.device import device_for
from etude.numerics.exact import tree_sum
from etude.numerics.operators import Operators
from etude.training.exact_sum import exact_norm
from etude.training.optimizer import AdamW
from etude.training.token_batch import TokenBatch, Tokens
from etude.training.trainable import LoadRequest, Trainable, load_trainable

T = TypeVar("T")
OPTIMIZER_FILE, OPTIMIZER_SHARDS = "learner.state", "learner.shards"
"""Optimiser state in a checkpoint: a file from one process, or a torch distributed checkpoint from several ranks. The
file is not named *.safetensors, since vLLM loads every such file as weights."""


class ProcessGroup(Protocol):
    """The ranks of a learner, as seen by one of them. All calls but `device` and `own_shares` are collective.

    A share is the part of a batch that one data-parallel rank computes."""

    rank: int
    size: int

    def device(self, name: str) -> torch.device:
        """Return this rank's device: the one that the setting `name` asks for, or the rank's own GPU."""

    def own_shares(self, shares: int) -> range:
        """Return which of the `shares` parts of a batch this rank computes, as indices."""

    def local_tokens(self, rows: Tokens) -> Tokens:
        """Return the tokens of a share that this rank computes.

        These are all tokens or, with context parallelism, a part of each text."""

    def cache(self, rows: TokenBatch, operators: Operators) -> Cache:
        """Return the `Cache` for one forward pass of `rows`, which `local_tokens` returned.

        With context parallelism, the cache lets this rank's tokens attend to those of other ranks."""

    def propagate_errors(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for a block without collectives, at whose end an error of one rank is raised on all.

        `what` names the block in errors. A rank that does not reach the end in time raises `RankLost` on the others."""

    def collective(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for a block with torch's collectives.

        `what` names the block in errors. A collective that fails raises `RankLost`, which names the missing ranks."""

    def all_reduce(self, counts: torch.Tensor) -> None:
        """Replace the integers in `counts`, in place, by their sums over all ranks."""

    def global_norm(self, squares: Mapping[str, torch.Tensor]) -> float:
        """Return the square root of the sum of all ranks' `squares` (float64, by parameter's name), rounded once.

        The result does not depend on which rank has which rows."""

    def all_gather(self, one: T) -> list[T]:
        """Return the values of all ranks, in order of rank, on each rank."""

    def load(self, request: LoadRequest) -> Trainable:
        """Load the trainable weights of a checkpoint, or this rank's part of them (`trainable.load_trainable`)."""

    def accumulator(self, optimizer: AdamW, shares: int) -> ShareAccumulator | None:
        """Return an object that sums the gradients of a row over several shares of this rank, or over ranks.

        None if backward passes alone compute this sum."""

    def first_row(self, name: str) -> int:
        """Return the index of the first row of a trained parameter that this rank has."""

    def restore_optimizer(self, path: Path, optimizer: AdamW) -> None:
        """Restore the optimiser state of a checkpoint, whichever ranks saved it.

        Raises `CheckpointError` when it is missing, damaged, or of another model or optimiser."""

    def checkpoint_directory(self, path: Path) -> contextlib.AbstractContextManager[Path]:
        """Return a context manager with a hidden directory that all ranks fill.

        It becomes `path` when the block succeeds on all of them."""

    def save_optimizer(self, folder: Path, optimizer: AdamW) -> None:
        """Save the optimiser state into a checkpoint."""

    def gather(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Exchange rows with all ranks, and return the full tensors of the parameters that this rank works on.

        `rows`: this rank's rows of each parameter; the names are the same on all ranks. A collective call."""

    def shard(
        self, full_tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Undo `gather`: pass the full tensors of the parameters that `gather` returned on this rank, with new values.

        Returns this rank's rows of all parameters. `like`: the argument of `gather`, for names and shapes. A collective
        call."""

    def reset(self, model: Transformer) -> None:
        """Reset the model after an interrupted forward or backward pass."""


class SingleProcess:
    """A `ProcessGroup` of one process. Its calls never wait."""

    rank, size = 0, 1

    def device(self, name: str) -> torch.device:
        return device_for(name)

    def own_shares(self, shares: int) -> range:
        return range(shares)

    def local_tokens(self, rows: Tokens) -> Tokens:
        return rows

    def cache(self, rows: TokenBatch, operators: Operators) -> Cache:
        return rows.cache(operators)

    def propagate_errors(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def collective(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def all_reduce(self, counts: torch.Tensor) -> None:
        pass

    def global_norm(self, squares: Mapping[str, torch.Tensor]) -> float:
        return exact_norm(squares)

    def all_gather(self, one: T) -> list[T]:
        return [one]

    def load(self, request: LoadRequest) -> Trainable:
        return load_trainable(request)

    def accumulator(self, optimizer: AdamW, shares: int) -> ShareAccumulator | None:
        return ShareAccumulator(optimizer.grad) if shares > 1 else None

    def first_row(self, name: str) -> int:
        return 0

    def restore_optimizer(self, path: Path, optimizer: AdamW) -> None:
        if (path / OPTIMIZER_SHARDS).is_dir():
            verify_files(
                path, [name for name in files_in(path) if name.startswith(f"{OPTIMIZER_SHARDS}/")], kind=CheckpointError
            )
            from etude.training.sharded.checkpoint import restore  # which needs torch.distributed

            return restore(path / OPTIMIZER_SHARDS, optimizer)
        return optimizer.restore(load_tensors(path / OPTIMIZER_FILE))

    def checkpoint_directory(self, path: Path) -> contextlib.AbstractContextManager[Path]:
        return atomic_directory(path)

    def gather(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(rows)

    def shard(
        self, full_tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return dict(full_tensors)

    def save_optimizer(self, folder: Path, optimizer: AdamW) -> None:
        save_tensors(optimizer.state(), folder / OPTIMIZER_FILE)

    def reset(self, model: Transformer) -> None:
        pass


SINGLE_PROCESS = SingleProcess()


class ShareAccumulator:
    """Sums the gradients of several shares in one process, in the order in which ranks sum theirs.

    The shares of a row are summed in a binary tree (`tree_sum`), then rows are added one after the other. A share is
    the part of a batch that one data-parallel rank computes; a row is what all of them forward at the same time."""

    def __init__(self, gradient: torch.Tensor) -> None:
        """Begin a row. `gradient`: the buffer that every backward pass adds to, which is cleared."""
        self._gradient, self._before = gradient, gradient.clone() if bool(gradient.any()) else None
        self._shares: list[torch.Tensor] = []
        gradient.zero_()

    def add_share(self) -> None:
        """Add the gradient that a share's backward pass has left in the buffer, and clear the buffer."""
        self._shares.append(self._gradient.clone())
        self._gradient.zero_()

    def finish_row(self) -> None:
        """Add the sum of the row's shares to the gradient before the row. Call it after the last share."""
        self._gradient.copy_(tree_sum(self._shares))
        if self._before is not None:
            self._gradient.add_(self._before)
