"""Who attends to whom: the seam between the one model definition and whoever keeps its keys and values.

`Cache` is what a forward asks for; the engine has its own (keys and values by slot), training has `Packed`.

A model may hand over its keys and values *compressed* (multi-head latent attention, arXiv 2405.04434, in the absorbed
form): one key head for all queries, a value that is the key's first numbers, and a softmax scale that is not 1/√width.
`ModelConfig.kept` says so before the first forward, so that a cache keeps such a value once.

Shapes: N tokens of the forward, H query heads, G key/value heads, A key width, B value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from etude.numerics.operators import Operators


class Cache(Protocol):
    """Positions of the tokens of one forward, and attention over what they may see."""

    @property
    def positions(self) -> torch.Tensor:
        """int64 [N]: each token's position in its own sequence."""
        ...

    @property
    def compressed(self) -> bool:
        """Whether a model that can should hand over its latents, rather than the keys and values made of them."""
        ...

    def attend(
        self, layer: int, q_NHA: torch.Tensor, k_NGA: torch.Tensor, v_NGB: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        """Keep the tokens' keys and values, attend causally with softmax(scale · q·k), return o_NHB.

        `scale` None: 1/√A. Where `ModelConfig.kept.shared` and `compressed`, v is a view: the first B numbers of k.
        """
        ...


class Packed:
    """Several whole sequences laid flat one after another; each attends within itself only, nothing is kept.

    One's numbers do not depend on its neighbours or on padding, and no work is spent on pairs of tokens of which
    neither may see the other. `operators` are the model's own, `device` is the tokens'.

    >>> from etude.numerics import Native
    >>> Packed([2, 3], Native()).positions.tolist()
    [0, 1, 0, 1, 2]
    """

    compressed = False  # nothing is kept, and products of narrow heads cost less

    def __init__(self, lengths: Sequence[int], operators: Operators, *, device: torch.device | str = "cpu") -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths of packed sequences must be at least 1, got {list(lengths)[:8]}")
        self.lengths = list(lengths)
        self._attend = operators.packed(self.lengths, torch.device(device))
        self.positions = torch.cat([torch.arange(n) for n in self.lengths]).to(device)

    def attend(
        self, layer: int, q_NHA: torch.Tensor, k_NGA: torch.Tensor, v_NGB: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        return self._attend(q_NHA, k_NGA, v_NGB, scale)
