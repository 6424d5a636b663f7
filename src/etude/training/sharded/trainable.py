"""The trained weights of a sharded model: this rank's rows in training, full tensors when saved and published."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from etude.models.checkpoint import write_config_files, write_index
from etude.models.checkpoint_files import save_tensors
from etude.models.lora import local_part
from etude.models.packed_weights import Matrix
from etude.models.quantised_storage import is_quantised
from etude.models.transformer import Transformer
from etude.models.weight_views import hf_biases
from etude.numerics.config import Quantise
from etude.numerics.formats import FORMATS
from etude.training.config import LiveWeights
from etude.training.exports import encode_tensors, stored_dtype
from etude.training.sharded.fsdp import ShardSpec, TensorSlice
from etude.weights.tensors import Tensor

if TYPE_CHECKING:
    from etude.training.sharded.process_group import ShardedProcessGroup


class ShardedWeights:
    """All weights of a sharded model: what its learner trains (a `trainable.Trainable`).

    Construct it before FSDP2 shards the model. `specs`, `named`: the results of `shard_specs` and `tensor_slices`.
    `weights`: the precision in which they are published. `assets`: a directory whose tokeniser files are copied into
    checkpoints. `quantise`: the quantised format in which large matrices are published."""

    def __init__(
        self,
        model: Transformer,
        group: ShardedProcessGroup,
        specs: Mapping[str, ShardSpec],
        named: Mapping[str, list[TensorSlice]],
        weights: LiveWeights,
        assets: Path,
        quantise: Quantise = Quantise.NONE,
    ) -> None:
        self.model, self._group, self._specs = model, group, specs
        self.specs = specs  # of the model
        self.copies: Mapping[str, ShardSpec] = {}  # of the adapters that are trained instead
        self._weights, self._assets, self._quantise = weights, assets, quantise
        self.named = named

    def filled(self) -> None:
        """Finish the construction. Call it after FSDP2 has sharded the model and the weights are loaded."""

    @property
    def _others(self) -> dict[str, torch.Tensor]:
        """Tensors that are not parameters and are the same on every rank: rank 0 saves them."""
        return hf_biases(self.model) if self._group.rank == 0 else {}

    @property
    def module(self) -> nn.Module:
        return self.model

    def views(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's rows of each parameter."""
        self.model.reshard()  # type: ignore[operator]  # FSDP2 may still hold gathered weights
        return {name: local_part(p) for name, p in self.model.named_parameters()}

    def sync_model(self) -> None:
        """Do nothing: the optimiser has written the shards."""

    def exported(self) -> dict[str, Tensor]:
        """Return the full tensors that this rank publishes. A collective call."""
        return self._encoded(self._full_tensors(self.views(), self._quantise))

    def _encoded(self, full_tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensor]:
        return encode_tensors({**full_tensors, **self._others}, self._weights)

    def base(self) -> dict[str, Tensor] | None:
        """Return None: an engine needs no frozen weights, since all weights are trained and published."""
        return None

    def write(self, folder: Path) -> None:
        """Write a Hugging Face directory, with one weights file per rank. A collective call."""
        self.write_model(folder)

    def write_model(self, folder: Path) -> None:
        group = self._group
        self.model.reshard()  # type: ignore[operator]
        rows = {name: local_part(p) for name, p in self.model.named_parameters()}
        tensors = self._full_tensors(rows) | {name: one.clone() for name, one in self._others.items()}
        file = f"model-{group.rank + 1:05}-of-{group.size:05}.safetensors"
        with group.propagate_errors("weights"):
            save_tensors(tensors, folder / file)
        there = group.all_gather((file, {name: one.nbytes for name, one in tensors.items()}))
        with group.propagate_errors("weights"):
            if group.rank == 0:
                write_config_files(self.model.config, folder, dtype=self._weights, assets=self._assets)
                where = {name: own for own, sizes in there for name in sizes}
                write_index(where, sum(sum(sizes.values()) for _, sizes in there), folder)

    def _full_tensors(
        self, views: Mapping[str, torch.Tensor], quantise: Quantise = Quantise.NONE
    ) -> dict[str, torch.Tensor]:
        """Return the full tensors that this rank gets from all ranks' rows, by Hugging Face names. A collective call.

        They are in the stored dtype, and large matrices in the quantised format."""
        found: dict[str, torch.Tensor] = {}
        kind = stored_dtype(self._weights)
        inside = self.model.config.architecture.etude_name
        rows = {name: own.to(self._group.mesh.device, kind) for name, own in views.items()}
        for parameter, full in self._group.gather(rows).items():
            spec, flat = self._specs[parameter], full.flatten()
            first = spec.start * math.prod(spec.shape[1:]) if spec.expert else 0
            own = [one for one in self.named[parameter] if first <= one.start and one.stop <= first + len(flat)]
            if quantise is not Quantise.NONE and own and is_quantised(inside(own[0].name)):
                found |= Matrix(full, {one.name: one.shape[0] for one in own}).stored(FORMATS[quantise])
                continue
            for one in own:
                found[one.name] = flat[one.start - first : one.stop - first].view(one.shape)
        return found
