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
    """Return acc + a · b in float32, summed in the order in which the tensor core sums for these shapes."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(x, KIND: tl.constexpr):
    """Round `x` to the dtype `KIND`: to nearest, ties to even."""
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
    """Return the index of the range that contains `tile`, or `number` for a tile after the last range.

    Range i (i < number) is the tiles tile_starts[i] to tile_starts[i + 1] - 1, so `tile_starts` has number + 1 entries,
    the first of them 0. `LANES`: a power of two, at least `number`."""
    lane = tl.arange(0, LANES)
    ends = tl.load(tile_starts + 1 + lane, mask=lane < number, other=2147483647)
    return tl.sum((ends <= tile).to(tl.int32), 0)


@triton.jit
def carried(total, one, pair, four, LEAF: tl.constexpr):
    """Add leaf number `LEAF`, whose value is `total`, to a sum of up to 8 leaves as a binary tree (see `joined`).

    Call it for the leaves 1, 2, ... in order. `one`, `pair`, `four`: the results of the previous call; for leaf 1, leaf
    0 three times. Returns the sums of the largest complete subtree that ends with this leaf, and of the last complete
    subtrees of two and of four leaves."""
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

    `first`: offsets of the first partial sums from `sums`; `step`: the offset from one partial sum to the next.
    `inside`: mask of the offsets to read; the sum is 0 elsewhere."""
    one = tl.load(sums + first, mask=inside, other=0.0)
    pair = one
    four = one
    for leaf in tl.static_range(1, LEAVES):
        total = tl.load(sums + first + leaf * step, mask=inside, other=0.0)
        one, pair, four = carried(total, one, pair, four, leaf)
    return one


@triton.jit
def join(sums, y, size, LEAVES: tl.constexpr, BLOCK: tl.constexpr):
    """Sum partial sums [LEAVES, size] into y [size] as a binary tree, and round once to the dtype of y.

    Each program computes `BLOCK` elements of y."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = joined(sums, at, size, at < size, LEAVES)
    tl.store(y + at, rounded(total, y.dtype.element_ty), mask=at < size)
