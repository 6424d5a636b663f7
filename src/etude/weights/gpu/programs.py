"""The device programs, in Triton: each passes over blocks of items once and produces small lists.

The rank of an item in its class is a prefix sum: sixteen 16-bit counters in four 64-bit words, so a pass does about as
much arithmetic as it moves bytes. A block is a row of a table (`blocks.py`, whose field names are used here too):
addresses and bounds, so one launch covers all tiles of a batch, whichever tensors they belong to. A `FULL` block is
complete, contiguous and aligned, and is read without masks in wide loads. Only this file imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

OLD = tl.constexpr(0)
NEW = tl.constexpr(1)
START = tl.constexpr(2)
COLUMN = tl.constexpr(3)
COLS = tl.constexpr(4)
STRIDE = tl.constexpr(5)
COUNT = tl.constexpr(6)
HIGH = tl.constexpr(7)
CLASSES = tl.constexpr(8)
PLACE = tl.constexpr(9)
FIELDS = tl.constexpr(10)


@triton.jit
def at(address, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Convert an address to a pointer to items; two 4-bit items share a byte. `ALIGNED`: allow 16-byte loads."""
    if WIDTH <= 8:
        pointer = address.to(tl.pointer_type(tl.uint8))
    elif WIDTH == 16:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.int32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def unpacked(word, index, WIDTH: tl.constexpr):
    """Return items (elements as integers of `WIDTH` bits) as 32-bit integers; bits above `WIDTH` are 0.

    `word`: the loaded words. `index`: the numbers of the items; two 4-bit items share a word.
    """
    item = word.to(tl.uint32)
    if WIDTH == 4:
        item = (item >> ((index & 1) * 4).to(tl.uint32)) & 15
    elif WIDTH == 16:
        item = item & 0xFFFF
    return item


