"""Elementwise functions and top-k whose results do not depend on the position of a number in memory.

Torch computes most of a contiguous block with vector instructions, and its last few numbers with another routine that
gives other bits (`silu` and `sigmoid` differ). Rows of a multiple of `LANES` numbers have no such rest."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

LANES = 64  # numbers: two vectors of sixteen for each of two threads
GRAIN = 32768  # largest size that torch computes in one thread (at::internal::GRAIN_SIZE)


def in_lanes(function: Callable[[torch.Tensor], torch.Tensor], x_NF: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise `function` to a float32 matrix, so that a row's bits do not depend on the other rows.

    >>> x = torch.arange(6.0).view(2, 3)
    >>> torch.equal(in_lanes(F.silu, x)[1:], in_lanes(F.silu, x[1:]))
    True
    """
    rest = -x_NF.shape[-1] % LANES
    if rest:
        return in_lanes(function, F.pad(x_NF, (0, rest)))[..., : x_NF.shape[-1]]
    if torch.get_num_threads() <= 2 or x_NF.numel() <= GRAIN:
        return function(x_NF)
    rows = max(1, GRAIN // x_NF.shape[-1])
    return torch.cat([function(x) for x in torch.split(x_NF, rows)])


@torch.no_grad()
def top_k(values_NE: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices of the k largest values, largest first, ties to the lowest index; int64 [N, k].

    `torch.topk` does not define the order of ties, and is hardly faster.

    >>> top_k(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3).tolist()
    [[1, 2, 3]]
    """
    values, chosen = values_NE.clone(), []
    for _ in range(k):
        chosen.append(values.argmax(-1, keepdim=True))
        values.scatter_(-1, chosen[-1], -torch.inf)
    return torch.cat(chosen, -1)
