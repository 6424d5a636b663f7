"""Operators whose large products take numbers rounded to a low-precision format, computed by other operators.

Rounded are both sides of every product with a weight matrix inside a layer: attention's projections, dense and shared
MLPs, experts. Not rounded, as in NVIDIA's recipe (arXiv 2509.25149) and in what engines serve: embeddings, norms, the
router (a rounded score chooses another expert), attention over keys and values, and the head.

Activations share scales within a token, weights within a matrix as the model holds it: query, key and value, or an
expert's gate and up, have one outer scale, which is what engines that fuse them need. So a token's numbers depend on
that token alone, and where `inner` is exact, all of it is: engine and learner agree to the bit.

Gradients pass rounding as if it were not there (straight-through, arXiv 1308.3432), and are computed by `inner` in its
own precision: that of an input from the rounded weights, that of a weight from the rounded input. Both are the
gradients of what the forward computed. Nothing is random: a stochastic rounding would make every delta dense.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from etude.errors import ConfigError
from etude.numerics.formats import Format
from etude.numerics.operators import Operators, delegate_to_inner
from etude.numerics.quantisation.rounding import round_to_format


class QuantisedOperators(Operators):
    """`inner`, with inputs and weights of the large products rounded to `format`.

    `rounds_weights` False: the weights are the format's already, as those of an engine are that decodes what was
    published (`models.packed`).
    """

    absorbs_latents = True
    """The two forms of latent attention would round other numbers. Absorbed, a latent is not rounded, as in a cache."""

    def __init__(self, inner: Operators, format: Format, *, rounds_weights: bool = True) -> None:
        super().__init__(inner.dtype)
        if inner.degree > 1 and format.has_global_scale:
            raise ConfigError(
                f"{format.name} over {inner.degree} tensor-parallel ranks",
                "its outer scale is of a whole row, of which a rank has a share",
                hint="set numerics.degree = 1, or take mxfp8 or mxfp4",
            )
        self.inner, self.format, self.rounds_weights = inner, format, rounds_weights

    @property
    def name(self) -> str:
        return f"{self.inner.name} {self.format.name}"

    def quantise_input(self, x: torch.Tensor) -> torch.Tensor:
        return _quantise(x, self.format, False)

    def quantise_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return _quantise(weight, self.format, True) if self.rounds_weights else weight

    @property
    def syncs_with_host(self) -> bool:
        return True  # experts are dispatched by the host

    def fused_experts(self, *_: torch.Tensor) -> torch.Tensor | None:
        """None: what `inner` does in one rounds nothing between its products."""
        return None

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        return self.inner.linear(self.quantise_input(x_NI), self.quantise_weight(weight_OI))

    def linear_columns(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, ranks: int) -> torch.Tensor:
        if self.degree == 1:
            return super().linear_columns(x_NI, weight_OI, ranks)
        return self.inner.linear_columns(self.quantise_input(x_NI), self.quantise_weight(weight_OI), ranks)

    def linear_partial(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, ranks: int) -> torch.Tensor:
        if self.degree == 1:
            return super().linear_partial(x_NI, weight_OI, ranks)
        return self.inner.linear_partial(self.quantise_input(x_NI), self.quantise_weight(weight_OI), ranks)


delegate_to_inner(QuantisedOperators)


def _quantise(x: torch.Tensor, format: Format, matrix: bool) -> torch.Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        through: torch.Tensor = _StraightThrough.apply(x, format, matrix)  # type: ignore[no-untyped-call]
        return through
    return round_to_format(x, format, matrix=matrix)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, format: Format, matrix: bool) -> torch.Tensor:
        return round_to_format(x, format, matrix=matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, None, None
