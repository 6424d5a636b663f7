"""Triton kernels of causal attention over keys in pages, and its gradient.

A query row processes the keys of its own sequence in blocks of `KEYS` from position 0, whatever the batch, the chunk or
the pages. A block after the row changes nothing: its weights are exact zeros and its correction is exactly one. So one
kernel with one tile serves decoding, chunks and packed training.

Blocks are summed within *spans* of `SPAN` keys, and spans are merged in their order. Where there are few tiles, each
span is a separate program (`SPREAD`), so that few sequences with long contexts still use the whole chip, with the same
additions.

A tile has rows of one sequence that share keys: the `SHARE` query heads of a key head, token after token. So a decoding
token of grouped-query attention fills several rows of a tensor core's tile, and all heads of latent attention do. Key
widths are `WIDE` + `REST`, as tiles are powers of two (192 = 128 + 64, 576 = 512 + 64); with `SHARED`, values are the
first `WIDE` numbers of the keys, read once.

Gradients are sums over fixed blocks, too: one program per tile of queries, then one program per block of keys, which
passes over all rows that see it, first to last. There are no atomic additions.

Tile shapes: ROWS queries, KEYS keys. Scores are in base 2."""

from __future__ import annotations

import triton
import triton.language as tl

from etude.numerics.gpu.kernels.common import bound, dot, find, rounded

LOW = tl.constexpr(float("-inf"))


