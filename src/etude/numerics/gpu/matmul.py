"""Products with one matrix and with many, and their gradients: the callers of `kernels.matmul`.

Forward and gradients have one order of summation each. Weight gradients are sums over rows in their order, without
atomic additions, so the same step always has the same bits. Shapes: N rows, I and O width in and out, E experts, S rows
sorted by expert, P partial sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from etude.numerics.gpu.kernels import common
from etude.numerics.gpu.kernels import matmul as kernels
from etude.numerics.gpu.tiles import MAX_LEAVES, Tiles, tiles_of

_BAND = 8  # row tiles that go through the outputs together
_FEW_PROGRAMS = 128  # below this number of tiles, each leaf is a separate program
_PART_ROWS = 2048  # rows per program in a weight gradient with few tiles
_JOIN_BLOCK = 1024


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows that are sorted by group (an expert, or a sequence), on the device.

    `starts`: int32 [E + 1]; rows [starts[e], starts[e+1]) belong to group e. `num_rows`: in all."""

    starts: torch.Tensor
    num_rows: int
    _tile_starts: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # shared by a forward's layers

    @property
    def num_groups(self) -> int:
        """Number of groups, empty ones included."""
        return len(self.starts) - 1

    def tile_starts(self, tile_rows: int, share: int = 1) -> torch.Tensor:
        """Return the first tile of each group, int32 [E + 1], where each row counts as `share` rows."""
        if (tile_rows, share) not in self._tile_starts:
            tiles = (self.starts.diff() * share + tile_rows - 1) // tile_rows
            first = torch.nn.functional.pad(tiles.cumsum(0), (1, 0)).to(torch.int32)
            self._tile_starts[tile_rows, share] = first
        return self._tile_starts[tile_rows, share]

    def most_tiles(self, tile_rows: int, share: int = 1) -> int:
        """Return an upper bound of the number of tiles of `tile_rows` rows, without waiting for the device."""
        rows = self.num_rows * share
        return rows // tile_rows + min(self.num_groups, rows)


