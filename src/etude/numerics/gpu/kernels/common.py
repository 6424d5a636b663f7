"""Shared parts of the Triton kernels: product of two tiles, rounding, tree of partial sums.

Products have full precision: float32 operands are multiplied as IEEE float32, never as TF32."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter multiplies bfloat16 as integers and rounds towards zero; there the kernels multiply and round
explicitly."""


@triton.jit
def dot(a, b, acc):
    """Compute acc + a · b in float32, in the order of the tensor core for this shape."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(x, KIND: tl.constexpr):
    """Round to the dtype `KIND`: to nearest, ties to even."""
    if INTERPRETED and tl.bfloat16 == KIND and x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(KIND)


@triton.jit
def bound(number):
    """Return a number as the end of a loop. The interpreter's numpy needs a Python integer."""
    if INTERPRETED:
        return number.handle.data.item() if isinstance(number, tl.tensor) else number
    return number


@triton.jit
def find(tile_starts, tile, number, LANES: tl.constexpr):
    """Return which of `number` ranges a tile belongs to, or `number` where there is none.

    Range i begins at tile_starts[i]."""
    lane = tl.arange(0, LANES)
    ends = tl.load(tile_starts + 1 + lane, mask=lane < number, other=2147483647)
    return tl.sum((ends <= tile).to(tl.int32), 0)


@triton.jit
def carried(total, one, pair, four, LEAF: tl.constexpr):
    """Add the next leaf to a sum that is computed as a binary tree (`joined`), leaf after leaf.

    Returns the sum of the subtrees that are now complete, and the sums of the last two and four leaves that still wait
    for their partner."""
    if LEAF % 2 == 1:
        total = one + total
        if LEAF % 4 == 1:
            pair = total
        else:
            total = pair + total
            if LEAF % 8 == 3:
                four = total
            else:
                total = four + total
    return total, pair, four


@triton.jit
def joined(sums, first, step, inside, LEAVES: tl.constexpr):
    """Sum up to 8 partial sums (a power of two) as a balanced tree: ((0+1)+(2+3))+((4+5)+(6+7)).

    `first`: addresses of the first partial sum; `step`: the distance to the next. `inside`: which numbers exist."""
    one = tl.load(sums + first, mask=inside, other=0.0)
    pair = one
    four = one
    for leaf in tl.static_range(1, LEAVES):
        total = tl.load(sums + first + leaf * step, mask=inside, other=0.0)
        one, pair, four = carried(total, one, pair, four, leaf)
    return one


@triton.jit
def join(sums, y, size, LEAVES: tl.constexpr, BLOCK: tl.constexpr):
    """Sum partial sums [LEAVES, size] into y [size] as a binary tree, and round once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = joined(sums, at, size, at < size, LEAVES)
    tl.store(y + at, rounded(total, y.dtype.element_ty), mask=at < size)
