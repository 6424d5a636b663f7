"""Operators with the fastest kernel for each shape, mostly torch's. The shapes are those of `operators`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from etude.numerics import grouped_experts, varlen_attention
from etude.numerics.exact import few_rows
from etude.numerics.exact.options import AttentionOptions
from etude.numerics.operators import Operators, PackedCausal

CACHED = 1 << 16
"""Most numbers of a weight that is left to the vendor's GEMM: the weight stays in a core's cache, and packing it costs
less than a call of `few_rows`."""
PART = 1 << 28
"""Numbers that are converted to float32 at a time: 1 GiB."""


class Native(Operators):
    """Operators that use the fastest kernel for each shape, so that a row's bits depend on the batch."""

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        large = weight_OI.numel() > CACHED
        if large and few_rows.are_for(x_NI, weight_OI) and 0 < len(x_NI) <= few_rows.MOST_ROWS:
            done = few_rows.products(x_NI, weight_OI, [len(x_NI)], few_rows.ANY_ORDER)
            if done is not None:
                return done
        return F.linear(x_NI, weight_OI.to(x_NI.dtype))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        if few_rows.are_for(x, *(() if weight is None else (weight,))):
            done = few_rows.rms_norm(x, weight, eps)
            if done is not None:
                return done
        return super().rms_norm(x, weight, eps)

    def router_scores(self, x_ND: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
        return self.linear(x_ND.float(), weight_ED.float())

    def attend_slots(
        self,
        q_NGRA: torch.Tensor,
        keys_SGCA: torch.Tensor,
        values_SGCB: torch.Tensor,
        slots: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        scale: float | None = None,
    ) -> torch.Tensor | None:
        if not few_rows.are_for(q_NGRA, keys_SGCA, values_SGCB):
            return None
        return few_rows.attention(q_NGRA, keys_SGCA, values_SGCB, slots, counts, scale)

    def per_head(self, x_NHI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nhi,hoi->nho", x_NHI, weight_HOI.to(x_NHI.dtype))

    def packed_attention(self, lengths: Sequence[int], device: torch.device) -> PackedCausal:
        """Return attention in packed sequences of these lengths, for one forward pass.

        On a GPU it is one kernel for all sequences, if there is one for the dtype and the width."""
        each = super().packed_attention(lengths, device)
        if device.type == "cpu":
            return each
        starts, longest = varlen_attention.starts(lengths, device), max(lengths)

        def attend(
            q_NHA: torch.Tensor,
            k_NGA: torch.Tensor,
            v_NGC: torch.Tensor,
            scale: float | None = None,
            options: AttentionOptions | None = None,
        ) -> torch.Tensor:
            if options is not None or not varlen_attention.is_supported(device, q_NHA.dtype, q_NHA.shape[-1]):
                return each(q_NHA, k_NGA, v_NGC, scale, options)
            return varlen_attention.attend(q_NHA, k_NGA, v_NGC, starts, starts, longest, longest, scale=scale)

        return attend

    def log_softmax(self, logits_RV: torch.Tensor, temperature: torch.Tensor | float = 1.0) -> torch.Tensor:
        """Compute log-probabilities, float32 [R, V]; on a GPU without float32 copies of the logits."""
        if logits_RV.device.type == "cpu":
            return super().log_softmax(logits_RV, temperature)
        if isinstance(temperature, torch.Tensor):
            divisor = temperature.to(logits_RV.device, torch.float32).expand(len(logits_RV), 1)
        elif temperature == 1.0:
            divisor = None
        else:
            divisor = torch.full((len(logits_RV), 1), temperature, dtype=torch.float32, device=logits_RV.device)
        return chunked_log_softmax(logits_RV, divisor)

    def fused_experts(
        self,
        x_ND: torch.Tensor,
        gates_NK: torch.Tensor,
        experts_NK: torch.Tensor,
        gate_up_E2FD: torch.Tensor,
        down_EDF: torch.Tensor,
    ) -> torch.Tensor | None:
        if grouped_experts.is_supported(x_ND, gate_up_E2FD, down_EDF):
            return grouped_experts.mix(x_ND, gates_NK, experts_NK, gate_up_E2FD, down_EDF)
        if few_rows.are_for(x_ND, gate_up_E2FD, down_EDF) and 0 < len(x_ND) <= few_rows.MOST_ROWS:
            blocks = (few_rows.ANY_ORDER, few_rows.ANY_ORDER)
            return few_rows.experts(x_ND, gates_NK, experts_NK, gate_up_E2FD, down_EDF, blocks)
        if x_ND.device.type == "cuda" and find_spec("triton") is not None:  # for other dtypes and widths
            from etude.numerics.gpu import mix

            return mix(x_ND, gates_NK, experts_NK, gate_up_E2FD, down_EDF)
        return None


def chunked_log_softmax(logits_RV: torch.Tensor, divisor_R1: torch.Tensor | None, part: int = PART) -> torch.Tensor:
    """Compute log softmax(logits / divisor), float32 [R, V], differentiable. Divisor None: 1.

    The plain way stores the logits in float32, the scaled logits and the result, and as much again in the backward
    pass; with a vocabulary of 150,000, a thousand rows are 0.6 GB each. Here rows are converted in chunks of `part`
    numbers, and the gradient has the dtype of the logits."""
    y: torch.Tensor = _LogSoftmax.apply(logits_RV, divisor_R1, part)  # type: ignore[no-untyped-call]
    return y


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, divisor: torch.Tensor | None, part: int) -> torch.Tensor:
        y = torch.empty_like(logits, dtype=torch.float32)
        for x_part, y_part, by in _parts(part, divisor, logits, y):
            wide = x_part.float()
            torch.log_softmax(wide if by is None else wide / by, -1, out=y_part)
        ctx.save_for_backward(y, divisor)
        ctx.dtype, ctx.part = logits.dtype, part
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, divisor = ctx.saved_tensors
        dx = torch.empty_like(y, dtype=ctx.dtype)
        for dy_part, y_part, dx_part, by in _parts(ctx.part, divisor, dy, y, dx):
            slope = torch.ops.aten._log_softmax_backward_data(dy_part, y_part, -1, torch.float32)
            dx_part.copy_(slope if by is None else slope.div_(by))
        return dx, None, None


def _parts(part: int, divisor: torch.Tensor | None, *tensors: torch.Tensor) -> list[tuple[Any, ...]]:
    rows = max(1, part // max(1, tensors[0].shape[1]))
    cut = [torch.split(tensor, rows) for tensor in tensors]
    by = [None] * len(cut[0]) if divisor is None else list(torch.split(divisor, rows))
    return list(zip(*cut, by, strict=True))