def multiply(
    x_NI: torch.Tensor,
    weight: torch.Tensor,
    tiles: Tiles,
    *,
    groups: Groups | None = None,
    source_N: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    split: bool | None = None,
) -> torch.Tensor:
    """Compute x · weightᵀ, [N, O].

    `weight` is [O, I], or [E, O, I] with `groups` (which rows belong to which expert). `source_N`: row n of the result
    is computed from row source_N[n] of x. `dtype`: the dtype of the result (None: the dtype of x). `split` selects the
    schedule, which does not change the result (None: chosen by the number of tiles)."""
    ins, outs = x_NI.shape[1], weight.shape[-2]
    rows = x_NI.shape[0] if source_N is None else len(source_N)
    y = x_NI.new_empty(rows, outs, dtype=dtype or x_NI.dtype)
    if not rows:
        return y
    row_tiles = -(-rows // tiles.rows) if groups is None else groups.most_tiles(tiles.rows)
    programs_here = row_tiles * -(-outs // tiles.outs)
    if split is None:
        split = programs_here < _FEW_PROGRAMS
    split = split and tiles.leaves > 1
    to = x_NI.new_empty(tiles.leaves, rows, outs, dtype=torch.float32) if split else y
    num_groups = groups.num_groups if groups is not None else 0
    kernels.product[(programs_here, tiles.leaves if split else 1)](
        x_NI, weight, to,
        source_N, groups.starts if groups else None, groups.tile_starts(tiles.rows) if groups else None,
        rows, row_tiles, x_NI.stride(0), x_NI.stride(1),
        weight.stride(0) if num_groups else 0, weight.stride(-2), weight.stride(-1), rows * outs,
        OUT=outs, IN=ins, LEAVES=tiles.leaves, SPLIT=split,
        GROUPS=num_groups, LANES=next_power_of_two(num_groups), GATHER=source_N is not None,
        ROWS=tiles.rows, OUTS=tiles.outs, INS=tiles.ins, BAND=_BAND,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return join_partial_sums(to, y.dtype) if split else y


def join_partial_sums(sums_PNO: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add P float32 partial sums [P, N, O] as a balanced tree, and round once to `dtype`. P is a power of two up to 8.

    Tensor-parallel ranks add their partial sums in the same way, in the order of their parts of the inner width."""
    leaves = len(sums_PNO)
    if leaves not in (1, 2, 4, MAX_LEAVES):
        raise ValueError(f"{leaves} partial sums: their number must be a power of two up to {MAX_LEAVES}")
    y = sums_PNO.new_empty(sums_PNO.shape[1:], dtype=dtype)
    if size := y.numel():
        common.join[(-(-size // _JOIN_BLOCK),)](sums_PNO.contiguous(), y, size, LEAVES=leaves, BLOCK=_JOIN_BLOCK)
    return y


def weight_gradient(
    dy_NO: torch.Tensor,
    x_NI: torch.Tensor,
    dtype: torch.dtype,
    *,
    groups: Groups | None = None,
    source_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the weights' gradient dyᵀ · x, [O, I]; with `groups` [E, O, I], zero for experts without rows.

    `dtype`: the dtype of the result. `source_N`: row n of dy belongs to row source_N[n] of x."""
    dy_NO, x_NI = dy_NO.contiguous(), x_NI.contiguous()
    (rows, outs), ins = dy_NO.shape, x_NI.shape[1]
    wide = dy_NO.dtype == torch.float32
    out_tile, in_tile, step = (64, 64, 16) if wide else (128, 128, 64)
    tiles = -(-outs // out_tile) * -(-ins // in_tile)
    parts = 1
    while groups is None and tiles * parts < _FEW_PROGRAMS and parts < MAX_LEAVES and rows > parts * _PART_ROWS:
        parts *= 2
    count = parts if groups is None else groups.num_groups
    dw = dy_NO.new_empty(count, outs, ins, dtype=dtype if parts == 1 else torch.float32)
    kernels.weight_gradient[(tiles, count)](
        dy_NO, x_NI, dw, source_N, groups.starts if groups else None,
        rows, -(-rows // parts), dy_NO.stride(0), x_NI.stride(0),
        OUT=outs, IN=ins, GROUPED=groups is not None, GATHER=source_N is not None,
        ROWS=step, OUTS=out_tile, INS=in_tile, num_warps=4 if wide else 8, num_stages=2 if wide else 3,
    )  # fmt: skip
    return dw if groups is not None else join_partial_sums(dw, dtype) if parts > 1 else dw[0]


def linear(
    x_NI: torch.Tensor, weight_OI: torch.Tensor, *, degree: int = 1, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Compute x · weightᵀ, [N, O], differentiable.

    `degree`: the number of tensor-parallel ranks that may share the inner width (`tiles_of`). `dtype`: the dtype of the
    result (None: the dtype of x)."""
    outs, ins = weight_OI.shape
    tiles = tiles_of(outs, ins, x_NI.element_size(), degree=degree)
    y: torch.Tensor = _Product.apply(x_NI, weight_OI, tiles, None, dtype)  # type: ignore[no-untyped-call]
    return y


def grouped(x_SI: torch.Tensor, weight_EOI: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Multiply each group's rows by its matrix, [S, O], differentiable."""
    _, outs, ins = weight_EOI.shape
    tiles = tiles_of(outs, ins, x_SI.element_size(), grouped=True)
    y: torch.Tensor = _Product.apply(x_SI, weight_EOI, tiles, groups, None)  # type: ignore[no-untyped-call]
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, tiles: Tiles, groups: Groups | None, dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = groups
        return multiply(x, weight, tiles, groups=groups, dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        groups: Groups | None = ctx.groups
        outs, ins = weight.shape[-2:]
        dy = dy.to(x.dtype)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = multiply(
                dy, weight.mT, tiles_of(ins, outs, x.element_size(), grouped=groups is not None), groups=groups
            )
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(dy, x, weight.dtype, groups=groups)
        return dx, dw, None, None, None


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
