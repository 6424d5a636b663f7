"""LoRA adapters on a sharded base model.

Base and merged matrices are sharded like a model with all weights trained. The adapters of dense matrices are
replicated on all ranks, and those of experts on the ranks that have these experts. This takes a few per cent of the
memory. Each rank merges its rows, with the same bits as in the full matrix. Gradients are summed over ranks in the same
tree as in one process, so all replicas take equal steps. One of the replicas is published and saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import distributed, nn

from etude.errors import CheckpointError, EtudeError
from etude.models.adapter_files import HINT_BASE, load_adapter, write_adapter
from etude.models.checkpoint import iter_weights
from etude.models.lora import Adapters, local_part, round_parameters, weights_digest
from etude.models.transformer import Transformer
from etude.numerics.lora import LoraOperators
from etude.records.adapter import PUBLISHED
from etude.training.config import LiveWeights
from etude.training.exports import encode_tensors, stored_dtype
from etude.training.optimizer import AdamW
from etude.training.process_group import ShareAccumulator
from etude.training.sharded.fsdp import ShardSpec, TensorSlice, TreeReduceScatter
from etude.training.sharded.mesh import Mesh
from etude.training.sharded.trainable import ShardedWeights
from etude.training.trainable import LoadRequest
from etude.weights.tensors import Tensor

if TYPE_CHECKING:
    from etude.training.sharded.process_group import ShardedProcessGroup


SILENT_BYTES = 16 << 30
"""Rank 0 reports progress after this many bytes of a base whose digest it computes: about every ten seconds."""


class ShardedLora(ShardedWeights):
    """The LoRA adapters of a sharded model: what its learner trains (a `trainable.Trainable`).

    Construct it before FSDP2 shards the model."""

    def __init__(
        self,
        model: Transformer,
        group: ShardedProcessGroup,
        specs: Mapping[str, ShardSpec],
        named: Mapping[str, list[TensorSlice]],
        weights: LiveWeights,
        base: Path,
        request: LoadRequest,
    ) -> None:
        """Create the adapters on all ranks, with their initial or saved values. A collective call.

        `specs`, `named`: the results of `shard_specs` and `tensor_slices`. `base`: the directory of the base model.
        Raises `CheckpointError` when adapter and base do not fit."""
        super().__init__(model, group, specs, named, weights, base)
        mesh, kind = group.mesh, stored_dtype(weights)
        self._rows = {name: _within(spec, model.get_parameter(name).shape[0], mesh) for name, spec in specs.items()}
        digest = _digest(base, kind, group)
        with group.propagate_errors("adapter"):
            config, tensors = request.adapter(model)
            weight_dtype, device = request.weight_dtype, mesh.device
            self.adapters = Adapters(model, config, dtype=kind, weight_dtype=weight_dtype, digest=digest, device=device)
        self._fill(request, tensors, group)
        assert isinstance(model.operators, LoraOperators), "set by ShardedProcessGroup.load"
        model.operators.weights_move = True
        self.copies = self._copies()
        first = {False: mesh.rank == 0, True: mesh.expert_fsdp.get_local_rank() == 0}
        self._mine = {n for name, names in self.adapters.names.items() if first[specs[name].expert] for n in names}

    def filled(self) -> None:
        round_parameters(self.model, self.adapters.dtype)
        self.adapters.share(self._rows)

    def _fill(self, request: LoadRequest, tensors: Mapping[str, torch.Tensor], group: ShardedProcessGroup) -> None:
        if not request.resumed:
            return self.adapters.draw(request.seed)
        known = {name for names in group.all_gather(list(self.adapters.views)) for name in names}
        with group.propagate_errors("adapter"):
            for name in sorted(tensors.keys() - known):
                facts = f"it has {name}, which the base does not have"
                raise CheckpointError(f"{request.path} does not fit its base", facts, hint=HINT_BASE)
            views = self.adapters.views
            load_adapter(
                self.adapters, {name: tensors[name] for name in tensors.keys() & views.keys()}, str(request.path)
            )
        return None

    def _copies(self) -> dict[str, ShardSpec]:
        """Return this rank's parts of A and B, by the optimiser's names."""
        mesh, found = self._group.mesh, {}
        parts = iter(self.adapters.trained.named_parameters(prefix="trained"))
        for parameter in self.adapters.names:
            for name, one in (next(parts), next(parts)):
                held, shape = one.shape[0], tuple(one.shape)
                if self._specs[parameter].expert:
                    start = held * mesh.expert.rank
                    full_shape = (held * mesh.expert.degree, *shape[1:])
                    found[name] = ShardSpec(full_shape, start, start + held, mesh.experts, expert=True, copied=True)
                else:
                    found[name] = ShardSpec(shape, 0, held, mesh.dense, expert=False, copied=True)
        return found

    @property
    def module(self) -> nn.Module:
        return self.adapters

    def views(self) -> Mapping[str, torch.Tensor]:
        return self.adapters.views

    def sync_model(self) -> None:
        self.model.reshard()  # type: ignore[operator]  # FSDP2's: what it gathered last may be there still
        self.adapters.merge()

    def exported(self) -> dict[str, Tensor]:
        found = encode_tensors({name: view for name, view in self.views().items() if name in self._mine}, self._weights)
        if self._group.rank == 0:
            config = np.frombuffer(self.adapters.config.to_bytes(), np.uint8).copy()
            found[PUBLISHED] = Tensor("u8", config.shape, config)
        return found

    def base(self) -> dict[str, Tensor]:
        """Return the full tensors of the base that this rank publishes. A collective call."""
        rows = {name: local_part(p) for name, p in self.model.named_parameters()} | self.adapters.bases
        return self._encoded(self._full_tensors(rows))

    def write(self, folder: Path) -> None:
        """Write a peft directory, on rank 0. A collective call."""
        group, kind = self._group, stored_dtype(self._weights)
        mine = {name: view.to(kind).cpu() for name, view in self.views().items() if name in self._mine}
        there = group.gather_to_first(mine)
        with group.propagate_errors("weights"):
            if group.rank == 0:
                tensors = {name: one for own in there for name, one in own.items()}
                write_adapter(folder, tensors, self.adapters.config, self._assets, dtype=kind)


def _digest(base: Path, kind: torch.dtype, group: ShardedProcessGroup) -> str:
    """Return the digest of the base, computed by rank 0. Raises `CheckpointError`.

    For a large base this takes longer than a collective may, so rank 0 reports progress now and then."""
    digest: str | EtudeError | None = None
    if group.rank == 0:
        try:
            digest = weights_digest(_watched(base, group), kind)
        except CheckpointError as error:
            digest = error
        group.all_gather(digest)
    while digest is None:
        digest = group.all_gather(digest)[0]
    if isinstance(digest, EtudeError):
        raise digest
    return digest


def _watched(base: Path, group: ShardedProcessGroup) -> Iterator[tuple[str, torch.Tensor]]:
    num_bytes = 0
    for name, tensor in iter_weights(base):
        yield name, tensor
        num_bytes += tensor.nbytes
        if num_bytes > SILENT_BYTES:
            num_bytes = 0
            group.all_gather(None)


class RankAccumulator(ShareAccumulator):
    """Sums the gradients of replicated parameters over ranks, once per row of the batch.

    The order of summation is that of a single process (`ShareAccumulator`). Matrices of expert layers are summed over
    the ranks that have the same experts, all others over all ranks."""

    def __init__(self, optimizer: AdamW, specs: Mapping[str, ShardSpec], mesh: Mesh) -> None:
        super().__init__(optimizer.grad)
        self._named, self._specs, self._mesh = optimizer.by_parameter(optimizer.grad), specs, mesh

    def add_share(self) -> None:
        """Do nothing, since gradients are added in `finish_row`."""

    def finish_row(self) -> None:
        everybody = self._mesh.dense.get_group()
        experts = [one for name, one in self._named.items() if self._specs[name].expert]
        dense = [one for name, one in self._named.items() if not self._specs[name].expert]
        _add(dense if experts else [self._gradient], everybody)
        _add(experts, self._mesh.expert_fsdp.get_group())
        if self._before is not None:
            self._gradient.add_(self._before)


def _add(tensors: Sequence[torch.Tensor], group: distributed.ProcessGroup) -> None:
    """Replace tensors by their sums over ranks, a tree in the order of ranks. Each rank adds a part of the numbers."""
    if not tensors or group.size() == 1:
        return
    flat = torch.cat([one.flatten() for one in tensors]) if len(tensors) > 1 else tensors[0].flatten()
    each = -(-len(flat) // group.size())
    room = each * group.size() - len(flat)
    padded = torch.nn.functional.pad(flat, (0, room)) if room else flat
    mine, total = padded.new_empty(each), torch.empty_like(padded)
    TreeReduceScatter()(mine, padded, group, op=None)
    distributed.all_gather_into_tensor(total, mine, group=group)
    for one, part in zip(tensors, torch.split(total[: len(flat)], [one.numel() for one in tensors]), strict=True):
        one.copy_(part.view(one.shape))


def _within(spec: ShardSpec, held: int, mesh: Mesh) -> slice:
    """Return this rank's rows of a parameter, relative to the rows that it has before FSDP2 shards it."""
    first = held * mesh.expert.rank if spec.expert else 0
    return slice(spec.start - first, spec.stop - first)
