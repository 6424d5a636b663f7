"""Sharding a model with FSDP2, and which rows of each parameter this rank has.

`fully_shard` cuts parameters along their first dimension: rows of a matrix, experts of a stack. It gathers shards layer
by layer before computing, and reduce-scatters gradients after. Experts are full matrices on their expert-parallel rank,
and cut over the other mesh dimension.

In exact mode, sums over ranks are trees in the order of shares (`TreeReduceScatter`); in native mode, the library's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from etude.errors import ConfigError
from etude.models.adapter_config import ADAPTER_CONFIG
from etude.models.checkpoint import RowRange, read_rows
from etude.models.headers import check_weights, read_model_config
from etude.models.lora import local_part
from etude.models.transformer import Block, Stack, Transformer
from etude.models.weight_views import hf_biases, hf_views
from etude.numerics.exact import tree_sum
from etude.numerics.operators import Operators
from etude.training.sharded.mesh import Mesh


class TreeReduceScatter:
    """A reduce-scatter that sums in a binary tree in the order of ranks.

    It has FSDP2's interface for custom reduce-scatters."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        parts = torch.empty_like(input_tensor)
        distributed.all_to_all_single(parts, input_tensor, group=group)
        output_tensor.copy_(tree_sum(parts.view(group.size(), -1).unbind()))


@dataclass(frozen=True)
class ShardSpec:
    """This rank's rows [start, stop) of a parameter of the full model.

    `shape`: the shape of the full parameter. `mesh`: the ranks that share it. `expert`: whether it belongs to experts.
    `copied`: all ranks of the FSDP mesh have the same rows."""

    shape: tuple[int, ...]
    start: int
    stop: int
    mesh: DeviceMesh
    expert: bool
    copied: bool = False

    @property
    def rows(self) -> slice:
        """This rank's rows of the parameter, as a slice."""
        return slice(self.start, self.stop)

    def distributed(self, own: torch.Tensor) -> DTensor:
        """Return this rank's rows as a `DTensor`."""
        strides = torch.empty(self.shape, device="meta").stride()
        places: list[Placement] = [Shard(0)] * self.mesh.ndim
        if self.copied:
            places[-1] = Replicate()
        made: DTensor = DTensor.from_local(
            own, self.mesh, places, run_check=False, shape=torch.Size(self.shape), stride=strides
        )
        return made


