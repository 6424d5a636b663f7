"""Triton kernels of routing: probabilities, top-k with ties to the lowest index, gates in slot order; and the gradient.

Softmax (Qwen3-MoE), or sigmoid with a selection bias and groups of experts (DeepSeek-V3). Each program has a tile of
rows. K choices are K reductions over the experts: the maximum, then the lowest index that has it."""

from __future__ import annotations

import triton
import triton.language as tl

from etude.numerics.gpu.kernels.common import rounded


@triton.jit
def probabilities(logits, row, rows, row_stride, EXPERTS: tl.constexpr, SIGMOID: tl.constexpr, LANES: tl.constexpr):
    """Compute the router's probabilities for a tile of rows, float32 [ROWS, LANES], with 0 beyond the last expert."""
    expert = tl.arange(0, LANES)
    inside = (row < rows)[:, None] & (expert < EXPERTS)[None, :]
    memory = logits + row.to(tl.int64)[:, None] * row_stride + expert[None, :]
    if SIGMOID:
        x = tl.load(memory, mask=inside, other=0.0).to(tl.float32)
        chance = tl.div_rn(1.0, 1.0 + tl.exp(-x))
    else:
        x = tl.load(memory, mask=inside, other=float("-inf")).to(tl.float32)
        x = tl.where((row < rows)[:, None], x, 0.0)
        power = tl.exp(x - tl.max(x, 1)[:, None])
        chance = tl.div_rn(power, tl.sum(power, 1)[:, None] + tl.zeros_like(power))
    return tl.where(inside, chance, 0.0)


@triton.jit(do_not_specialize=["rows"])
def scores(
    logits, y, rows, row_stride,
    EXPERTS: tl.constexpr, SIGMOID: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Compute the probabilities `y`, float32 [rows, EXPERTS], from a router's `logits` by softmax or sigmoid."""
    row, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)
    chance = probabilities(logits, row, rows, row_stride, EXPERTS, SIGMOID, LANES)
    memory = y + row.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    tl.store(memory, chance, mask=(row < rows)[:, None] & (expert < EXPERTS)[None, :])


