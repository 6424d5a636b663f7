"""A small model that every rank holds in full: ranks share the texts of a batch, and Muon's work.

This takes more memory than shards of the model, and fewer messages: one exchange of gradients a row of a batch, where
FSDP2 exchanges the weights of each layer twice, too. Gradients are summed in the same tree as in one process
(`sharded.lora.RankAccumulator`), so all ranks take the same optimiser step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import distributed, nn

from etude.errors import ParityError
from etude.training.sharded.fsdp import ShardSpec
from etude.training.sharded.mesh import Mesh
from etude.training.trainable import Trainable
from etude.weights.tensors import Tensor

if TYPE_CHECKING:
    from etude.training.sharded.process_group import ShardedProcessGroup


class ReplicatedWeights:
    """A `trainable.Trainable` that every rank holds in full, as `own`. Rank 0 writes and publishes it."""

    def __init__(self, own: Trainable, group: ShardedProcessGroup) -> None:
        self.model, self._own, self._group = own.model, own, group

    @property
    def module(self) -> nn.Module:
        return self._own.module

    @property
    def specs(self) -> dict[str, ShardSpec]:
        """This rank's rows of each parameter: all of them."""
        shapes = {name: tuple(p.shape) for name, p in self.module.named_parameters()}
        dense = self._group.mesh.dense
        return {name: ShardSpec(shape, 0, shape[0], dense, expert=False, copied=True) for name, shape in shapes.items()}

    def views(self) -> Mapping[str, torch.Tensor]:
        return self._own.views()

    def sync_model(self) -> None:
        self._own.sync_model()

    def exported(self) -> dict[str, Tensor]:
        return self._own.exported() if self._group.rank == 0 else {}

    def base(self) -> dict[str, Tensor] | None:
        base = self._own.base()
        return base if base is None or self._group.rank == 0 else {}

    def write(self, folder: Path) -> None:
        """Write a checkpoint directory, on rank 0. A collective call.

        Raises `ParityError` if the weights of the ranks differ."""
        digest = hashlib.sha256()
        for view in self.views().values():
            digest.update(view.contiguous().view(torch.uint8).numpy(force=True).data)
        digests = self._group.all_gather(digest.hexdigest())
        if len(set(digests)) > 1:
            facts = f"digests by rank: {', '.join(one[:12] for one in digests)}"
            hint = "this is a bug in etude: report it with the settings of the run"
            raise ParityError("the ranks have different weights", facts, hint=hint)
        with self._group.propagate_errors("weights"):
            if self._group.rank == 0:
                self._own.write(folder)

    def write_model(self, folder: Path) -> None:
        with self._group.propagate_errors("weights"):
            if self._group.rank == 0:
                self._own.write_model(folder)


class ReplicatedTensors:
    """The `muon.ShardExchange` of replicated weights: each rank works on some of the parameters, and sends them."""

    def __init__(self, mesh: Mesh) -> None:
        self._rank, self._size = mesh.rank, mesh.size

    def gather(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters that this rank works on. `rows`: all parameters."""
        return {name: rows[name] for name in self._by_rank(rows)[self._rank]}

    def shard(
        self, full_tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return all parameters. `full_tensors`: those of this rank; `like`: the argument of `gather`.

        A collective call."""
        by_rank = self._by_rank(like)
        longest = max(sum(like[name].numel() for name in names) for names in by_rank)
        parts = [full_tensors[name].flatten() for name in by_rank[self._rank]]
        room = longest - sum(map(len, parts))
        sent = torch.cat([*parts, next(iter(like.values())).new_zeros(room)])
        every = sent.new_empty(self._size * longest)
        distributed.all_gather_into_tensor(every, sent)
        found = {}
        for names, flat in zip(by_rank, torch.split(every, longest), strict=True):
            at = 0
            for name in names:
                found[name] = flat[at : at + like[name].numel()].view(like[name].shape)
                at += like[name].numel()
        return found

    def _by_rank(self, rows: Mapping[str, torch.Tensor]) -> list[list[str]]:
        ordered = sorted(rows, key=lambda name: (rows[name].numel(), name))
        return [ordered[rank :: self._size] for rank in range(self._size)]
