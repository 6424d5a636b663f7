"""What each rank of a shared model holds: sizes, and which part of each tensor by etude's name of it.

`Transformer(config, parallel=...)` is one rank's share, and computes with the others (`numerics.parallel`). Its weights
come from a whole model (`share_of`) or from a directory (`load_model`), which is whole whatever the number of ranks, so
what one number of ranks saved another reads.
"""

from __future__ import annotations

import torch

from etude.models.transformer import Transformer
from etude.models.weight_views import views
from etude.numerics.parallel import Parallel

OUTPUTS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
"""Matrices whose rows, their outputs, tensor-parallel ranks share: whole heads, or a part of a width."""
INPUTS = ("o_proj", "down_proj")
"""Those whose columns, their inputs, they share. Every other tensor is on each rank. Of experts, expert-parallel ranks
have some whole, and no other tensor is cut."""


def shard_dimension(name: str, parallel: Parallel) -> int | None:
    """The dimension in which ranks share a tensor of this name (etude's: `naming.views`); None: each has it whole.

    >>> two = Parallel(2)
    >>> [cut(f"model.layers.0.{n}.weight", two) for n in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate")]
    [0, 1, None]
    """
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if parallel.tensor.degree == 1:
        return None
    return 0 if kind in OUTPUTS else 1 if kind in INPUTS else None


def shard_tensor(name: str, whole: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """This rank's part of a whole tensor, a view."""
    dimension = shard_dimension(name, parallel)
    return whole if dimension is None else whole.chunk(parallel.degree, dimension)[parallel.rank]


def full_shape(name: str, part: torch.Tensor, parallel: Parallel) -> tuple[int, ...]:
    """The shape of the tensor that this rank has a part of."""
    dimension = shard_dimension(name, parallel)
    return tuple(size * (parallel.degree if at == dimension else 1) for at, size in enumerate(part.shape))


def shard_model(whole: Transformer, parallel: Parallel) -> Transformer:
    """This rank's share of a whole model, as a model of its own. Raises `ConfigError`."""
    dtype = whole.embedding.dtype
    model = Transformer(whole.config, seed=None, dtype=dtype, operators=whole.operators, parallel=parallel)
    tensors = views(whole)
    for name, view in views(model).items():
        view.copy_(shard_tensor(name, tensors[name], parallel))
    return model
