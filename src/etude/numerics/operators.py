"""The operators that a model is computed with: the seam between the one model definition and how it is computed.

A model is built with an `Operators`; engine and learner that build it with equal ones compute alike. `Native` is
torch as it comes. `Exact` has one order of summation for each operator, whatever else is in the batch. Both are plain
objects without state: nothing is switched globally.

Activations are tensors of `dtype`. Weights may be held in a wider dtype than that, as the learner's float32 masters
are: an operator takes them as they come.

Knows nothing of models, caches or batches. Shapes: N tokens, H heads, I and O width in and out, E experts, S rows
sorted by expert, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from etude.numerics import exact


class Operators:
    """What a model asks for. Every result is in `dtype`, but for scores and log-probabilities: those are float32."""

    absorbs = False
    """Whether latent attention is computed in the absorbed form where nothing asks for it, so that a packed forward
    sums in the order of one over a cache."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """x · weightᵀ, [N, O]."""
        raise NotImplementedError

    def grouped(self, x_SI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Each expert's rows times its matrix, [S, O]; `rows` [E] sum to S. `models.experts` has its gradient."""
        out = x_SI.new_empty(x_SI.shape[0], weight_EOI.shape[1])
        for x, w, o in zip(
            torch.split(x_SI, list(rows)), weight_EOI.unbind(), torch.split(out, list(rows)), strict=True
        ):
            if len(x):
                torch.mm(x, w.t().to(x.dtype), out=o)
        return out

    def per_head(self, x_NHI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
        """Each head's row times that head's matrix, [N, H, O]: how latent attention is absorbed."""
        return torch.stack([self.linear(x, w) for x, w in zip(x_NHI.unbind(1), weight_HOI.unbind(0), strict=True)], 1)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """x / √(mean x² + eps) · weight, over the last dimension (arXiv 1910.07467)."""
        weight = None if weight is None else weight.to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def rotate(self, x_NHA: torch.Tensor, cos_N1A: torch.Tensor, sin_N1A: torch.Tensor) -> torch.Tensor:
        """Rotary positions (arXiv 2104.09864, the half-rotation layout); the sine is negative in the first half."""
        half = x_NHA.shape[-1] // 2
        return torch.addcmul(x_NHA * cos_N1A, x_NHA.roll(half, -1), sin_N1A)

    def router_scores(self, x_ND: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
        """A router's logits, float32 [N, E]: rounded ones would tie."""
        return F.linear(x_ND.float(), weight_ED.float())

    def combine(self, out_SD: torch.Tensor, slot_NK: torch.Tensor, gates_NK: torch.Tensor) -> torch.Tensor:
        """Σ over K in slot order of gate · row, [N, D]. Its gradient is `models.experts`'s work."""
        first, *rest = zip(slot_NK.unbind(1), gates_NK.unbind(1), strict=True)
        y = out_SD.index_select(0, first[0]) * first[1][:, None]
        for slot, gate in rest:
            y.addcmul_(out_SD.index_select(0, slot), gate[:, None])
        return y

    def log_softmax(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Log-probabilities, float32 [R, V]."""
        return logits_RV.float().log_softmax(-1)


class Native(Operators):
    """Torch as it comes: the fastest path for each shape, and so bits that depend on the batch."""

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_NI, weight_OI.to(x_NI.dtype))

    def per_head(self, x_NHI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nhi,hoi->nho", x_NHI, weight_HOI.to(x_NHI.dtype))


class Exact(Operators):
    """One order of summation for each operator: a row's bits depend on that row alone."""

    absorbs = True

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        return exact.linear(x_NI, weight_OI.to(x_NI.dtype))

    def router_scores(self, x_ND: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
        return exact.linear(x_ND.float(), weight_ED.float())