@triton.jit(do_not_specialize=["rows"])
def scores_gradient(
    dy, y, dlogits, rows,
    EXPERTS: tl.constexpr, SIGMOID: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Compute `dlogits`, the gradient of `scores` with respect to its logits, from its result `y` and the gradient
    `dy`."""
    row, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)
    inside = (row < rows)[:, None] & (expert < EXPERTS)[None, :]
    at = row.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    chance, slope = tl.load(y + at, mask=inside, other=0.0), tl.load(dy + at, mask=inside, other=0.0)
    slope -= 0.0 if SIGMOID else tl.sum(slope * chance, 1)[:, None]
    change = slope * chance * (1.0 - chance if SIGMOID else 1.0)
    tl.store(dlogits + at, rounded(change, dlogits.dtype.element_ty), mask=inside)


@triton.jit
def lowest_of_the_highest(score, lane, LANES: tl.constexpr):
    """Return the index of each row's maximum, the lowest one for equal scores."""
    most = tl.max(score, 1)
    return tl.minimum(tl.min(tl.where(score == most[:, None], lane[None, :], LANES), 1), LANES - 1)


@triton.jit
def in_best_groups(score, expert, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, LANES: tl.constexpr):
    """Return the scores, with -inf for experts outside of the `KEPT` best groups.

    A group's score is the sum of its two best experts' scores."""
    low = float("-inf")
    group = expert // (EXPERTS // GROUPS)
    mark = tl.zeros_like(score) + low  # at a group's number: its sum
    for g in tl.static_range(GROUPS):
        here = tl.where((group == g)[None, :], score, low)
        best = lowest_of_the_highest(here, expert, LANES)
        rest = tl.where(expert[None, :] == best[:, None], low, here)
        mark = tl.where((expert == g)[None, :], (tl.max(here, 1) + tl.max(rest, 1))[:, None], mark)
    kept = tl.zeros_like(score)
    for _ in tl.static_range(KEPT):
        best = lowest_of_the_highest(mark, expert, LANES)
        kept = tl.where(group[None, :] == best[:, None], 1.0, kept)
        mark = tl.where(expert[None, :] == best[:, None], low, mark)
    return tl.where(kept > 0.0, score, low)


@triton.jit(do_not_specialize=["rows"])
def choose(
    logits, bias, routes, gates, used, live, rows, row_stride, scale,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, REPLAYED: tl.constexpr, MISSING: tl.constexpr, NORMALISED: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Choose the experts of each row: gates, used experts and the router's own choice, [rows, TOP] each.

    `routes` are recorded experts to use (`REPLAYED`). A row whose first recorded expert is `MISSING` uses its own
    choice."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, slot = tl.arange(0, LANES), tl.arange(0, SLOTS)
    chance = probabilities(logits, row, rows, row_stride, EXPERTS, SIGMOID, LANES)
    score = chance
    if BIASED:
        score += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)[None, :]
    score = tl.where((expert < EXPERTS)[None, :], score, float("-inf"))
    if GROUPS > 1:
        score = in_best_groups(score, expert, EXPERTS, GROUPS, KEPT, LANES)
    if REPLAYED:
        replay = tl.load(routes + row.to(tl.int64) * TOP, mask=row < rows, other=MISSING).to(tl.int32) != MISSING
    gate = tl.zeros([ROWS, SLOTS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for k in tl.static_range(TOP):
        at = row.to(tl.int64) * TOP + k
        best = lowest_of_the_highest(score, expert, LANES)
        score = tl.where(expert[None, :] == best[:, None], float("-inf"), score)
        tl.store(live + at, best, mask=row < rows)
        if REPLAYED:
            best = tl.where(replay, tl.load(routes + at, mask=row < rows, other=0).to(tl.int32), best)
        tl.store(used + at, best, mask=row < rows)
        one = tl.sum(tl.where(expert[None, :] == best[:, None], chance, 0.0), 1)
        gate = tl.where((slot == k)[None, :], one[:, None], gate)
        total += one
    if NORMALISED:
        gate = tl.div_rn(gate, tl.where(row < rows, total, 1.0)[:, None] + tl.zeros_like(gate))
    memory = gates + row.to(tl.int64)[:, None] * TOP + slot[None, :]
    tl.store(memory, gate * scale, mask=(row < rows)[:, None] & (slot < TOP)[None, :])


@triton.jit(do_not_specialize=["rows"])
def choose_gradient(
    dgates, logits, used, dlogits, rows, row_stride, scale,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, SIGMOID: tl.constexpr, NORMALISED: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the logits from that of the gates, for a fixed choice of experts."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, LANES)
    chance = probabilities(logits, row, rows, row_stride, EXPERTS, SIGMOID, LANES)
    total = tl.zeros([ROWS], tl.float32)
    moment = tl.zeros([ROWS], tl.float32)
    slope = tl.zeros([ROWS, LANES], tl.float32)
    picked = tl.zeros([ROWS, LANES], tl.float32)
    for k in tl.static_range(TOP):
        at = row.to(tl.int64) * TOP + k
        hot = expert[None, :] == tl.load(used + at, mask=row < rows, other=0)[:, None]
        one = tl.sum(tl.where(hot, chance, 0.0), 1)
        change = tl.load(dgates + at, mask=row < rows, other=0.0).to(tl.float32) * scale
        total += one
        moment += change * one
        slope = tl.where(hot, change[:, None], slope)
        picked = tl.where(hot, 1.0, picked)
    if NORMALISED:
        safe = tl.where(row < rows, total, 1.0)[:, None] + tl.zeros_like(slope)
        slope = picked * tl.div_rn(slope - tl.div_rn(moment[:, None] + tl.zeros_like(slope), safe), safe)
    slope -= 0.0 if SIGMOID else tl.sum(slope * chance, 1)[:, None]
    result = slope * chance * (1.0 - chance if SIGMOID else 1.0)
    inside = (row < rows)[:, None] & (expert < EXPERTS)[None, :]
    memory = dlogits + row.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    tl.store(memory, rounded(result, dlogits.dtype.element_ty), mask=inside)
