"""A layer's experts on a GPU with grouped matrix products, without synchronising with the host.

Rows are sorted by expert on the device, `torch.nn.functional.grouped_mm` multiplies each expert's rows by its matrix,
and contributions are summed in slot order. Little is saved for the backward pass: rows are gathered again, the
activation is recomputed, and the gradient of a gate is taken before the second product, so nothing of shape [S, D] is
saved. All operands are contiguous along a width, never along rows, as the kernel's alignment requires (16 bytes); so
weight gradients are contiguous.

Activation and sum by slot are bound by memory; they run as Triton kernels where Triton is installed, else in torch.
Works on a CPU as well, where `models.experts` is faster; the tests compare the two there.

Shapes: N tokens, D width, E experts, K experts per token, F expert width, S = N·K rows sorted by expert, I and O in,
out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

_ALIGNED = 8  # numbers of 16 bytes in bfloat16


def is_supported(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Return whether the kernel supports these tensors: on a GPU, in bfloat16, with widths that are multiples of 16
    bytes."""
    aligned = not any(width % _ALIGNED for weight in weights for width in weight.shape[1:])
    return x.device.type != "cpu" and x.dtype == torch.bfloat16 and aligned


def offsets_on(ends: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the ends of each expert's rows, int32 [E], on the device."""
    return torch.tensor(ends, dtype=torch.int32).to(device)


def grouped_mm(x_SI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's rows by its matrix, [S, O]."""
    product: Callable[..., torch.Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return product(x_SI, weight_EIO, offs=ends_E)


def weight_gradient(g_SO: torch.Tensor, x_SI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Compute each expert's gᵀ · x, [E, O, I]; 0 for experts without rows."""
    gradient = grouped_mm(g_SO.t(), x_SI, ends_E)
    is_empty = torch.cat([ends_E[:1], ends_E.diff()]) == 0
    return gradient.masked_fill_(is_empty[:, None, None], 0.0)


def mix(
    x_ND: torch.Tensor,
    gates_NK: torch.Tensor,
    experts_NK: torch.Tensor,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
    rows: RowOps | None = None,
) -> torch.Tensor:
    """Compute the output of the experts, [N, D]: for each token, Σ over its K experts of gate · expert(x).

    An expert is down(silu(gate_proj x) · up_proj x). Differentiable. `rows`: the operations between products (None: the
    fastest for the device). Weights may have a wider dtype than x."""
    dispatch = SortedDispatch.of(experts_NK, gate_up_E2FD.shape[0])
    rows = rows or row_ops_for(x_ND.device)
    y: torch.Tensor = _Mix.apply(x_ND, gates_NK.contiguous(), gate_up_E2FD, down_EDF, dispatch, rows)  # type: ignore[no-untyped-call]
    return y


@dataclass(frozen=True, eq=False)
class SortedDispatch:
    """The permutation that sorts (token, choice) pairs by expert, ties by token. All tensors are on the device.

    `ends_E`: int32, where each expert's rows end. `choice_S`: int64, the index of each row's choice among the N·K
    choices. `token_S`: int64, each row's token. `slot_NK`: int64, each choice's row."""

    ends_E: torch.Tensor
    choice_S: torch.Tensor
    token_S: torch.Tensor
    slot_NK: torch.Tensor

    @classmethod
    def of(cls, experts_NK: torch.Tensor, num_experts: int) -> SortedDispatch:
        """Sort (token, choice) pairs of `experts_NK` by expert."""
        n, k = experts_NK.shape
        short = experts_NK.reshape(-1).to(torch.int16)  # a radix sort over two bytes instead of eight
        by_expert, choice = short.sort(stable=True)
        numbers = torch.arange(num_experts, device=short.device, dtype=torch.int16)
        ends_E = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
        slot = torch.empty_like(choice).scatter_(0, choice, torch.arange(n * k, device=short.device))
        return cls(ends_E, choice, choice // k, slot.view(n, k))


@dataclass(frozen=True)
class RowOps:
    """Operations on rows between the products, each in one pass over memory where possible.

    `gated`: [S, 2F] → [S, F], silu(first half) · second half. `gated_gradient`: its gradient, ([S, F], [S, 2F]) → [S,
    2F]. `combine`: (rows [S, D], slot_NK, gates_NK or None) → [N, D], the weighted sum over K."""

    gated: Callable[[torch.Tensor], torch.Tensor]
    gated_gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    combine: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    """(rows [S, D], slot_NK, gates_NK; None: 1) -> [N, D]"""


def _gated(h_S2F: torch.Tensor) -> torch.Tensor:
    a, b = h_S2F.chunk(2, -1)
    return F.silu(a) * b


def _gated_gradient(dact_SF: torch.Tensor, h_S2F: torch.Tensor) -> torch.Tensor:
    a, b = h_S2F.chunk(2, -1)
    return torch.cat([torch.ops.aten.silu_backward(dact_SF * b, a), dact_SF * F.silu(a)], -1)


def _combine(out_SD: torch.Tensor, slot_NK: torch.Tensor, gates_NK: torch.Tensor | None) -> torch.Tensor:
    out_NKD = out_SD.index_select(0, slot_NK.reshape(-1)).view(*slot_NK.shape, -1)
    if gates_NK is None:
        return out_NKD.sum(1)
    y: torch.Tensor = torch.linalg.vecdot(out_NKD, gates_NK.to(out_SD.dtype)[:, :, None], dim=1)
    return y


TORCH_ROW_OPS = RowOps(_gated, _gated_gradient, _combine)


@functools.cache
def row_ops_for(device: torch.device) -> RowOps:
    """Return the fastest row operations for a device."""
    if device.type != "cuda" or find_spec("triton") is None:
        return TORCH_ROW_OPS
    from etude.numerics.gpu import row_ops

    return RowOps(row_ops.gated, row_ops.gated_gradient, row_ops.combine)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gates: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        dispatch: SortedDispatch,
        rows: RowOps,
    ) -> torch.Tensor:
        h = grouped_mm(x.index_select(0, dispatch.token_S), gate_up.to(x.dtype).mT, dispatch.ends_E)
        ctx.save_for_backward(x, h, gates, gate_up, down)
        ctx.dispatch, ctx.rows = dispatch, rows
        return rows.combine(grouped_mm(rows.gated(h), down.to(x.dtype).mT, dispatch.ends_E), dispatch.slot_NK, gates)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, h, gates, gate_up, down = ctx.saved_tensors
        dispatch, rows = ctx.dispatch, ctx.rows
        gate_S1 = gates.view(-1).index_select(0, dispatch.choice_S)[:, None].to(x.dtype)
        dy_S = dy.index_select(0, dispatch.token_S)
        dact = grouped_mm(dy_S, down.to(x.dtype), dispatch.ends_E)  # before the gate
        act = rows.gated(h)
        dgates = (
            torch.linalg.vecdot(dact.float(), act.float()).index_select(0, dispatch.slot_NK.view(-1)).view_as(gates)
        )
        ddown = dgate_up = None
        if ctx.needs_input_grad[3]:
            ddown = weight_gradient(dy_S, act * gate_S1, dispatch.ends_E).to(down.dtype)
        dh = rows.gated_gradient(dact.mul_(gate_S1), h)
        if ctx.needs_input_grad[2]:
            dgate_up = weight_gradient(dh, x.index_select(0, dispatch.token_S), dispatch.ends_E).to(gate_up.dtype)
        dx = rows.combine(grouped_mm(dh, gate_up.to(x.dtype), dispatch.ends_E), dispatch.slot_NK, None)
        return dx, dgates.to(gates.dtype), dgate_up, ddown, None, None