def chunk_bounds(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (start, stop) of the rows of a rank, as in `torch.chunk`: later ranks may have fewer, or none.

    >>> [chunk_bounds(5, rank, 4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-size // ranks)
    return min(size, rank * each), min(size, (rank + 1) * each)


def shard_specs(model: Transformer, mesh: Mesh) -> dict[str, ShardSpec]:
    """Return this rank's rows of each parameter. Call it before `apply_fsdp`."""
    stacked = {
        f"{name}.{part}"
        for name, m in model.named_modules()
        if isinstance(m, Stack)
        for part, _ in m.named_parameters()
    }
    found = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name in stacked:
            first = shape[0] * mesh.expert.rank
            start, stop = chunk_bounds(shape[0], mesh.expert_fsdp.get_local_rank(), mesh.expert_fsdp.size())
            full_shape = (shape[0] * mesh.expert.degree, *shape[1:])
            found[name] = ShardSpec(full_shape, first + start, first + stop, mesh.experts, expert=True)
        else:
            found[name] = ShardSpec(shape, *chunk_bounds(shape[0], mesh.rank, mesh.size), mesh.dense, expert=False)
    return found


@dataclass(frozen=True)
class TensorSlice:
    """A tensor of a Hugging Face checkpoint, as a slice of a flattened parameter of the model.

    `start`: the position of the tensor's first number in the flattened parameter. `shape`: the tensor's shape."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The end of the slice in the flattened parameter."""
        return self.start + math.prod(self.shape)


def tensor_slices(model: Transformer, specs: Mapping[str, ShardSpec], mesh: Mesh) -> dict[str, list[TensorSlice]]:
    """Return for each parameter the tensors of a Hugging Face checkpoint that it consists of. Call it before
    `apply_fsdp`."""
    storages = {name: p.untyped_storage() for name, p in model.named_parameters()}
    of = {id(storage): name for name, storage in storages.items()}
    found: dict[str, list[TensorSlice]] = {name: [] for name in specs}
    for name, view in hf_views(model).items():
        parameter = of.get(id(view.untyped_storage()))
        if parameter is None:
            continue  # a router bias
        spec = specs[parameter]
        held = math.prod(spec.shape) // mesh.expert.degree * mesh.expert.rank if spec.expert else 0
        found[parameter].append(TensorSlice(name, held + int(view.storage_offset()), tuple(view.shape)))
    return found


def meta_model(path: Path, operators: Operators, mesh: Mesh) -> Transformer:
    """Return the model of a checkpoint directory on the meta device, with this rank's experts.

    Raises `CheckpointError`, and `ConfigError` for an adapter's directory."""
    if (path / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"{path} cannot be loaded on several ranks",
            "it is an adapter",
            hint="export the merged model, and start from that",
        )
    config = read_model_config(path)
    if config.mtp_heads:
        raise ConfigError(
            f"{path} cannot be loaded on several ranks",
            f"it has {config.mtp_heads} MTP heads, which one process trains",
            hint="set learner.ranks = 1; or set num_nextn_predict_layers = 0 in a copy's config.json, which leaves the "
            "heads out",
        )
    check_weights(path, config)
    with torch.device("meta"):
        return Transformer(config, seed=None, operators=operators, parallel=mesh.expert)


def load_shards(
    model: Transformer, path: Path, specs: Mapping[str, ShardSpec], named: Mapping[str, list[TensorSlice]], mesh: Mesh
) -> None:
    """Allocate the memory of a sharded model and read this rank's rows into it.

    `specs`, `named`: the results of `shard_specs` and `tensor_slices`. Raises the errors of `load_model`.
    """
    tables = model.cos.to(mesh.device), model.sin.to(mesh.device)
    model.to_empty(device=mesh.device)
    model.cos, model.sin = tables
    ranges = [RowRange(name, tuple(one.shape), 0, len(one), one) for name, one in hf_biases(model).items()]
    for name, parameter in model.named_parameters():
        ranges += _rows(specs[name], named[name], local_part(parameter).view(-1))
    read_rows(path, ranges)


def _rows(spec: ShardSpec, named: Sequence[TensorSlice], own: torch.Tensor) -> Iterator[RowRange]:
    """Yield the rows of each tensor in a parameter that this rank has."""
    first = spec.start * math.prod(spec.shape[1:])
    for one in named:
        start, stop = max(one.start, first), min(one.stop, first + len(own))
        if start < stop:
            width, out = math.prod(one.shape[1:]), own[start - first : stop - first].view(-1, *one.shape[1:])
            at = (start - one.start) // width
            yield RowRange(one.name, one.shape, at, at + len(out), out)


def apply_fsdp(model: Transformer, mesh: Mesh, *, exact: bool, gathered: torch.dtype | None) -> None:
    """Shard a model in place with FSDP2.

    `exact`: sum gradients in a tree in the order of ranks. `gathered`: the dtype in which weights are gathered and
    computed (None: their own). Gradients are summed in float32."""
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def wrap(module: nn.Module, over: DeviceMesh) -> None:
        made = fully_shard(module, mesh=over, mp_policy=policy)
        assert isinstance(made, FSDPModule)
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)
        if exact:
            made.set_custom_reduce_scatter(TreeReduceScatter())  # type: ignore[arg-type]  # the interface has no public name

    for block in model.blocks:
        assert isinstance(block, Block)
        if block.experts is not None:
            wrap(block.experts.stack, mesh.expert_fsdp)
        wrap(block, mesh.dense)
    wrap(model, mesh.dense)
    register_fsdp_forward_method(model, "run")
