"""Operators whose large matrix products use inputs and weights rounded to a low-precision format.

Rounded are both inputs of every product with a weight matrix inside a layer: attention projections, dense and shared
MLPs, experts. Not rounded, as in NVIDIA's recipe (arXiv 2509.25149) and in serving engines: embeddings, norms, the
router (a rounded score chooses another expert), attention over keys and values, and the head.

Activations share scales within a token, weights within a matrix as the model stores it: query, key and value, or an
expert's gate and up, have one global scale, as engines that fuse them require. So a token's numbers depend only on that
token. With an exact `inner`, engine and learner agree to the bit.

Gradients pass through rounding unchanged (straight-through, arXiv 1308.3432) and are computed by `inner` in its own
precision, from the rounded weights and inputs: the gradients of what the forward pass computed. Nothing is random:
stochastic rounding would make every weight delta dense."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from etude.errors import ConfigError
from etude.numerics.formats import Format
from etude.numerics.operators import Operators, delegate_to_inner
from etude.numerics.quantisation.rounding import round_to_format


class QuantisedOperators(Operators):
    """The operators `inner`, with inputs and weights of the large products rounded to `format`.

    `rounds_weights`: False if the weights are rounded already, as in an engine that unpacks published weights
    (`models.packed_weights`)."""

    absorbs_latents = True
    """True: the two forms of latent attention would round other numbers. Absorbed, a latent is not rounded, as in a
    cache."""

    def __init__(self, inner: Operators, format: Format, *, rounds_weights: bool = True) -> None:
        super().__init__(inner.dtype)
        if inner.degree > 1 and format.has_global_scale:
            raise ConfigError(
                f"{format.name} is not possible on {inner.degree} tensor-parallel ranks",
                "its global scale needs a full row, and a rank has a part of it",
                hint="set numerics.degree = 1, or use mxfp8 or mxfp4",
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
        return True  # the host dispatches rows to experts

    def fused_experts(self, *_: torch.Tensor) -> torch.Tensor | None:
        """Return None: the fused operation of `inner` does not round between its products."""
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
