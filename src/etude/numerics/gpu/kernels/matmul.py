"""Triton kernels of matrix products, dense or expert by expert, and of the gradients of the matrices.

A row's sum over the inner width is taken in steps of `INS`, first to last, within a *leaf*. The sums of the leaves are
added in a balanced tree (`common.joined`), and the result is rounded once. The tile is the same for any number of rows:
a tile with one row executes the same instructions as a full one. With few rows, each leaf is a separate program, so
that a small batch still reads the weights with the whole chip (`SPLIT`). With many rows, one program computes all
leaves, and the tree stays in registers. The additions are the same.

For Hopper: tiles of 64 or 128 rows by 128 are full wgmma instructions (m64n128k16), operands are copied asynchronously
into shared memory in a pipeline, and programs are numbered in bands of row tiles, so that concurrent programs share
operands in L2. Weights may be wider than the rows: they are rounded as they are read."""

from __future__ import annotations

import triton
import triton.language as tl

from etude.numerics.gpu.kernels.common import bound, carried, dot, find, rounded


@triton.jit
def place(number, row_tiles, OUT_TILES: tl.constexpr, BAND: tl.constexpr):
    """Return the tile (row tile, output tile) that the program with this number computes.

    Programs go down `BAND` row tiles before they move on to the next output tile, so that neighbours share the
    cache."""
    band = number // (BAND * OUT_TILES)
    size = tl.minimum(row_tiles - band * BAND, BAND)
    within = number % (BAND * OUT_TILES)
    return band * BAND + within % size, within // size


@triton.jit(do_not_specialize=["rows", "row_tiles"])
def product(
    x, w, y, source, starts, tile_starts, rows, row_tiles,
    x_row, x_in, w_group, w_out, w_in, y_leaf,
    OUT: tl.constexpr, IN: tl.constexpr, LEAVES: tl.constexpr, SPLIT: tl.constexpr,
    GROUPS: tl.constexpr, LANES: tl.constexpr, GATHER: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y = x · wᵀ. With `SPLIT`, compute only one leaf of the sum, stored in y [LEAVES, rows, OUT].

    `GROUPS` > 0: rows [starts[g], starts[g+1]) are multiplied by matrix g, whose tiles begin at tile_starts[g].
    `GATHER`: row r of the product is computed from row source[r] of x. The other scalars are strides and sizes of
    tiles."""
    OUT_TILES: tl.constexpr = (OUT + OUTS - 1) // OUTS
    LEAF: tl.constexpr = IN // LEAVES
    tile, out_tile = place(tl.program_id(0), row_tiles, OUT_TILES, BAND)
    first = tile * ROWS
    stop = rows
    if GROUPS > 0:
        group = find(tile_starts, tile, GROUPS, LANES)
        if group >= GROUPS:
            return
        first = tl.load(starts + group) + (tile - tl.load(tile_starts + group)) * ROWS
        stop = tl.load(starts + group + 1)
        w += group.to(tl.int64) * w_group
    row = first + tl.arange(0, ROWS)
    there = row < stop
    held = row
    if GATHER:
        held = tl.load(source + row, mask=there, other=0)
    out = out_tile * OUTS + tl.arange(0, OUTS)
    known = out < OUT
    inner = tl.arange(0, INS)
    x_rows = x + held.to(tl.int64)[:, None] * x_row
    w_outs = w + out.to(tl.int64)[None, :] * w_out
    leaves_here: tl.constexpr = 1 if SPLIT else LEAVES
    first_leaf = tl.program_id(1)  # 0 where there are no others
    if SPLIT:
        y += first_leaf.to(tl.int64) * y_leaf
    one = tl.zeros([ROWS, OUTS], tl.float32)
    pair = one
    four = one
    for leaf in tl.static_range(leaves_here):
        total = tl.zeros([ROWS, OUTS], tl.float32)
        start = ((first_leaf + leaf) * LEAF + inner).to(tl.int64)
        x_tile = x_rows + start[None, :] * x_in
        w_tile = w_outs + start[:, None] * w_in
        for step in range(0, LEAF, INS):
            x_mask = there[:, None]
            w_mask = known[None, :]
            if LEAF % INS != 0:
                x_mask = x_mask & (step + inner < LEAF)[None, :]
                w_mask = w_mask & (step + inner < LEAF)[:, None]
            a = tl.load(x_tile, mask=x_mask, other=0.0)
            b = tl.load(w_tile, mask=w_mask, other=0.0)
            total = dot(a, rounded(b, x.dtype.element_ty), total)
            x_tile += INS * x_in
            w_tile += INS * w_in
        one, pair, four = carried(total, one, pair, four, leaf)
    memory = y + row.to(tl.int64)[:, None] * OUT + out[None, :]
    tl.store(memory, rounded(one, y.dtype.element_ty), mask=there[:, None] & known[None, :])


@triton.jit(do_not_specialize=["rows", "part_rows"])
def weight_gradient(
    dy, x, dw, source, starts, rows, part_rows, dy_row, x_row,
    OUT: tl.constexpr, IN: tl.constexpr, GROUPED: tl.constexpr, GATHER: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the weights' gradient dw = dyᵀ · x, [matrices or parts, OUT, IN].

    `GROUPED`: matrix g has rows [starts[g], starts[g+1]). Otherwise part p sums `part_rows` rows from p · part_rows on.
    `GATHER`: row r of dy belongs to row source[r] of x."""
    IN_TILES: tl.constexpr = (IN + INS - 1) // INS
    tile, number = tl.program_id(0), tl.program_id(1)
    out = tile // IN_TILES * OUTS + tl.arange(0, OUTS)
    inner = tile % IN_TILES * INS + tl.arange(0, INS)
    if GROUPED:
        first = tl.load(starts + number)
        stop = tl.load(starts + number + 1)
    else:
        first = number * part_rows
        stop = tl.minimum(first + part_rows, rows)
    total = tl.zeros([OUTS, INS], tl.float32)
    for step in range(bound(first), bound(stop), ROWS):
        row = step + tl.arange(0, ROWS)
        there = row < stop
        held = row
        if GATHER:
            held = tl.load(source + row, mask=there, other=0)
        a_tile = dy + row.to(tl.int64)[:, None] * dy_row + out[None, :]
        b_tile = x + held.to(tl.int64)[:, None] * x_row + inner[None, :]
        a = tl.load(a_tile, mask=there[:, None] & (out < OUT)[None, :], other=0.0)
        b = tl.load(b_tile, mask=there[:, None] & (inner < IN)[None, :], other=0.0)
        total = dot(tl.trans(a), b, total)
    memory = dw + number.to(tl.int64) * OUT * IN + out.to(tl.int64)[:, None] * IN + inner[None, :]
    tl.store(memory, rounded(total, dw.dtype.element_ty), mask=(out < OUT)[:, None] & (inner < IN)[None, :])
