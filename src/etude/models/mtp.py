"""Multi-token prediction heads: what they predict, from the outputs of the trunk (arXiv 2412.19437, §2.2).

The trunk is the model without its heads. Heads share its embedding, output matrix and last norm, and these are detached
here: a loss of the heads has no gradient in the trunk.

Head k (from 0) at position i takes the output of head k - 1 at i (head 0: that of the trunk, after its last norm) and
token i + k + 1, and predicts token i + k + 2. It attends to its own keys at the positions up to i. Names of tensors and
the order of operations are those of transformers' `MtpModel`.

Shapes: N tokens, R rows, V vocabulary size, D width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from etude.models.attention import Cache
from etude.models.experts import Choice
from etude.models.rope import Rope
from etude.models.transformer import MtpHead, Transformer


def trunk_of(model: Transformer) -> nn.Module:
    """Return a module with all parameters of a model but those of its MTP heads, under the same names.

    It is the model itself where there are no heads. An optimiser of the result computes the same bytes as one of a
    model without heads."""
    if not len(model.mtp):
        return model
    trunk = nn.Module()
    for name, parameter in model.named_parameters(recurse=False):
        trunk.register_parameter(name, parameter)
    for name, child in model.named_children():
        if child is not model.mtp:
            trunk.add_module(name, child)
    return trunk


def trunk_output(model: Transformer, stream_ND: torch.Tensor) -> torch.Tensor:
    """Return the trunk's outputs, from which head 0 predicts, [N, D], detached.

    `stream_ND`: `Forward.stream` of these tokens."""
    return model.operators.rms_norm(stream_ND.detach(), model.norm.detach(), model.config.rms_eps)


def apply_head(
    model: Transformer,
    number: int,
    before_ND: torch.Tensor,
    next_N: torch.Tensor,
    cache: Cache,
    *,
    layer: int | None = None,
    counts_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Choice | None]:
    """Compute head `number` for N positions. Returns its outputs [N, D], and its router's choice if it has a router.

    - `before_ND`: outputs of the head before, or of the trunk (`trunk_output`).
    - `next_N`: int64, token i + number + 1 of each position i.
    - `cache`: the positions, and what they attend to.
    - `layer`: the index of the head's keys in the cache; None: the number of the head among all layers.
    - `counts_N`: how often each token counts in the load-balancing loss."""
    head = model.mtp[number]
    assert isinstance(head, MtpHead)
    rope = Rope(model.cos[cache.positions, None], model.sin[cache.positions, None])
    embedded_ND = F.embedding(next_N, model.embedding.detach()).to(model.operators.dtype)
    at = model.config.num_layers + number if layer is None else layer
    done: tuple[torch.Tensor, Choice | None] = head(before_ND, embedded_ND, rope, cache, at, counts_N)
    return done


def head_logits(model: Transformer, output_RD: torch.Tensor) -> torch.Tensor:
    """Return the logits [R, V] of outputs of a head, computed with the trunk's output matrix, detached."""
    matrix = model.embedding if model.head is None else model.head
    return model.operators.logits(output_RD, matrix.detach())
