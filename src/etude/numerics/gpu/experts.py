"""A layer's experts in one differentiable operation: dispatch, two grouped products, activation, sum by slot.

No count is read by the host, so a forward pass can be captured in a CUDA graph. Rows are gathered while they are read;
gradients return by the same permutation, in slot order."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from etude.numerics.gpu.matmul import multiply, weight_gradient
from etude.numerics.gpu.routing import Dispatch
from etude.numerics.gpu.row_ops import combine, combine_gradient, gated, gated_gradient
from etude.numerics.gpu.tiles import tiles_of


def mix(
    x_ND: torch.Tensor,
    gates_NK: torch.Tensor,
    experts_NK: torch.Tensor,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
    *,
    degree: int = 1,
) -> torch.Tensor:
    """Compute the output of the experts, [N, D]: for each token, Σ over its K experts of gate · expert(x).

    An expert is down(silu(gate_proj x) · up_proj x). `degree`: the number of tensor-parallel ranks that may share the
    inner width (`tiles_of`)."""
    dispatch = Dispatch.of(experts_NK, gate_up_E2FD.shape[0])
    y: torch.Tensor = _Mix.apply(x_ND, gates_NK.contiguous(), gate_up_E2FD, down_EDF, dispatch, degree)  # type: ignore[no-untyped-call]
    return y


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gates: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        dispatch: Dispatch,
        degree: int,
    ) -> torch.Tensor:
        size = x.element_size()
        up_tiles = tiles_of(gate_up.shape[1], gate_up.shape[2], size, grouped=True)
        down_tiles = tiles_of(down.shape[1], down.shape[2], size, grouped=True, degree=degree)
        h = multiply(x, gate_up, up_tiles, groups=dispatch.groups, source_N=dispatch.token_S)
        act = gated(h)
        out = multiply(act, down, down_tiles, groups=dispatch.groups)
        ctx.save_for_backward(x, h, act, out, gates, gate_up, down)
        ctx.dispatch = dispatch
        return combine(out, dispatch.slot_NK, gates)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, h, act, out, gates, gate_up, down = ctx.saved_tensors
        dispatch: Dispatch = ctx.dispatch
        size = x.element_size()
        dout, dgates = combine_gradient(dy, out, dispatch.slot_NK, gates)
        dact = multiply(
            dout, down.mT, tiles_of(down.shape[2], down.shape[1], size, grouped=True), groups=dispatch.groups
        )
        ddown = weight_gradient(dout, act, down.dtype, groups=dispatch.groups)
        dh = gated_gradient(dact, h)
        dgate_up = weight_gradient(dh, x, gate_up.dtype, groups=dispatch.groups, source_N=dispatch.token_S)
        up_tiles = tiles_of(gate_up.shape[2], gate_up.shape[1], size, grouped=True)
        dx = combine(multiply(dh, gate_up.mT, up_tiles, groups=dispatch.groups), dispatch.slot_NK, None)
        return dx, dgates, dgate_up, ddown, None, None
