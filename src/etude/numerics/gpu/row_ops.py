"""Row operations with gradients: norms, RoPE, gated activation, expert sum, log-probabilities.

They call `kernels.row_ops`. A tile follows from a row's width alone. Shapes: N tokens, H heads, A head width, D width,
S rows after dispatch, K experts per token, F expert width, R rows, V vocabulary size."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from etude.numerics.gpu.kernels import row_ops as kernels
from etude.numerics.gpu.matmul import next_power_of_two

_TILE = 2048  # numbers per program, where rows are shorter
_TURNS = 16  # tiles of rows per program in the norm's gradient
_COLUMNS = 1024
_VOCABULARY = 2048
NO_FUSION: dict[str, Any] = {"enable_fp_fusion": False}


def _tile(width: int) -> dict[str, int]:
    block = next_power_of_two(width)
    return {"ROWS": max(1, _TILE // block), "BLOCK": block, "num_warps": 4 if block <= 4096 else 8}


def _heads(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int, int]:
    """Return x as rows of heads: (x, rows, heads per row, stride of a row, stride of a head).

    Copy only where necessary."""
    if x.dim() == 2:
        x = x[:, None]
    if x.dim() != 3 or x.stride(-1) != 1:
        x = x.contiguous().view(-1, 1, x.shape[-1])
    return x, x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Compute x / √(mean x² + eps) · weight over the last dimension, rounded once."""
    y: torch.Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        view, rows, heads, by_row, by_head = _heads(x)
        width = x.shape[-1]
        y = x.new_empty(x.shape)
        scales = x.new_empty(rows, dtype=torch.float32)
        tile = _tile(width)
        if rows:
            kernels.rms_norm[(-(-rows // tile["ROWS"]),)](
                view, weight, y, scales, rows, heads, by_row, by_head, eps,
                WIDTH=width, WEIGHTED=weight is not None, **tile, **NO_FUSION,
            )  # fmt: skip
        ctx.save_for_backward(x, weight, scales)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        view, rows, heads, by_row, by_head = _heads(x)
        width = x.shape[-1]
        tile = _tile(width)
        count = -(-rows // (tile["ROWS"] * _TURNS))
        dx = x.new_empty(x.shape)
        parts = x.new_empty(count, width, dtype=torch.float32)
        if rows:
            kernels.rms_norm_gradient[(count,)](
                dy.contiguous(), view, weight, scales, dx, parts, rows, heads, by_row, by_head,
                WIDTH=width, WEIGHTED=weight is not None, TURNS=_TURNS, **tile, **NO_FUSION,
            )  # fmt: skip
        return dx, None if weight is None else _column_sums(parts, weight.dtype), None


def _column_sums(x_RD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = x_RD.new_empty(x_RD.shape[1], dtype=dtype)
    kernels.column_sums[(-(-len(y) // 128),)](x_RD, y, len(x_RD), WIDTH=len(y), ROWS=32, BLOCK=128, **NO_FUSION)
    return y


def rotate(x_NHA: torch.Tensor, cos_N1A: torch.Tensor, sin_N1A: torch.Tensor) -> torch.Tensor:
    """Apply RoPE in the half-rotation layout. The sine is negative in the first half."""
    y: torch.Tensor = _Rotate.apply(x_NHA, cos_N1A.contiguous(), sin_N1A.contiguous())  # type: ignore[no-untyped-call]
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _rotated(dy, *ctx.saved_tensors, back=True), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool) -> torch.Tensor:
    view, rows, heads, by_row, by_head = _heads(x)
    y = x.new_empty(x.shape)
    tile = _tile(x.shape[-1])
    if rows:
        kernels.rotate[(-(-rows // tile["ROWS"]),)](
            view, cos, sin, y, rows, heads, by_row, by_head, WIDTH=x.shape[-1], BACK=back, **tile, **NO_FUSION
        )
    return y


def gated(h_S2F: torch.Tensor) -> torch.Tensor:
    """Compute silu(a) · b of rows [a, b], rounded once; [S, F]."""
    y: torch.Tensor = _Gated.apply(h_S2F.contiguous())  # type: ignore[no-untyped-call]
    return y


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(h)
        return _gated(h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return gated_gradient(dy.contiguous(), *ctx.saved_tensors)


def _gated(h_S2F: torch.Tensor) -> torch.Tensor:
    rows, width = h_S2F.shape[0], h_S2F.shape[1] // 2
    y = h_S2F.new_empty(rows, width)
    if rows:
        kernels.gated[(rows, -(-width // _COLUMNS))](h_S2F, y, WIDTH=width, BLOCK=_COLUMNS, **NO_FUSION)
    return y


def gated_gradient(dy_SF: torch.Tensor, h_S2F: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of `gated` with respect to its input `h_S2F`, [S, 2F], from the gradient `dy_SF` of its
    output."""
    rows, width = dy_SF.shape
    dh = torch.empty_like(h_S2F)
    if rows:
        kernels.gated_gradient[(rows, -(-width // _COLUMNS))](
            dy_SF, h_S2F, dh, WIDTH=width, BLOCK=_COLUMNS, **NO_FUSION
        )
    return dh


def combine(out_SD: torch.Tensor, slot_NK: torch.Tensor, gates_NK: torch.Tensor | None) -> torch.Tensor:
    """Sum each token's K rows of expert outputs, weighted by gates; [N, D]. Gates None: all are 1.

    `slot_NK`: the row of each (token, choice). The order of summation is that of the choices."""
    (n, k), width = slot_NK.shape, out_SD.shape[1]
    y = out_SD.new_empty(n, width)
    if n:
        gates = None if gates_NK is None else gates_NK.contiguous()
        kernels.combine[(n, -(-width // _COLUMNS))](
            out_SD.contiguous(), slot_NK.contiguous(), gates, y,
            WIDTH=width, SLOTS=k, GATED=gates is not None, BLOCK=_COLUMNS, **NO_FUSION,
        )  # fmt: skip
    return y


def combine_gradient(
    dy_ND: torch.Tensor, out_SD: torch.Tensor, slot_NK: torch.Tensor, gates_NK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of `combine` with respect to rows [S, D] and gates [N, K].

    Each of the S rows belongs to one (token, choice)."""
    (n, k), width = slot_NK.shape, out_SD.shape[1]
    dout, dgates = torch.empty_like(out_SD), torch.empty_like(gates_NK)
    if n:
        kernels.combine_gradient[(n * k,)](
            dy_ND.contiguous(), out_SD, slot_NK, gates_NK, dout, dgates,
            WIDTH=width, SLOTS=k, BLOCK=next_power_of_two(width), num_warps=_tile(width)["num_warps"], **NO_FUSION,
        )  # fmt: skip
    return dout, dgates


def log_softmax(logits_RV: torch.Tensor) -> torch.Tensor:
    """Compute log-probabilities, float32 [R, V]. The vocabulary is summed in fixed blocks."""
    y: torch.Tensor = _LogSoftmax.apply(logits_RV)  # type: ignore[no-untyped-call]
    return y


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        rows, width = logits.shape
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        blocks = -(-width // _VOCABULARY)
        y = logits.new_empty(rows, width, dtype=torch.float32)
        parts = logits.new_empty(2, rows, blocks, dtype=torch.float32)
        if rows:
            sizes: dict[str, Any] = {"WIDTH": width, "BLOCKS": blocks, "BLOCK": _VOCABULARY, **NO_FUSION}
            kernels.vocabulary_parts[(rows, blocks)](logits, parts, logits.stride(0), **sizes)
            kernels.log_softmax[(rows, blocks)](
                logits, parts, y, logits.stride(0), LANES=next_power_of_two(blocks), **sizes
            )
        ctx.save_for_backward(y)
        ctx.dtype = logits.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(y, dtype=ctx.dtype)
        if len(y):
            kernels.log_softmax_gradient[(len(y),)](
                dy, y, dx, dy.stride(0), WIDTH=y.shape[1], BLOCK=_VOCABULARY, num_warps=8, **NO_FUSION
            )
        return dx
