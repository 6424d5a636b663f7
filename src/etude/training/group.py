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
from etude.file_checksums import files_in, verify_files
from etude.models.attention import Cache, Packed
from etude.models.checkpoint import load_tensors, save_tensors, whole_directory
from etude.models.transformer import Transformer
from etude.numerics.device import device_for
from etude.numerics.exact import tree
from etude.numerics.operators import Operators
from etude.training.rows import Rows
from etude.training.totals import rounded, total
from etude.training.trained import Loading, Trained, load_trained

if TYPE_CHECKING:
    from etude.training.optimizer import AdamW

T = TypeVar("T")
STATE, SHARDS = "learner.state", "learner.shards"
"""An optimiser's state in a checkpoint: one file of one process, or torch's distributed checkpoint of ranks. No
*.safetensors: vLLM takes every such file for weights."""


class Group(Protocol):
    """The ranks of a learner, seen from one of them. Every call but `device` and `own` is collective."""

    rank: int
    size: int

    def device(self, name: str) -> torch.device:
        """Where this rank computes: `learner.device`, or the GPU that is its own."""
        ...

    def own(self, shares: int) -> range:
        """Which shares of each row this rank computes."""
        ...

    def part(self, rows: Rows) -> Rows:
        """The rows of a share that this rank forwards: all, or a part of each text."""
        ...

    def cache(self, rows: Rows, operators: Operators) -> Cache:
        """The `Cache` by which the tokens of `part` attend to each other."""
        ...

    def agreed(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A block without collectives: where it raises on one rank, all raise that. A rank that does not come in time
        is a `RankLost`."""
        ...

    def waited(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A block with collectives of torch's own: one that fails is a `RankLost` that names who is missing."""
        ...

    def add(self, counts: torch.Tensor) -> None:
        """Replace integers by their sum over all ranks."""
        ...

    def norm(self, squares: Mapping[str, torch.Tensor]) -> float:
        """√ of the sum of all ranks' squares (float64, by parameter), rounded once: independent of which rank holds
        which."""
        ...

    def gathered(self, one: T) -> list[T]:
        """The `one` of every rank, in order of rank, on every rank."""
        ...

    def load(self, loading: Loading) -> Trained:
        """What trains of a checkpoint, or this rank's part of it: as `trained.load_trained`."""
        ...

    def summed(self, optimizer: AdamW, shares: int) -> Rowwise | None:
        """What adds a row's gradients of so many shares of this rank, where backward passes alone do not."""
        ...

    def restore(self, path: Path, optimizer: AdamW) -> None:
        """The optimiser's state in a checkpoint, whichever ranks saved it. Raises `CheckpointError`."""
        ...

    def directory(self, path: Path) -> contextlib.AbstractContextManager[Path]:
        """A hidden directory that all ranks fill, which becomes `path` when the block ends well on all of them."""
        ...

    def keep(self, folder: Path, optimizer: AdamW) -> None:
        """Put the optimiser's state into a checkpoint."""
        ...

    def together(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Exchange rows: from this rank's rows of each parameter to the whole parameters that this rank gets."""
        ...

    def apart(self, wholes: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The reverse: from the whole parameters that this rank has to its rows of each parameter, shaped as `like`."""
        ...

    def reset(self, model: Transformer) -> None:
        """Forget a forward or backward pass that was cut short."""
        ...


class One:
    """The group of a learner in one process. Its calls never wait."""

    rank, size = 0, 1

    def device(self, name: str) -> torch.device:
        return device_for(name)

    def own(self, shares: int) -> range:
        return range(shares)

    def part(self, rows: Rows) -> Rows:
        return rows

    def cache(self, rows: Rows, operators: Operators) -> Cache:
        return Packed(rows.forwarded, operators, device=rows.tokens_N.device)

    def agreed(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def waited(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def add(self, counts: torch.Tensor) -> None:
        pass

    def norm(self, squares: Mapping[str, torch.Tensor]) -> float:
        return math.sqrt(rounded([total(torch.cat(list(squares.values())))]))

    def gathered(self, one: T) -> list[T]:
        return [one]

    def load(self, loading: Loading) -> Trained:
        return load_trained(loading)

    def summed(self, optimizer: AdamW, shares: int) -> Rowwise | None:
        return Rowwise(optimizer.grad) if shares > 1 else None

    def restore(self, path: Path, optimizer: AdamW) -> None:
        if (path / SHARDS).is_dir():
            verify_files(path, [name for name in files_in(path) if name.startswith(f"{SHARDS}/")], kind=CheckpointError)
            from etude.training.sharded.checkpoint import restore  # which needs torch.distributed

            return restore(path / SHARDS, optimizer)
        return optimizer.restore(load_tensors(path / STATE))

    def directory(self, path: Path) -> contextlib.AbstractContextManager[Path]:
        return whole_directory(path)

    def together(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(rows)

    def apart(self, wholes: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(wholes)

    def keep(self, folder: Path, optimizer: AdamW) -> None:
        save_tensors(optimizer.state(), folder / STATE)

    def reset(self, model: Transformer) -> None:
        pass


ONE = One()


class Rowwise:
    """Several shares' gradients in one process, added as ranks add theirs: a row as a tree, then row after row."""

    def __init__(self, gradient: torch.Tensor) -> None:
        """`gradient`: what every backward pass adds to."""
        self._gradient, self._before = gradient, gradient.clone()
        self._shares: list[torch.Tensor] = []
        gradient.zero_()

    def take(self) -> None:
        """A share's backward pass has ended."""
        self._shares.append(self._gradient.clone())
        self._gradient.zero_()

    def end(self) -> None:
        """A row has ended."""
        self._gradient.copy_(self._before + tree(self._shares))
