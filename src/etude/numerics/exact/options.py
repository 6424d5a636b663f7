"""Sliding windows and attention sinks: what some layers' attention has beside queries, keys and values.

A sink is a learned logit of a query head that is part of the softmax's denominator (arXiv 2309.17453, §3.3). So with L
the logarithm of the sum of exponentials over the keys, attention with a sink s is attention without it times
sigmoid(L − s). The kernel returns L, so a row has the same bits wherever it has the same bits without sinks. The
gradient is that of attention over the keys with the denominator's logarithm log(exp L + exp s) in place of L.

Shapes: B slots, H query heads, G key/value heads, M rows of queries, W window, A key width, C value width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from etude.numerics.exact.elementwise import in_lanes


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Options of the attention of one layer.

    `window`: the number of latest tokens, itself included, to which a token attends; None: all. `sinks_H`: one logit
    for each query head; None: no sinks."""

    window: int | None
    sinks_H: torch.Tensor | None

    def rows(
        self, heads: int | None = None, like: torch.Tensor | None = None, num: int = 1
    ) -> tuple[torch.Tensor, ...]:
        """Return the sinks, float32, as a further argument of an attention function; empty without sinks.

        The shape is [1, H, 1] if each row is a token. With `heads` and `like`, the queries [B, G, M, A], it is [1, G,
        M]: then the rows of a key/value head are `num` tokens of each of its query heads, followed by padding."""
        if self.sinks_H is None:
            return ()
        sinks_H = self.sinks_H.float()
        if heads is None or like is None:
            return (sinks_H[None, :, None],)
        own = sinks_H.view(heads, -1).repeat(1, num)
        return (F.pad(own, (0, like.shape[2] - own.shape[1]))[None],)


def attention_with_sinks(
    q_BHMA: torch.Tensor,
    k_BGWA: torch.Tensor,
    v_BGWC: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Compute attention with sinks, [B, H, M, C].

    `mask`: additive, broadcasts to [B, H, M, W]. `sinks`: float32, broadcasts to [B, H, M]. Uses the vendor's kernel on
    CPUs, else explicit products."""
    repeats = q_BHMA.shape[1] // k_BGWA.shape[1]
    if repeats > 1:
        k_BGWA, v_BGWC = (t.repeat_interleave(repeats, 1) for t in (k_BGWA, v_BGWC))
    sinks_BHM = sinks.expand(q_BHMA.shape[:3])
    if q_BHMA.device.type == "cpu":
        o: torch.Tensor = _WithSinks.apply(q_BHMA, k_BGWA, v_BGWC, mask, scale, sinks_BHM)  # type: ignore[no-untyped-call]
        return o
    scores = (q_BHMA @ k_BGWA.mT).float() * (q_BHMA.shape[-1] ** -0.5 if scale is None else scale) + mask
    weights = torch.cat([scores, sinks_BHM[..., None]], -1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(v_BGWC.dtype), v_BGWC)


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor,
        scale: float | None,
        sinks_BHM: torch.Tensor,
    ) -> torch.Tensor:
        mask = mask[None, None] if mask.dim() == 2 else mask
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        o, log_sum = kernel(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
        share = in_lanes(torch.sigmoid, (log_sum - sinks_BHM).flatten(0, -2)).view_as(log_sum)
        out: torch.Tensor = (o * share[..., None]).to(o.dtype)
        ctx.save_for_backward(q, k, v, mask, out, log_sum, sinks_BHM)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, mask, o, log_sum, sinks_BHM = ctx.saved_tensors
        total = torch.logaddexp(log_sum, sinks_BHM)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = kernel(do, q, k, v, o, total, 0.0, False, attn_mask=mask, scale=ctx.scale)
        dsinks = -(sinks_BHM - total).exp() * torch.linalg.vecdot(do.float(), o.float())
        return dq, dk, dv, None, None, dsinks