@triton.jit
def places(starts, sequence, index, head, SHARE: tl.constexpr):
    """Return the token and the query head of each row of a tile, and whether the row exists.

    A row is one query head of one token. `head`: the key head of the tile, which `SHARE` query heads share. `index`:
    the numbers of the rows within the sequence, counted token after token, `SHARE` rows each."""
    first = tl.load(starts + sequence)
    there = index < (tl.load(starts + sequence + 1) - first) * SHARE
    return first + tl.where(there, index // SHARE, 0), head * SHARE + index % SHARE, there


@triton.jit
def tile_of(memory, there, lane, WIDTH: tl.constexpr):
    """Load a tile with row addresses `memory` and columns `lane`.

    It has 0 in rows that are not `there`, and in columns from `WIDTH` on."""
    return tl.load(memory + lane[None, :], mask=there[:, None] & (lane < WIDTH)[None, :], other=0.0)


@triton.jit
def halves(memory, there, WIDTH: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr):
    """Load a tile of queries or keys in two parts: its first `WIDE` columns, and the other `REST` columns.

    `memory` are the addresses of its rows, and `there` masks existing rows. With `REST` 0 the first part is returned
    twice."""
    wide = tile_of(memory, there, tl.arange(0, WIDE), WIDTH)
    rest = wide
    if REST:
        rest = tile_of(memory + WIDE, there, tl.arange(0, REST), WIDTH - WIDE)
    return wide, rest


@triton.jit
def keep(memory, there, lane, tile, WIDTH: tl.constexpr):
    """Round a tile once, and write its rows that are `there`, up to `WIDTH` columns, to the row addresses `memory`."""
    mask = there[:, None] & (lane < WIDTH)[None, :]
    tl.store(memory + lane[None, :], rounded(tile, memory.dtype.element_ty), mask=mask)


@triton.jit
def keep_slopes(memory, there, wide, rest, scale, WIDTH: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr):
    """Store a tile of the gradient of queries or keys.

    `wide` and `rest` are its two parts (`halves`), which still lack the factor scale · ln 2."""
    factor = scale * 0.6931471805599453
    keep(memory, there, tl.arange(0, WIDE), wide * factor, WIDTH)
    if REST:
        keep(memory + WIDE, there, tl.arange(0, REST), rest * factor, WIDTH - WIDE)


@triton.jit
def met(most, total, acc, other_most, other_total, other_acc):
    """Combine two partial results of attention over different runs of keys, and return the combined one.

    Each has the maximum of the scores (`most`), Σ 2^(score - maximum) (`total`), and this sum weighted by the values
    (`acc`). An empty second run changes nothing."""
    now = tl.maximum(most, other_most)
    shrink = tl.exp2(most - now)
    other_shrink = tl.exp2(other_most - now)
    acc = acc * shrink[:, None] + other_acc * other_shrink[:, None]
    return now, total * shrink + other_total * other_shrink, acc


@triton.jit
def settled(most, total, acc, o_at, lse_at, there, value, VALUE: tl.constexpr):
    """Store the final output of a tile, `acc` / `total`, and its log2 Σ 2^score (lse)."""
    result = tl.div_rn(acc, total[:, None] + tl.zeros_like(acc))
    keep(o_at, there, value, result, VALUE)
    tl.store(lse_at, most + tl.log2(total), mask=there)


@triton.jit
def over_keys(
    q_wide, q_rest, k, v, pages, position, first, stop, scale, k_page, k_row, v_page, v_row,
    PAGE: tl.constexpr, SHARED: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute a partial result of attention over keys [first, stop), one block of `KEYS` keys after another.

    Returns the maximum of the scores, Σ 2^(score - maximum), and this sum weighted by the values."""
    wide, rest, value = tl.arange(0, WIDE), tl.arange(0, REST if REST else 16), tl.arange(0, VALUES)
    most = tl.full([ROWS], LOW, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUES], tl.float32)
    for block in range(bound(first), bound(stop), KEYS):
        key = block + tl.arange(0, KEYS)
        here = key < stop
        page = tl.load(pages + key // PAGE, mask=here, other=0).to(tl.int64)
        place = (key % PAGE).to(tl.int64)
        k_at = k + (page * k_page + place * k_row)[:, None]
        k_wide = tile_of(k_at, here, wide, WIDTH)
        score = dot(q_wide, tl.trans(k_wide), tl.zeros([ROWS, KEYS], tl.float32))
        if REST:
            score = dot(q_rest, tl.trans(tile_of(k_at + WIDE, here, rest, WIDTH - WIDE)), score)
        score = tl.where(key[None, :] <= position[:, None], score * scale, LOW)
        now = tl.maximum(most, tl.max(score, 1))
        base = tl.where(now == LOW, 0.0, now)  # a row that sees none of these keys
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weight, 1)
        most = now
        values = k_wide if SHARED else tile_of(v + (page * v_page + place * v_row)[:, None], here, value, VALUE)
        acc = dot(rounded(weight, q_wide.dtype), values, acc * shrink[:, None])
    return most, total, acc


@triton.jit(do_not_specialize=["num_pages", "sequences", "rows"])
def attend(
    q, k, v, o, lse, marks, starts, positions, tile_starts, pages, num_pages, scale,
    q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head, heads, sequences, rows,
    LANES: tl.constexpr, PAGE: tl.constexpr, SHARE: tl.constexpr, SHARED: tl.constexpr,
    SPAN: tl.constexpr, SPREAD: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute causal attention of one tile of queries: output o [N, heads, VALUE] and lse = log2 Σ 2^score [N, heads].

    `positions`: the position of each sequence's first query. `starts`, `tile_starts`: first row and first tile of each
    sequence. `pages`: the memory pages of each sequence's keys. With `SPREAD` a program handles only one span of `SPAN`
    keys, and stores partial results in o [spans, rows, VALUE] and marks [2, spans, rows] for `meet`. `SPAN` 0: all keys
    at once."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = find(tile_starts, tile, sequences, LANES)
    if sequence >= sequences:
        return
    index = (tile - tl.load(tile_starts + sequence)) * ROWS + tl.arange(0, ROWS)
    token, query_head, there = places(starts, sequence, index, head, SHARE)
    position = tl.load(positions + sequence) + token - tl.load(starts + sequence)
    value = tl.arange(0, VALUES)
    q_at = q + token.to(tl.int64)[:, None] * q_row + query_head[:, None] * q_head
    q_wide, q_rest = halves(q_at, there, WIDTH, WIDE, REST)
    k += head * k_head
    v += head * v_head
    pages += sequence * num_pages
    stop = tl.max(position, 0) + 1
    row = token.to(tl.int64) * heads + query_head
    if SPREAD:
        first = tl.program_id(2) * SPAN
        most, total, acc = over_keys(
            q_wide, q_rest, k, v, pages, position, first, tl.minimum(stop, first + SPAN), scale,
            k_page, k_row, v_page, v_row, PAGE, SHARED, WIDTH, WIDE, REST, VALUE, VALUES, ROWS, KEYS,
        )  # fmt: skip
        row += tl.program_id(2).to(tl.int64) * rows
        tl.store(o + row[:, None] * VALUE + value[None, :], acc, mask=there[:, None] & (value < VALUE)[None, :])
        tl.store(marks + row, most, mask=there)
        tl.store(marks + tl.num_programs(2).to(tl.int64) * rows + row, total, mask=there)
    else:
        most, total, acc = over_keys(
            q_wide, q_rest, k, v, pages, position, 0, tl.minimum(stop, SPAN) if SPAN else stop, scale,
            k_page, k_row, v_page, v_row, PAGE, SHARED, WIDTH, WIDE, REST, VALUE, VALUES, ROWS, KEYS,
        )  # fmt: skip
        if SPAN:
            for first in range(SPAN, bound(stop), SPAN):
                more_most, more_total, more_acc = over_keys(
                    q_wide, q_rest, k, v, pages, position, first, tl.minimum(stop, first + SPAN), scale,
                    k_page, k_row, v_page, v_row, PAGE, SHARED, WIDTH, WIDE, REST, VALUE, VALUES, ROWS, KEYS,
                )  # fmt: skip
                most, total, acc = met(most, total, acc, more_most, more_total, more_acc)
        settled(most, total, acc, o + row[:, None] * VALUE, lse + row, there, value, VALUE)


@triton.jit(do_not_specialize=["rows", "spans"])
def meet(sums, marks, o, lse, rows, spans, VALUE: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr):
    """Combine the partial results that `attend` stored for each span of keys, in the order of the spans.

    `sums`, `marks`: the partial results. `o`, `lse`: the final output and log-sums."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there, value = row < rows, tl.arange(0, VALUES)
    all_most = tl.full([ROWS], LOW, tl.float32)
    all_total = tl.zeros([ROWS], tl.float32)
    all_acc = tl.zeros([ROWS, VALUES], tl.float32)
    for span in range(0, bound(spans)):
        at = span * tl.cast(rows, tl.int64) + row
        most = tl.load(marks + at, mask=there, other=0.0)
        total = tl.load(marks + spans * tl.cast(rows, tl.int64) + at, mask=there, other=1.0)
        acc = tl.load(
            sums + at[:, None] * VALUE + value[None, :], mask=there[:, None] & (value < VALUE)[None, :], other=0.0
        )
        all_most, all_total, all_acc = met(all_most, all_total, all_acc, most, total, acc)
    settled(all_most, all_total, all_acc, o + row[:, None] * VALUE, lse + row, there, value, VALUE)


@triton.jit
def weights_and_slopes(
    q_wide, q_rest, do, k_wide, k_rest, values, lse, delta, scale, seen,
    REST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the attention weights of a tile of queries and keys, and the gradients of the scores.

    `do`: gradient of the output. `delta`: Σ o · do of each query. `seen`: which keys each query attends to. The
    gradients still lack the factor scale · ln 2."""
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
    """Compute the gradient dq of one tile of queries of packed sequences, and delta [N, heads] = Σ o · do.

    `do` is the gradient of the output, and `lse` comes from the forward pass. `key_gradient` uses delta."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = find(tile_starts, tile, sequences, LANES)
    if sequence >= sequences:
        return
    start = tl.load(starts + sequence)
    index = (tile - tl.load(tile_starts + sequence)) * ROWS + tl.arange(0, ROWS)
    token, query_head, there = places(starts, sequence, index, head, SHARE)
    position = token - start
    value = tl.arange(0, VALUES)
    q_at = q + token.to(tl.int64)[:, None] * q_row + query_head[:, None] * q_head
    flat = token.to(tl.int64) * heads + query_head
    q_wide, q_rest = halves(q_at, there, WIDTH, WIDE, REST)
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
        k_wide, k_rest = halves(k_at, here, WIDTH, WIDE, REST)
        values = tile_of(v_at, here, value, VALUE)
        seen = (key[None, :] <= position[:, None]) & there[:, None]
        _, slope = weights_and_slopes(
            q_wide, q_rest, slope_o, k_wide, k_rest, values, row_lse, whole, scale, seen, REST, ROWS, KEYS
        )
        slope = rounded(slope, q.dtype.element_ty)
        acc_wide = dot(slope, k_wide, acc_wide)
        if REST:
            acc_rest = dot(slope, k_rest, acc_rest)
    keep_slopes(dq + flat[:, None] * WIDTH, there, acc_wide, acc_rest, scale, WIDTH, WIDE, REST)


@triton.jit(do_not_specialize=["sequences"])
def key_gradient(
    q, k, v, do, lse, delta, dk, dv, starts, tile_starts, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, heads, sequences, key_heads,
    LANES: tl.constexpr, SHARE: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients dk and dv of one block of keys of packed sequences.

    `do`, `lse` and `delta` are those of `query_gradient`. Here `tile_starts` counts blocks of keys."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = find(tile_starts, tile, sequences, LANES)
    if sequence >= sequences:
        return
    start = tl.load(starts + sequence)
    length = tl.load(starts + sequence + 1) - start
    first_key = (tile - tl.load(tile_starts + sequence)) * KEYS
    key = first_key + tl.arange(0, KEYS)
    here = key < length
    value = tl.arange(0, VALUES)
    k_at = k + ((start + key).to(tl.int64) * k_row + head * k_head)[:, None]
    v_at = v + ((start + key).to(tl.int64) * v_row + head * v_head)[:, None]
    k_wide, k_rest = halves(k_at, here, WIDTH, WIDE, REST)
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
        q_wide, q_rest = halves(q_at, there, WIDTH, WIDE, REST)
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
    row = (start + key).to(tl.int64) * key_heads + head
    keep_slopes(dk + row[:, None] * WIDTH, here, acc_wide, acc_rest, scale, WIDTH, WIDE, REST)
    keep(dv + row[:, None] * VALUE, here, value, acc_value, VALUE)
