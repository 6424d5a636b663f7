"""Who attends to whom: the seam between the one model definition and whoever keeps its keys and values.

`Cache` is what a forward asks for; the engine has its own (keys and values by slot), training has `Packed`.

Shapes: N tokens of the forward, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F


class Cache(Protocol):
    """Positions of the tokens of one forward, and attention over what they may see."""

    @property
    def positions(self) -> torch.Tensor:
        """int64 [N]: each token's position in its own sequence."""
        ...

    def attend(self, layer: int, q_NHD: torch.Tensor, k_NGD: torch.Tensor, v_NGD: torch.Tensor) -> torch.Tensor:
        """Keep the tokens' keys and values, attend causally, return o_NHD."""
        ...


class Packed:
    """Several whole sequences laid flat one after another; each attends within itself only, nothing is kept.

    One kernel call a sequence: a sequence's numbers do not depend on its neighbours or on padding, and no work is
    spent on pairs of tokens that may not see each other.

    >>> Packed([2, 3]).positions.tolist()
    [0, 1, 0, 1, 2]
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths of packed sequences must be at least 1, got {list(lengths)[:8]}")
        self.lengths = list(lengths)
        self.positions = torch.cat([torch.arange(n, device=device) for n in self.lengths])

    def attend(self, layer: int, q_NHD: torch.Tensor, k_NGD: torch.Tensor, v_NGD: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.split(t.transpose(0, 1), self.lengths, 1) for t in (q_NHD, k_NGD, v_NGD))
        o = [causal(*qkv) for qkv in zip(q, k, v, strict=True)]
        return torch.cat(o, 1).transpose(0, 1)


def causal(q_HTD: torch.Tensor, k_GTD: torch.Tensor, v_GTD: torch.Tensor) -> torch.Tensor:
    """Causal attention within one sequence; o_HTD."""
    q, k, v = q_HTD[None], k_GTD[None], v_GTD[None]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
