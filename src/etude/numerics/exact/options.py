"""Sliding windows, attention sinks and chosen keys: what some layers' attention has beside queries, keys and values.

A sink is a learned logit of a query head that is part of the softmax's denominator (arXiv 2309.17453, §3.3). So with L
the logarithm of the sum of exponentials over the keys, attention with a sink s is attention without it times
sigmoid(L − s). The kernel returns L, so a row has the same bits wherever it has the same bits without sinks. The
gradient is that of attention over the keys with the denominator's logarithm log(exp L + exp s) in place of L.

With an `Index` a token attends to some keys only. The others are masked as later keys are, so that a row keeps the same
bits in chunks, beside other rows and in larger windows.

Shapes: B slots, H query heads, G key/value heads, M rows of queries, W window, A key width, C value width; J heads of
an indexer, I its width, T tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from etude.numerics.exact.elementwise import in_lanes


@dataclass(frozen=True, eq=False)
class Index:
    """Queries and keys by which an indexer chooses the keys to which a token attends (DeepSeek-V3.2, arXiv 2512.02556).

    A token attends to the `top_k` earlier keys, its own included, with the largest scores Σ_j weight_j · relu(q_j · k).
    Among equal scores the earlier key is chosen. `q_MJI`, `weights_MJ`: of the queries. `k_TI`: of the keys, or [M, T,
    I], those of each query. All are float32. `scores`: computes the scores, float32 [M, T]
    (`Operators.index_scores`)."""

    q_MJI: torch.Tensor
    weights_MJ: torch.Tensor
    k_TI: torch.Tensor
    top_k: int
    scores: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

    def part(self, rows: slice | torch.Tensor, keys: torch.Tensor) -> Index:
        """Return the index of some of the queries and other keys."""
        return replace(self, q_MJI=self.q_MJI[rows], weights_MJ=self.weights_MJ[rows], k_TI=keys)

    @torch.no_grad()
    def hide(self, mask_MW: torch.Tensor) -> torch.Tensor:
        """Return a copy of an additive mask (0 or -inf) that hides the keys that are not chosen, too.

        The mask's first rows are those of the queries; further rows are padding. It may have more columns than there
        are keys; these must be hidden already."""
        num, most = len(self.q_MJI), self.k_TI.shape[-2]
        if most <= self.top_k:
            return mask_MW
        hidden = mask_MW.clone()
        own = hidden[:num, :most]
        scores = self.scores(self.q_MJI, self.weights_MJ, self.k_TI) + own
        chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        own.masked_fill_(torch.ones_like(own, dtype=torch.bool).scatter_(1, chosen, value=False), -torch.inf)
        return hidden


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Options of the attention of one layer.

    `window`: the number of latest tokens, itself included, to which a token attends; None: all. `sinks_H`: one logit
    for each query head; None: no sinks. `index`: chooses the keys to which a token attends; None: all of them."""

    window: int | None
    sinks_H: torch.Tensor | None
    index: Index | None = None

    def part(self, rows: slice, keys: torch.Tensor) -> AttentionOptions | None:
        """Return the options for some of the queries. `keys`: the indexer's keys from which these queries choose.

        With at most `top_k` keys the indexer chooses all of them and is left out; None if then no option is left."""
        if self.index is None:
            return self
        index = self.index.part(rows, keys) if len(keys) > self.index.top_k else None
        return None if index is None and self.window is None and self.sinks_H is None else replace(self, index=index)

    def split(self, lengths: Sequence[int]) -> list[AttentionOptions | None]:
        """Return the options of each of several packed sequences."""
        if self.index is None:
            return [self] * len(lengths)
        stops = list(accumulate(lengths))
        pieces = [slice(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]
        return [self.part(piece, self.index.k_TI[piece]) for piece in pieces]

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
