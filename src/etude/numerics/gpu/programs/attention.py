"""Causal attention over keys in pages, and its gradient.

A query row meets the keys of its own sequence in blocks of `KEYS` from position 0, whatever the batch, the chunk or
the pages; a block that lies after it changes nothing: its weights are exact zeros and its correction is exactly one.
So there is one kernel with one tile for decoding, chunks and packed training.

A tile holds rows of one sequence that share keys: the `SHARE` query heads of a key head, token after token. So one
decoding token of grouped-query attention fills several rows of a tensor core's tile, and all heads of a latent
attention do. The widths of keys are `WIDE` + `REST`, as tiles are powers of two (192 = 128 + 64, 576 = 512 + 64); with
`SHARED`, values are the first `WIDE` numbers of the keys, read once.

Gradients are sums over fixed blocks too: one program a tile of queries, then one program a block of keys that passes
over all rows that see it, first to last; nothing is added atomically.

Shapes of tiles: ROWS queries, KEYS keys. Scores are kept in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from etude.numerics.gpu.programs.common import bound, dot, rounded

LOW = tl.constexpr(float("-inf"))


@triton.jit
def find(tile_starts, tile, sequences, LANES: tl.constexpr):
    """The sequence that a tile belongs to; `sequences` where there is none."""
    lane = tl.arange(0, LANES)
    ends = tl.load(tile_starts + 1 + lane, mask=lane < sequences, other=2147483647)
    return tl.sum((ends <= tile).to(tl.int32), 0)


@triton.jit
def places(starts, sequence, index, head, SHARE: tl.constexpr):
    """Token and query head of rows of a tile, and which there are."""
    first = tl.load(starts + sequence)
    there = index < (tl.load(starts + sequence + 1) - first) * SHARE
    return first + tl.where(there, index // SHARE, 0), head * SHARE + index % SHARE, there


@triton.jit
def tile_of(memory, there, lane, WIDTH: tl.constexpr):
    """A tile at rows of addresses."""
    return tl.load(memory + lane[None, :], mask=there[:, None] & (lane < WIDTH)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_pages", "sequences"])
def attend(
    q, k, v, o, lse, starts, positions, tile_starts, pages, num_pages, scale,
    q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head, heads, sequences,
    LANES: tl.constexpr, PAGE: tl.constexpr, SHARE: tl.constexpr, SHARED: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """o [N, heads, VALUE] and log2 Σ 2^score [N, heads] of a tile. `positions`: of each sequence's first query."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = find(tile_starts, tile, sequences, LANES)
    if sequence >= sequences:
        return
    index = (tile - tl.load(tile_starts + sequence)) * ROWS + tl.arange(0, ROWS)
    token, query_head, there = places(starts, sequence, index, head, SHARE)
    position = tl.load(positions + sequence) + token - tl.load(starts + sequence)
    wide, rest, value = tl.arange(0, WIDE), tl.arange(0, REST if REST else 16), tl.arange(0, VALUES)
    q_at = q + token.to(tl.int64)[:, None] * q_row + query_head[:, None] * q_head
    q_wide = tile_of(q_at, there, wide, WIDTH)
    if REST:
        q_rest = tile_of(q_at + WIDE, there, rest, WIDTH - WIDE)
    most = tl.full([ROWS], LOW, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUES], tl.float32)
    stop = tl.max(position, 0) + 1
    for block in range(0, bound(stop), KEYS):
        key = block + tl.arange(0, KEYS)
        here = key < stop
        page = tl.load(pages + sequence * num_pages + key // PAGE, mask=here, other=0).to(tl.int64)
        k_at = k + (page * k_page + (key % PAGE).to(tl.int64) * k_row + head * k_head)[:, None]
        k_wide = tile_of(k_at, here, wide, WIDTH)
        score = dot(q_wide, tl.trans(k_wide), tl.zeros([ROWS, KEYS], tl.float32))
        if REST:
            score = dot(q_rest, tl.trans(tile_of(k_at + WIDE, here, rest, WIDTH - WIDE)), score)
        score = tl.where(key[None, :] <= position[:, None], score * scale, LOW)
        now = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp2(score - now[:, None])
        shrink = tl.exp2(most - now)
        total = total * shrink + tl.sum(weight, 1)
        most = now
        if SHARED:
            values = k_wide
        else:
            v_at = v + (page * v_page + (key % PAGE).to(tl.int64) * v_row + head * v_head)[:, None]
            values = tile_of(v_at, here, value, VALUE)
        acc = dot(rounded(weight, q.dtype.element_ty), values, acc * shrink[:, None])
    result = tl.div_rn(acc, total[:, None] + tl.zeros_like(acc))
    o_at = o + (token.to(tl.int64)[:, None] * heads + query_head[:, None]) * VALUE + value[None, :]
    tl.store(o_at, rounded(result, o.dtype.element_ty), mask=there[:, None] & (value < VALUE)[None, :])
    tl.store(lse + token.to(tl.int64) * heads + query_head, most + tl.log2(total), mask=there)


@triton.jit
def weights_and_slopes(
    q_wide, q_rest, do, k_wide, k_rest, values, lse, delta, scale, seen,
    REST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Of a tile of rows and keys: the weights of attention, and the slopes of the scores (before scale · ln 2)."""
    score = dot(q_wide, tl.trans(k_wide), tl.zeros([ROWS, KEYS], tl.float32))
    if REST:
        score = dot(q_rest, tl.trans(k_rest), score)
    weight = tl.where(seen, tl.exp2(score * scale - lse[:, None]), 0.0)
    slope = dot(do, tl.trans(values), tl.zeros([ROWS, KEYS], tl.float32))
    return weight, weight * (slope - delta[:, None])


@triton.jit(do_not_specialize=["sequences"])
def query_gradient(
    q, k, v, o, do, lse, delta, dq, starts, tile_starts, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, heads, sequences,
    LANES: tl.constexpr, SHARE: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq of a tile of packed sequences, and delta [N, heads] = Σ o · do for the keys' gradient."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = find(tile_starts, tile, sequences, LANES)
    if sequence >= sequences:
        return
    start = tl.load(starts + sequence)
    index = (tile - tl.load(tile_starts + sequence)) * ROWS + tl.arange(0, ROWS)
    token, query_head, there = places(starts, sequence, index, head, SHARE)
    position = token - start
    wide, rest, value = tl.arange(0, WIDE), tl.arange(0, REST if REST else 16), tl.arange(0, VALUES)
    q_at = q + token.to(tl.int64)[:, None] * q_row + query_head[:, None] * q_head
    flat = token.to(tl.int64) * heads + query_head
    q_wide = tile_of(q_at, there, wide, WIDTH)
    q_rest = q_wide
    if REST:
        q_rest = tile_of(q_at + WIDE, there, rest, WIDTH - WIDE)
    slope_o = tile_of(do + flat[:, None] * VALUE, there, value, VALUE)
    held_o = tile_of(o + flat[:, None] * VALUE, there, value, VALUE)
    whole = tl.sum(held_o.to(tl.float32) * slope_o.to(tl.float32), 1)
    tl.store(delta + flat, whole, mask=there)
    row_lse = tl.load(lse + flat, mask=there, other=0.0)
    acc_wide = tl.zeros([ROWS, WIDE], tl.float32)
    acc_rest = tl.zeros([ROWS, REST if REST else 16], tl.float32)
    stop = tl.max(position, 0) + 1
    for block in range(0, bound(stop), KEYS):
        key = block + tl.arange(0, KEYS)
        here = key < stop
        k_at = k + ((start + key).to(tl.int64) * k_row + head * k_head)[:, None]
        v_at = v + ((start + key).to(tl.int64) * v_row + head * v_head)[:, None]
        k_wide = tile_of(k_at, here, wide, WIDTH)
        k_rest = k_wide
        if REST:
            k_rest = tile_of(k_at + WIDE, here, rest, WIDTH - WIDE)
        values = tile_of(v_at, here, value, VALUE)
        seen = (key[None, :] <= position[:, None]) & there[:, None]
        _, slope = weights_and_slopes(
            q_wide, q_rest, slope_o, k_wide, k_rest, values, row_lse, whole, scale, seen, REST, ROWS, KEYS
        )
        slope = rounded(slope, q.dtype.element_ty)
        acc_wide = dot(slope, k_wide, acc_wide)
        if REST:
            acc_rest = dot(slope, k_rest, acc_rest)
    factor = scale * 0.6931471805599453
    to = dq + flat[:, None] * WIDTH
    wide_there = there[:, None] & (wide < WIDTH)[None, :]
    tl.store(to + wide[None, :], rounded(acc_wide * factor, dq.dtype.element_ty), mask=wide_there)
    if REST:
        rest_there = there[:, None] & (rest < WIDTH - WIDE)[None, :]
        tl.store(to + WIDE + rest[None, :], rounded(acc_rest * factor, dq.dtype.element_ty), mask=rest_there)


@triton.jit(do_not_specialize=["sequences"])
def key_gradient(
    q, k, v, do, lse, delta, dk, dv, starts, tile_starts, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, heads, sequences, key_heads,
    LANES: tl.constexpr, SHARE: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys of packed sequences; here `tile_starts` counts blocks of keys."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = find(tile_starts, tile, sequences, LANES)
    if sequence >= sequences:
        return
    start = tl.load(starts + sequence)
    length = tl.load(starts + sequence + 1) - start
    first_key = (tile - tl.load(tile_starts + sequence)) * KEYS
    key = first_key + tl.arange(0, KEYS)
    here = key < length
    wide, rest, value = tl.arange(0, WIDE), tl.arange(0, REST if REST else 16), tl.arange(0, VALUES)
    k_at = k + ((start + key).to(tl.int64) * k_row + head * k_head)[:, None]
    v_at = v + ((start + key).to(tl.int64) * v_row + head * v_head)[:, None]
    k_wide = tile_of(k_at, here, wide, WIDTH)
    k_rest = k_wide
    if REST:
        k_rest = tile_of(k_at + WIDE, here, rest, WIDTH - WIDE)
    values = tile_of(v_at, here, value, VALUE)
    acc_wide = tl.zeros([KEYS, WIDE], tl.float32)
    acc_rest = tl.zeros([KEYS, REST if REST else 16], tl.float32)
    acc_value = tl.zeros([KEYS, VALUES], tl.float32)
    first_row = first_key * SHARE // ROWS * ROWS
    for block in range(bound(first_row), bound(length * SHARE), ROWS):
        index = block + tl.arange(0, ROWS)
        token, query_head, there = places(starts, sequence, index, head, SHARE)
        q_at = q + token.to(tl.int64)[:, None] * q_row + query_head[:, None] * q_head
        flat = token.to(tl.int64) * heads + query_head
        q_wide = tile_of(q_at, there, wide, WIDTH)
        q_rest = q_wide
        if REST:
            q_rest = tile_of(q_at + WIDE, there, rest, WIDTH - WIDE)
        slope_o = tile_of(do + flat[:, None] * VALUE, there, value, VALUE)
        row_lse = tl.load(lse + flat, mask=there, other=0.0)
        row_delta = tl.load(delta + flat, mask=there, other=0.0)
        seen = (key[None, :] <= (token - start)[:, None]) & there[:, None] & here[None, :]
        weight, slope = weights_and_slopes(
            q_wide, q_rest, slope_o, k_wide, k_rest, values, row_lse, row_delta, scale, seen, REST, ROWS, KEYS
        )
        acc_value = dot(tl.trans(rounded(weight, q.dtype.element_ty)), slope_o, acc_value)
        slope = tl.trans(rounded(slope, q.dtype.element_ty))
        acc_wide = dot(slope, q_wide, acc_wide)
        if REST:
            acc_rest = dot(slope, q_rest, acc_rest)
    factor = scale * 0.6931471805599453
    row = (start + key).to(tl.int64) * key_heads + head
    wide_there = here[:, None] & (wide < WIDTH)[None, :]
    k_to = dk + row[:, None] * WIDTH
    tl.store(k_to + wide[None, :], rounded(acc_wide * factor, dk.dtype.element_ty), mask=wide_there)
    if REST:
        rest_there = here[:, None] & (rest < WIDTH - WIDE)[None, :]
        tl.store(k_to + WIDE + rest[None, :], rounded(acc_rest * factor, dk.dtype.element_ty), mask=rest_there)
    v_to = dv + row[:, None] * VALUE + value[None, :]
    tl.store(v_to, rounded(acc_value, dv.dtype.element_ty), mask=here[:, None] & (value < VALUE)[None, :])
