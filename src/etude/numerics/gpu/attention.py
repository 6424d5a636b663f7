"""Causal attention over cached keys and values, in pages or packed: the callers of `kernels.attention`.

Shapes: N tokens, H query heads, G key heads, A key width, B value width (different in latent attention), S sequences, P
pages per sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from etude.numerics.gpu.kernels import attention as kernels
from etude.numerics.gpu.matmul import Groups, next_power_of_two
from etude.numerics.gpu.row_ops import NO_FUSION

_WHOLE = 1 << 30  # a page longer than any sequence
_SPAN = 1024  # keys whose sums may be computed by a separate program
_FEW_PROGRAMS = 128


@dataclass(frozen=True, eq=False)
class Queries:
    """The sequence and position of each row of a forward pass.

    `tokens`: each sequence's rows, in order. `positions_S`: int32, the position of each sequence's first row; the
    positions of its other rows follow."""

    tokens: Groups
    positions_S: torch.Tensor

    @classmethod
    def of(cls, lengths: torch.Tensor, positions_S: torch.Tensor, num_tokens: int) -> Queries:
        """Make the queries of a forward pass with `num_tokens` rows in all.

        `lengths`: int [S], the number of rows of each sequence. `positions_S`: the position of each sequence's first
        row."""
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        return cls(Groups(starts, num_tokens), positions_S.to(torch.int32))


@dataclass(frozen=True, eq=False)
class PagedKeys:
    """Keys and values of many sequences in pages.

    Position j of sequence s is at offset j % page of page pages[s, j // page]. A contiguous piece of memory per
    sequence is one long page. `keys`: [pages, G, page, A], with any strides but the last. `values`: [pages, G, page,
    B], perhaps a view of the first numbers of `keys`. `pages_SP`: int32, the pages of each sequence. `page`: positions
    per page."""

    keys: torch.Tensor
    values: torch.Tensor
    pages_SP: torch.Tensor
    page: int


def attend(
    q_NHA: torch.Tensor, kept: PagedKeys, queries: Queries, scale: float | None = None, *, spread: bool | None = None
) -> torch.Tensor:
    """Compute causal attention of queries over cached keys, and return the output [N, H, B].

    Each row attends to the keys of its sequence up to its own position; these, including its own, must be in `kept`
    already. `scale` None: 1/√A. `spread` selects the schedule, which does not change the result (None: chosen by the
    number of tiles)."""
    o, _ = _attend(q_NHA, kept, queries, scale, spread)
    return o


def attend_packed(
    q_NHA: torch.Tensor, k_NGA: torch.Tensor, v_NGB: torch.Tensor, tokens: Groups, scale: float | None = None
) -> torch.Tensor:
    """Compute causal attention of packed full sequences, and return the output [N, H, B]. Differentiable; equals
    `attend` bit for bit.

    `tokens`: the rows of each sequence."""
    o: torch.Tensor = _Packed.apply(q_NHA, k_NGA, v_NGB, tokens, scale)  # type: ignore[no-untyped-call]
    return o


def _sizes(key_width: int, value_width: int, item_bytes: int) -> dict[str, int]:
    """Return widths as powers of two, and the tile, from widths and dtype alone."""
    wide = max(16, next_power_of_two(key_width + 1) // 2)
    rest = max(16, next_power_of_two(key_width - wide)) if key_width > wide else 0
    widths = {
        "WIDTH": key_width, "WIDE": wide, "REST": rest,
        "VALUE": value_width, "VALUES": max(16, next_power_of_two(value_width)),
        "SPAN": 0 if wide > 256 else _SPAN,  # 0: one span; two sums of a latent's width do not fit in registers
    }  # fmt: skip
    if item_bytes == 4:
        side = 32 if wide <= 128 else 16
        return {**widths, "ROWS": side, "KEYS": side, "num_warps": 8, "num_stages": 1}
    if wide > 256:
        return {**widths, "ROWS": 64, "KEYS": 32, "num_warps": 8, "num_stages": 2}
    return {**widths, "ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3}


def _gradient_sizes(key_width: int, value_width: int, item_bytes: int) -> dict[str, int]:
    sizes = _sizes(key_width, value_width, item_bytes)
    del sizes["SPAN"]
    if item_bytes == 2:
        sizes |= {"ROWS": 32, "KEYS": 32, "num_stages": 1} if sizes["WIDE"] > 256 else {"num_stages": 2, "num_warps": 8}
    return sizes


def _attend(
    q: torch.Tensor, kept: PagedKeys, queries: Queries, scale: float | None, spread: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output o and, for the gradient, log2 of the sum of powers of 2 of each row's scores."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    k, v, tokens = kept.keys, kept.values, queries.tokens
    (n, heads, width), (_, key_heads, _, value_width) = q.shape, v.shape
    share, rows = heads // key_heads, n * heads
    o = q.new_empty(n, heads, value_width)
    lse = q.new_empty(n, heads, dtype=torch.float32)
    sizes = _sizes(width, value_width, q.element_size())
    shared = v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and value_width == sizes["WIDE"]
    tiles = tokens.most_tiles(sizes["ROWS"], share)
    spans = -(-kept.pages_SP.shape[1] * kept.page // sizes["SPAN"]) if sizes["SPAN"] else 1
    if spread is None:
        spread = tiles * key_heads < _FEW_PROGRAMS and kept.page != _WHOLE
    spread = spread and spans > 1
    to = o.new_empty(spans, rows, value_width, dtype=torch.float32) if spread else o
    marks = lse.new_empty(2, spans, rows) if spread else None
    if n:
        kernels.attend[(tiles, key_heads, spans if spread else 1)](
            q, k, v, to, lse, marks, tokens.starts, queries.positions_S, tokens.tile_starts(sizes["ROWS"], share),
            kept.pages_SP, kept.pages_SP.shape[1], _base_2(scale, width), q.stride(0), q.stride(1),
            k.stride(0), k.stride(2), k.stride(1), v.stride(0), v.stride(2), v.stride(1), heads,
            tokens.num_groups, rows, LANES=next_power_of_two(tokens.num_groups), PAGE=kept.page, SHARE=share,
            SHARED=shared, SPREAD=spread, **sizes, **NO_FUSION,
        )  # fmt: skip
        if spread:
            kernels.meet[(-(-rows // 16),)](
                to, marks, o, lse, rows, spans, VALUE=value_width, VALUES=sizes["VALUES"], ROWS=16, **NO_FUSION
            )
    return o, lse


def _pages(t_NGW: torch.Tensor) -> torch.Tensor:
    """Return packed rows as pages: a page begins at every row and continues through the rows after it."""
    (n, heads, width), (by_row, by_head, _) = t_NGW.shape, t_NGW.stride()
    return t_NGW.as_strided((n, heads, 1, width), (by_row, by_head, by_row, 1))


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: Groups, scale: float | None
    ) -> torch.Tensor:
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        first = tokens.starts[:-1]
        kept = PagedKeys(_pages(k), _pages(v), first[:, None], _WHOLE)
        o, lse = _attend(q, kept, Queries(tokens, torch.zeros_like(first)), scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.tokens, ctx.scale = tokens, scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        tokens: Groups = ctx.tokens
        do = do.contiguous()
        (n, heads, width), key_heads, value_width = q.shape, k.shape[1], v.shape[2]
        share = heads // key_heads
        sizes = _gradient_sizes(width, value_width, q.element_size())
        dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
        delta = torch.empty_like(lse)
        common: dict[str, Any] = {"LANES": next_power_of_two(tokens.num_groups), "SHARE": share, **sizes, **NO_FUSION}
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], heads)
        scale = _base_2(ctx.scale, width)
        if n:
            kernels.query_gradient[(tokens.most_tiles(sizes["ROWS"], share), key_heads)](
                q, k, v, o, do, lse, delta, dq, tokens.starts, tokens.tile_starts(sizes["ROWS"], share), scale,
                *strides, tokens.num_groups, **common,
            )  # fmt: skip
            kernels.key_gradient[(tokens.most_tiles(sizes["KEYS"]), key_heads)](
                q, k, v, do, lse, delta, dk, dv, tokens.starts, tokens.tile_starts(sizes["KEYS"]), scale,
                *strides, tokens.num_groups, key_heads, **common,
            )  # fmt: skip
        return dq, dk, dv, None, None


def _base_2(scale: float | None, width: int) -> float:
    return (width**-0.5 if scale is None else scale) * math.log2(math.e)
