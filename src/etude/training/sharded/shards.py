"""A model as FSDP2 shards it, and which rows of each parameter lie where.

`fully_shard` cuts a parameter in its first dimension: rows of a matrix, experts of a stack. Layer by layer its shards
are gathered before they are computed with, and gradients are summed and cut again behind it. Stacked experts are whole
on their expert-parallel rank, and cut over the other mesh.

Sums over ranks in exact mode are trees in the order of shares (`Tree`); in native mode, whatever the library does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from etude.models.naming import hf_views
from etude.models.transformer import Block, Stack, Transformer
from etude.numerics.exact import tree
from etude.training.sharded.mesh import Mesh


class Tree:
    """A reduce-scatter whose sum is a binary tree in the order of ranks: FSDP2's own kind of argument."""

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
        output_tensor.copy_(tree(parts.view(group.size(), -1).unbind()))


@dataclass(frozen=True)
class Cut:
    """A parameter of the whole model, and what this rank has of it: rows [start, stop) of its first dimension.
    `copied`: those that FSDP2 would share them with have them, too."""

    shape: tuple[int, ...]
    start: int
    stop: int
    mesh: DeviceMesh
    expert: bool
    copied: bool = False

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    def distributed(self, own: torch.Tensor) -> DTensor:
        """This rank's rows, as a part of the whole."""
        strides = torch.empty(self.shape, device="meta").stride()
        places: list[Placement] = [Shard(0)] * self.mesh.ndim
        if self.copied:
            places[-1] = Replicate()
        made: DTensor = DTensor.from_local(
            own, self.mesh, places, run_check=False, shape=torch.Size(self.shape), stride=strides
        )
        return made


def chunk(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows of a rank, as `torch.chunk` has them: later ranks may have fewer, or none.

    >>> [chunk(5, rank, 4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-size // ranks)
    return min(size, rank * each), min(size, (rank + 1) * each)


def cuts_of(model: Transformer, mesh: Mesh) -> dict[str, Cut]:
    """Of each parameter, before `shard`."""
    stacked = {
        f"{name}.{part}" for name, m in model.named_modules() if isinstance(m, Stack) for part in ("gate_up", "down")
    }
    found = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name in stacked:
            first = shape[0] * mesh.expert.rank
            start, stop = chunk(shape[0], mesh.expert_fsdp.get_local_rank(), mesh.expert_fsdp.size())
            whole = (shape[0] * mesh.expert.degree, *shape[1:])
            found[name] = Cut(whole, first + start, first + stop, mesh.experts, expert=True)
        else:
            found[name] = Cut(shape, *chunk(shape[0], mesh.rank, mesh.size), mesh.dense, expert=False)
    return found


@dataclass(frozen=True)
class Named:
    """A Hugging Face tensor as numbers of a parameter: from `start` on in the whole one."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def names_of(model: Transformer, cuts: Mapping[str, Cut], mesh: Mesh) -> tuple[dict[str, list[Named]], list[str]]:
    """The Hugging Face tensors in each parameter, and those in none: biases of choosing. Before `shard`."""
    of = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
    found: dict[str, list[Named]] = {name: [] for name in cuts}
    others = []
    for name, view in hf_views(model).items():
        parameter = of.get(view.untyped_storage().data_ptr())
        if parameter is None:
            others.append(name)
            continue
        cut = cuts[parameter]
        held = math.prod(cut.shape) // mesh.expert.degree * mesh.expert.rank if cut.expert else 0
        found[parameter].append(Named(name, held + int(view.storage_offset()), tuple(view.shape)))
    return found, others


def shard(model: Transformer, mesh: Mesh, *, exact: bool, gathered: torch.dtype | None) -> None:
    """Have FSDP2 shard a model in place. `gathered`: the dtype that weights travel and are computed in (None: their
    own); gradients are summed in float32."""
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def cut(module: nn.Module, over: DeviceMesh) -> None:
        made = fully_shard(module, mesh=over, mp_policy=policy)
        assert isinstance(made, FSDPModule)
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)
        if exact:
            made.set_custom_reduce_scatter(Tree())  # type: ignore[arg-type]  # the interface has no public name

    for block in model.blocks:
        assert isinstance(block, Block)
        if block.experts is not None:
            cut(block.experts.stack, mesh.expert_fsdp)
        cut(block, mesh.dense)
    cut(model, mesh.dense)
    register_fsdp_forward_method(model, "run")