@triton.jit
def numbers(row, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Return the numbers of the items of a block, and a mask of those that exist.

    `row`: pointer to the block's row in the table of blocks. The numbers count from the first item of the tensor, or in
    a full block from the first item of the block.
    """
    j = tl.arange(0, BLOCK)
    if FULL:
        index = j.to(tl.int64)
        inside = j < BLOCK
    else:
        t = tl.load(row + COLUMN).to(tl.int32) + j
        cols = tl.load(row + COLS).to(tl.int32)
        index = tl.load(row + START) + j + (t // cols).to(tl.int64) * (tl.load(row + STRIDE) - cols)
        inside = j < tl.load(row + COUNT).to(tl.int32)
    return index, inside


@triton.jit
def items(row, side: tl.constexpr, index, inside, WIDTH: tl.constexpr, FULL: tl.constexpr):
    """Load the items of a block from one snapshot. Return pointers to them, and the items.

    `row`: pointer to the block's row in the table of blocks. `side`: OLD or NEW. `index`, `inside`: from `numbers`.
    """
    address = tl.load(row + side)
    if FULL:
        address += tl.load(row + START) * WIDTH // 8
    first = at(address, WIDTH, FULL)
    memory = first + (index >> 1 if WIDTH == 4 else index)
    word = tl.load(memory) if FULL else tl.load(memory, mask=inside, other=0)
    return memory, unpacked(word, index, WIDTH)


@triton.jit
def classes_of(row, old, SHIFT: tl.constexpr, EXPONENTS: tl.constexpr):
    """Return the class of each item of a block, which follows from the exponent of its old code.

    `row`: pointer to the block's row in the table of blocks. `old`: the old items. `SHIFT`, `EXPONENTS`: shift and mask
    of the exponent.
    """
    exponent = ((old >> SHIFT) & EXPONENTS).to(tl.int32)
    last = tl.load(row + CLASSES).to(tl.int32) - 1
    return tl.minimum(tl.maximum(tl.load(row + HIGH).to(tl.int32) - exponent, 0), last)


@triton.jit
def ranks(kind, inside, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of items of the same class before each item of a block.

    `kind`: the class of each item; `inside`: which items exist. `GROUPS`: groups of four classes; 0: a single class.
    """
    rank = tl.arange(0, BLOCK)
    if GROUPS > 0:
        lane = ((kind & 3) * 16).to(tl.int64)
        for group in tl.static_range(GROUPS):
            mine = inside & ((kind >> 2) == group)
            one = tl.where(mine, tl.full([BLOCK], 1, tl.int64) << lane, 0)
            before = tl.cumsum(one, 0) - one
            rank = tl.where(mine, ((before >> lane) & 0xFFFF).to(tl.int32), rank)
    return rank


@triton.jit
def in_order(item, WIDTH: tl.constexpr, EXPONENTS: tl.constexpr):
    """Map items to integers in the order of the floats that they stand for, as `ulp_steps.to_order` does."""
    if EXPONENTS != 0:
        negative = ((item >> (WIDTH - 1)) & 1) == 1
        item = tl.where(negative, item ^ (2**WIDTH - 1), item ^ (2 ** (WIDTH - 1)))
    return item


@triton.jit
def moved(old, step, WIDTH: tl.constexpr, EXPONENTS: tl.constexpr):
    """Return each old item moved by `step` ULP steps (signed) in the order of floats."""
    item = in_order(old, WIDTH, EXPONENTS) + step.to(tl.uint32, bitcast=True)
    if EXPONENTS != 0:
        positive = ((item >> (WIDTH - 1)) & 1) == 1
        item = tl.where(positive, item ^ (2 ** (WIDTH - 1)), item ^ (2**WIDTH - 1))
    return item & (2**WIDTH - 1)


@triton.jit
def bits_below(word, bit):
    """Return the number of set bits of a word below the bit with number `bit`."""
    x = word & ((1 << bit) - 1)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def scan(
    blocks, which, counts, starts, total, found, steps, capacity,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr, EXPONENTS: tl.constexpr,
    GROUPS: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find what changed in a block of items, in order, and count its items by class.

    `blocks`: the table of blocks; `which`: the number of the block of each program. Each change is written to `found`
    (its class, and its rank among the block's items of that class) and `steps` (its signed ULP steps). The block
    reserves space for its changes in `total`; nothing is written above `capacity`, and the caller repeats the call with
    more. `counts`: unchanged items by class, then changed items by class.
    """
    block = tl.load(which + tl.program_id(0))
    row = blocks + block.to(tl.int64) * FIELDS
    index, inside = numbers(row, FULL, BLOCK)
    _, old = items(row, OLD, index, inside, WIDTH, FULL)
    _, new = items(row, NEW, index, inside, WIDTH, FULL)
    kind = classes_of(row, old, SHIFT, EXPONENTS)
    changes = inside & (old != new)
    by_class = tl.histogram(kind + 16 * changes.to(tl.int32), 32, mask=inside)
    tl.store(counts + block * 32 + tl.arange(0, 32), by_class)
    rank = ranks(kind, inside, GROUPS, BLOCK)
    there = changes.to(tl.int32)
    start = tl.atomic_add(total, tl.sum(there, 0))
    tl.store(starts + block, start)
    to = start + tl.cumsum(there, 0) - 1
    room = changes & (to < capacity)
    lift: tl.constexpr = 32 - WIDTH
    step = (in_order(new, WIDTH, EXPONENTS) - in_order(old, WIDTH, EXPONENTS)) << lift
    step = step.to(tl.int32, bitcast=True) >> lift
    tl.store(found + to, (kind << 16) | rank, mask=room)
    tl.store(steps + to, step, mask=room)


@triton.jit
def sort_out(counts, starts, bases, slots, found, steps, where, sizes, CHUNK: tl.constexpr):
    """Sort the changes that `scan` found in a block by tile, class and rank, and write them to `where` and `sizes`.

    `where`: the numbers of the changed items, in the order of classes. `sizes`: their steps. `bases`: by class, the
    number of the block's first item; `slots`: the number of its first change. `CHUNK`: changes that are sorted at a
    time.
    """
    block = tl.program_id(0)
    kinds = tl.arange(0, 16)
    base = tl.load(bases + block * 16 + kinds)
    slot = tl.load(slots + block * 16 + kinds)
    start = tl.load(starts + block)
    count = tl.sum(tl.load(counts + block * 32 + 16 + kinds), 0)
    first = 0
    while first < count:
        i = first + tl.arange(0, CHUNK)
        one = tl.load(found + start + i, mask=i < count, other=0)
        mine = ((one >> 16)[:, None] == kinds[None, :]) & (i < count)[:, None]
        hot = mine.to(tl.int32)
        to = tl.sum(hot * (slot[None, :] + tl.cumsum(hot, 0) - 1), 1)
        tl.store(where + to, tl.sum(hot * base[None, :], 1) + (one & 0xFFFF), mask=i < count)
        tl.store(sizes + to, tl.load(steps + start + i, mask=i < count, other=0), mask=i < count)
        slot += tl.sum(hot, 0)
        first += CHUNK


@triton.jit
def count(
    blocks, which, counts,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr, EXPONENTS: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the items of each class in a block, and store the counts in the block's row of `counts`."""
    block = tl.load(which + tl.program_id(0))
    row = blocks + block.to(tl.int64) * FIELDS
    index, inside = numbers(row, FULL, BLOCK)
    _, old = items(row, OLD, index, inside, WIDTH, FULL)
    kind = classes_of(row, old, SHIFT, EXPONENTS)
    tl.store(counts + block * 16 + tl.arange(0, 16), tl.histogram(kind, 16, mask=inside))


@triton.jit
def mark(where, words, size, CHUNK: tl.constexpr):
    """Set the bits with the numbers `where[:size]` in an array of 32-bit words."""
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    bit = tl.load(where + i, mask=i < size, other=0)
    tl.atomic_or(words + (bit >> 5), tl.full([CHUNK], 1, tl.int32) << (bit & 31), mask=i < size)


@triton.jit
def place(
    blocks, which, bases, words, before, steps, places, codes,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr, EXPONENTS: tl.constexpr,
    GROUPS: tl.constexpr, LISTED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the changed items of a block, and write them over the old items, or to lists if `LISTED`.

    `words`: a bit per item, in the order of classes, that says whether it changes. `before`: for each word, the number
    of the first change in it. `steps`: the signed ULP steps of the changes.
    """
    block = tl.load(which + tl.program_id(0))
    row = blocks + block.to(tl.int64) * FIELDS
    index, inside = numbers(row, FULL, BLOCK)
    memory, old = items(row, OLD, index, inside, WIDTH, FULL)
    kind = classes_of(row, old, SHIFT, EXPONENTS)
    key = tl.load(bases + block * 16 + kind) + ranks(kind, inside, GROUPS, BLOCK)
    word = tl.load(words + (key >> 5), mask=inside, other=0).to(tl.uint32, bitcast=True)
    bit = (key & 31).to(tl.uint32)
    changes = inside & (((word >> bit) & 1) == 1)
    number = tl.load(before + (key >> 5), mask=changes, other=0) + bits_below(word, bit)
    new = moved(old, tl.load(steps + number, mask=changes, other=0), WIDTH, EXPONENTS)
    if LISTED:
        tl.store(places + number, tl.load(row + PLACE).to(tl.int32) + tl.arange(0, BLOCK), mask=changes)
        tl.store(codes + number, new.to(codes.dtype.element_ty), mask=changes)
    else:
        tl.store(memory, new.to(memory.dtype.element_ty), mask=changes)


@triton.jit
def scatter(
    chunks, pieces, places, codes,
    WIDTH: tl.constexpr, HALF: tl.constexpr, READ: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write items to their positions in tiles; with `READ`, read what is there instead.

    For 4-bit items, only those of one `HALF` of their byte are handled, so that no two programs write one byte in one
    launch. A row of `chunks`: first change and end of the changes, first piece and end of the pieces of the tile. A row
    of `pieces`: address, start, cols, stride, position of its first item in the tile, number of items.
    """
    chunk = chunks + tl.program_id(0) * 4
    i = tl.load(chunk) + tl.arange(0, CHUNK)
    inside = i < tl.load(chunk + 1)
    place_in_tile = tl.load(places + i, mask=inside, other=0)
    code = tl.load(codes + i, mask=inside, other=0)
    number, stop = tl.load(chunk + 2), tl.load(chunk + 3)
    while number < stop:
        piece = pieces + number * 6
        t = place_in_tile - tl.load(piece + 4).to(tl.int32)
        mine = inside & (t >= 0) & (t < tl.load(piece + 5).to(tl.int32))
        cols = tl.load(piece + 2).to(tl.int32)
        index = tl.load(piece + 1) + t + (t // cols).to(tl.int64) * (tl.load(piece + 3) - cols)
        if WIDTH == 4:
            mine = mine & ((index & 1) == HALF)
        memory = at(tl.load(piece), WIDTH, False) + (index >> 1 if WIDTH == 4 else index)
        if READ:
            held = unpacked(tl.load(memory, mask=mine, other=0), index, WIDTH)
            tl.store(codes + i, held.to(codes.dtype.element_ty), mask=mine)
        elif WIDTH == 4:
            byte = tl.load(memory, mask=mine, other=0).to(tl.int32)
            byte = (byte & (0xF0 >> (4 * HALF))) | (code.to(tl.int32) << (4 * HALF))
            tl.store(memory, byte.to(tl.uint8), mask=mine)
        else:
            tl.store(memory, code, mask=mine)
        number += 1
