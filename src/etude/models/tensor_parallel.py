"""The part of each tensor that a rank has under tensor and expert parallelism.

`Transformer(config, parallel=...)` is one rank's part of a model, and computes together with the others
(`numerics.parallel`). Its weights come from a full model (`shard_model`) or from a directory (`load_model`), which
always contains the full model, whatever the number of ranks."""

from __future__ import annotations

import torch

from etude.models.transformer import Transformer
from etude.models.weight_views import views
from etude.numerics.parallel import Parallel

OUTPUTS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
"""Modules whose matrices and biases are divided by rows, their outputs (column-parallel): full heads, or a part of a
width."""
INPUTS = ("o_proj", "down_proj")
"""Modules whose matrices are divided by columns, their inputs (row-parallel). All other tensors are on each rank. With
expert parallelism a rank has some experts, and no tensor is divided."""


def shard_dimension(name: str, parallel: Parallel) -> int | None:
    """Return the dimension along which tensor-parallel ranks divide a tensor; None: every rank has all of it.

    `name` is etude's name of the tensor (`weight_views.views`).

    >>> two = Parallel(2)
    >>> names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate")
    >>> [shard_dimension(f"model.layers.0.{name}.weight", two) for name in names]
    [0, 1, None]
    """
    module, _, part = name.rpartition(".")
    kind = module.rpartition(".")[2]
    if parallel.tensor.degree == 1:
        return None
    return 0 if kind in OUTPUTS or part == "sinks" else 1 if kind in INPUTS and part == "weight" else None


def shard_tensor(name: str, full: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """Return this rank's part of a full tensor, as a view. `name` is etude's name of the tensor
    (`weight_views.views`)."""
    dimension = shard_dimension(name, parallel)
    return full if dimension is None else full.chunk(parallel.degree, dimension)[parallel.rank]


def full_shape(name: str, part: torch.Tensor, parallel: Parallel) -> tuple[int, ...]:
    """Return the shape of the full tensor of which `part` is this rank's part. `name` is etude's name of the tensor."""
    dimension = shard_dimension(name, parallel)
    return tuple(size * (parallel.degree if at == dimension else 1) for at, size in enumerate(part.shape))


def shard_model(full: Transformer, parallel: Parallel) -> Transformer:
    """Return this rank's part of a full model, as a new model.

    Raises `ConfigError` when sizes cannot be divided among the ranks."""
    dtype = full.embedding.dtype
    model = Transformer(full.config, seed=None, dtype=dtype, operators=full.operators, parallel=parallel)
    tensors = views(full)
    for name, view in views(model).items():
        view.copy_(shard_tensor(name, tensors[name], parallel))
    return model
