"""Log-probabilities over a vocabulary on a device, some rows at a time: one float32 tensor, not four.

The plain way holds the logits as float32, those over the temperature, the result, and in the backward as much again; at
150,000 tokens a thousand rows are 0.6 GB each. Here rows become float32 in parts, and the gradient leaves as narrow as
the logits came. A row's sums are the vendor's, as ever.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

PART = 1 << 28
"""Numbers that become float32 at a time: 1 GiB."""


def log_softmax(logits_RV: torch.Tensor, divisor_R1: torch.Tensor | None, part: int = PART) -> torch.Tensor:
    """log softmax(logits / divisor), float32 [R, V], differentiable; None: 1."""
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
    """Some rows of each tensor at a time, and of the divisor."""
    rows = max(1, part // max(1, tensors[0].shape[1]))
    cut = [torch.split(tensor, rows) for tensor in tensors]
    by = [None] * len(cut[0]) if divisor is None else list(torch.split(divisor, rows))
    return list(zip(*cut, by, strict=True))
