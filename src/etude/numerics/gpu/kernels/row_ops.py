"""Triton kernels of row operations: norms, RoPE, gated activation, expert sum, routers, log-probabilities.

Each program has a row, or a fixed tile of rows; the layout of its sums follows from the row's width alone. Everything
is computed in float32 and rounded once. All kernels are bound by memory: each reads and writes every number once. They
run without fused multiply-add (`enable_fp_fusion=False`), so that a formula has the same bits wherever it occurs."""

from __future__ import annotations

import triton
import triton.language as tl

from etude.numerics.gpu.kernels.common import bound, rounded


@triton.jit(do_not_specialize=["rows"])
def rms_norm(
    x, weight, y, scales, rows, heads, x_row, x_head, eps,
    WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute y = x / √(mean x² + eps) · weight; `scales` stores 1 / √….

    Row r is head r % heads of row r // heads of x."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    start = (row // heads).to(tl.int64) * x_row + (row % heads) * x_head
    a = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(a * a, 1) / WIDTH + eps))
    result = a * scale[:, None]
    if WEIGHTED:
        w = tl.load(weight + column, mask=column < WIDTH, other=0.0)
        result *= rounded(w, y.dtype.element_ty).to(tl.float32)[None, :]
    to = y + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(to, rounded(result, y.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_gradient(
    dy, x, weight, scales, dx, parts, rows, heads, x_row, x_head,
    WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of `rms_norm`.

    `parts` [programs, WIDTH] are sums of the weight's gradient over ROWS · TURNS rows."""
    column = tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in range(TURNS):
        row = (tl.program_id(0) * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        start = (row // heads).to(tl.int64) * x_row + (row % heads) * x_head
        flat = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        unit = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32) * scale
        slope = tl.load(dy + flat, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            total += slope * unit
            w = tl.load(weight + column, mask=column < WIDTH, other=0.0)
            slope *= rounded(w, x.dtype.element_ty).to(tl.float32)[None, :]
        change = scale * (slope - unit * (tl.sum(slope * unit, 1) / WIDTH)[:, None])
        tl.store(dx + flat, rounded(change, dx.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(parts + tl.program_id(0) * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH)


@triton.jit(do_not_specialize=["rows"])
def column_sums(x, y, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the rows of x [rows, WIDTH] into y [WIDTH]: first every ROWS-th row, then these sums, in a fixed order."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, bound(rows), ROWS):
        row = first + lane
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(x + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    tl.store(y + column, rounded(tl.sum(total, 0), y.dtype.element_ty), mask=column < WIDTH)


@triton.jit(do_not_specialize=["rows"])
def rotate(
    x, cos, sin, y, rows, heads, x_row, x_head,
    WIDTH: tl.constexpr, BACK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply RoPE: y[i] = x[i] · cos[i] + x[i + half] · sin[i], with indices modulo the width.

    With `BACK` compute the transpose, the gradient."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    other = (column + WIDTH // 2) % WIDTH
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    token = (row // heads).to(tl.int64)
    start = (token * x_row + (row % heads) * x_head)[:, None]
    angle = (token * WIDTH)[:, None]
    a = tl.load(x + start + column[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + start + other[None, :], mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + angle + column[None, :], mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle + (other if BACK else column)[None, :], mask=inside, other=0.0).to(tl.float32)
    to = y + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(to, rounded(a * c + b * s, y.dtype.element_ty), mask=inside)


@triton.jit
def gated(h, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute y = silu(a) · b of rows h = [a, b]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    a = tl.load(h + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(h + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + column, rounded(tl.div_rn(a, 1.0 + tl.exp(-a)) * b, y.dtype.element_ty), mask=inside)


@triton.jit
def gated_gradient(dy, h, dh, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the gradient of `gated`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    a = tl.load(h + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(h + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(dy + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.div_rn(1.0, 1.0 + tl.exp(-a))
    da = slope * b * share * (1.0 + a * (1.0 - share))
    to = dh + row * 2 * WIDTH + column
    tl.store(to, rounded(da, dh.dtype.element_ty), mask=inside)
    tl.store(to + WIDTH, rounded(slope * a * share, dh.dtype.element_ty), mask=inside)


@triton.jit
def combine(
    out, slots, gates, y,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute y[n] = Σ over k of gates[n, k] · out[slots[n, k]], k ascending."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(SLOTS):
        slot = tl.load(slots + token * SLOTS + k).to(tl.int64)
        row = tl.load(out + slot * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        if GATED:
            row *= tl.load(gates + token * SLOTS + k).to(tl.float32)
        total += row
    tl.store(y + token * WIDTH + column, rounded(total, y.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def combine_gradient(
    dy, out, slots, gates, dout, dgates,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `combine`: dout of the expert outputs, and dgates of the gates.

    There is one program per (n, k). Programs write different rows, since dispatch is a permutation."""
    at = tl.program_id(0).to(tl.int64)
    token = at // SLOTS
    slot = tl.load(slots + at).to(tl.int64)
    gate = tl.load(gates + at).to(tl.float32)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    slope = tl.load(dy + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(out + slot * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(dout + slot * WIDTH + column, rounded(slope * gate, dout.dtype.element_ty), mask=inside)
    tl.store(dgates + at, rounded(tl.sum(slope * row, 0), dgates.dtype.element_ty))


@triton.jit
def vocabulary_parts(x, parts, x_row, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute maximum and Σ exp(x - maximum) of one block of a row of logits, stored in parts [2, rows, BLOCKS]."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + row * x_row + column, mask=column < WIDTH, other=float("-inf")).to(tl.float32)
    most = tl.max(a, 0)
    total = tl.sum(tl.exp(a - tl.where(most == float("-inf"), 0.0, most)), 0)
    tl.store(parts + row * BLOCKS + block, most)
    tl.store(parts + (tl.num_programs(0) + row) * BLOCKS + block, total)


@triton.jit
def log_softmax(
    x, parts, y, x_row, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the log-probabilities of one block of a row, from the `parts` of the whole row (`vocabulary_parts`)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, LANES)
    most = tl.load(parts + row * BLOCKS + lane, mask=lane < BLOCKS, other=float("-inf"))
    total = tl.load(parts + (tl.num_programs(0) + row) * BLOCKS + lane, mask=lane < BLOCKS, other=0.0)
    top = tl.max(most, 0)
    whole = top + tl.log(tl.sum(total * tl.exp(most - top), 0))
    column = block * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + row * x_row + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + column, a - whole, mask=column < WIDTH)


@triton.jit
def log_softmax_gradient(dy, y, dx, dy_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the gradient dx = dy - exp(y) · Σ dy of one row of `log_softmax`."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        column = first + lane
        total += tl.load(dy + row * dy_row + column, mask=column < WIDTH, other=0.0)
    whole = tl.sum(total, 0)
    for first in range(0, WIDTH, BLOCK):
        column = first + lane
        inside = column < WIDTH
        slope = tl.load(dy + row * dy_row + column, mask=inside, other=0.0)
        chance = tl.exp(tl.load(y + row * WIDTH + column, mask=inside, other=0.0))
        tl.store(dx + row * WIDTH + column, rounded(slope - chance * whole, dx.dtype.element_ty), mask=inside)
