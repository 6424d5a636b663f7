"""Exact mode on a device: every operator is right against float64, and a row has the same bits in any company.

By Triton's interpreter on tiny shapes where there is no GPU; on one the same tests run with larger ones, and on several
streams and threads.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed (pip install 'etude[gpu]')")


from etude.numerics.gpu import (
    ExactGpu,
    Groups,
    PackedTokens,
    PagedTokens,
    Pages,
    Router,
    SequenceRows,
    attend_packed,
    choose,
    join_partial_sums,
    linear,
    mix,
)
from etude.numerics.gpu.attention import PagedKeys, Queries, attend
from etude.numerics.gpu.matmul import multiply, weight_gradient
from etude.numerics.gpu.row_ops import log_softmax, rms_norm, rotate
from etude.numerics.gpu.tiles import Tiles, tiles_of

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TIMES = 8 if GPU else 1  # how much larger shapes are on a GPU
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # of norms, against float64
DTYPES = list(TOLERANCE)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.1e}"


def checked(
    dtype: torch.dtype,
    ours: Callable[..., torch.Tensor],
    theirs: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
) -> torch.Tensor:
    """Our result, once it and the gradients of all inputs are near those in float64, and the same a second time."""
    y, grads = _with_gradients(ours, *inputs)
    expected, wanted = _with_gradients(theirs, *(each.double() for each in inputs))
    for found, right in zip((y, *grads), (expected, *wanted), strict=True):
        close(found, right, dtype)
    again, repeated = _with_gradients(ours, *inputs) if GPU else (y, grads)
    assert all(torch.equal(a, b) for a, b in zip((y, *grads), (again, *repeated), strict=True))
    return y


def _with_gradients(
    work: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    y = work(*leaves)
    return y.detach(), torch.autograd.grad(y, leaves, drawn(*y.shape, seed=9).to(y.dtype))


@dtypes
def test_a_product_is_right_and_a_row_has_the_same_bits_among_any_others(dtype: torch.dtype) -> None:
    x, weight = drawn(140, 96 * TIMES, dtype=dtype), drawn(130, 96 * TIMES, scale=0.1)
    whole = checked(dtype, linear, lambda a, w: a @ (w.detach().to(dtype).double() + w - w.detach()).T, x, weight)
    for first, stop in ((0, 1), (139, 140), (60, 139)):
        assert torch.equal(linear(x[first:stop], weight), whole[first:stop])
    assert torch.equal(linear(x.flip(0), weight).flip(0), whole)
    assert torch.equal(linear(x, weight.to(dtype)), whole), "weights that are wider are rounded as they are read"


@dtypes
def test_schedules_and_tensor_parallel_shards_of_a_product_have_its_bits(dtype: torch.dtype) -> None:
    ins = 4 * 48 * TIMES
    x, weight = drawn(70, ins, dtype=dtype), drawn(30, ins, dtype=dtype)
    tiles = tiles_of(30, ins, dtype.itemsize, degree=4)
    whole = multiply(x, weight, tiles, split=False)
    assert tiles.leaves >= 4
    assert torch.equal(multiply(x, weight, tiles, split=True), whole)
    assert torch.equal(multiply(x, weight.t().contiguous().t(), tiles), whole)
    for degree in (2, 4):
        shares = zip(x.chunk(degree, 1), weight.chunk(degree, 1), strict=True)
        parts = [multiply(a, w, tiles.shard(degree), dtype=torch.float32) for a, w in shares]
        assert torch.equal(join_partial_sums(torch.stack(parts), dtype), whole)
        columns = [multiply(x, w, tiles) for w in weight[:28].chunk(degree)]
        assert torch.equal(torch.cat(columns, 1), whole[:, :28])
    with pytest.raises(ValueError, match="no tree"):
        join_partial_sums(torch.zeros(3, 2, 2), dtype)
    with pytest.raises(ValueError, match="cannot be divided among 4 ranks"):
        tiles_of(8, 30, 2, degree=4)


def test_a_tile_does_not_know_how_many_rows_there_are_and_a_subtree_keeps_its_leaves() -> None:
    assert tiles_of(4096, 2048, 2) == tiles_of(4096, 2048, 2)
    assert tiles_of(2048, 4096, 2, degree=8).shard(8).leaves == 1
    with pytest.raises(ValueError, match="no 3 equal subtrees"):
        Tiles(128, 128, 64, leaves=4).shard(3)


@dtypes
def test_an_experts_rows_have_the_bits_of_a_product_with_its_matrix(dtype: torch.dtype) -> None:
    starts = torch.tensor([0, 3, 3, 80, 81], dtype=torch.int32, device=DEVICE)
    x, weight = drawn(81, 64, dtype=dtype), drawn(4, 24, 64, dtype=dtype)
    groups = Groups(starts, 81)
    tiles = tiles_of(24, 64, dtype.itemsize, grouped=True)
    y = multiply(x, weight, tiles, groups=groups)
    grads = weight_gradient(y, x, torch.float32, groups=groups)
    bounds = starts.tolist()
    for expert, (first, stop) in enumerate(itertools.pairwise(bounds)):
        assert torch.equal(y[first:stop], multiply(x[first:stop], weight[expert], tiles))
        if stop > first:
            close(grads[expert], y[first:stop].double().T @ x[first:stop].double(), torch.float32)
        else:
            assert not grads[expert].any()


def dense_mix(
    x: torch.Tensor, gates: torch.Tensor, up: torch.Tensor, down: torch.Tensor, e: torch.Tensor
) -> torch.Tensor:
    y = torch.zeros_like(x)
    for k in range(e.shape[1]):
        a, b = torch.einsum("nd,nfd->nf", x, up[e[:, k].long()]).chunk(2, -1)
        y = y + gates[:, k : k + 1] * torch.einsum("nf,ndf->nd", F.silu(a) * b, down[e[:, k].long()])
    return y


@dtypes
def test_experts_are_right_forward_and_back_and_a_token_ignores_who_shares_its_experts(dtype: torch.dtype) -> None:
    n, width, inner, count = 20 * TIMES, 48, 40, 6
    x, gates = drawn(n, width, dtype=dtype), drawn(n, 2).sigmoid()
    up, down = (
        drawn(count, 2 * inner, width, dtype=dtype, scale=0.2),
        drawn(count, width, inner, dtype=dtype, scale=0.2),
    )
    chosen = drawn(n, count - 1, seed=4).topk(2, -1).indices.int()  # the last expert has no rows
    y = checked(
        dtype,
        lambda x, g, u, d: mix(x, g, chosen, u, d),
        lambda x, g, u, d: dense_mix(x, g, u, d, chosen),
        x, gates, up, down,
    )  # fmt: skip
    for rows in (slice(7, 8), slice(2, 13)):
        assert torch.equal(mix(x[rows], gates[rows], chosen[rows], up, down), y[rows])


@dtypes
def test_what_works_on_rows_is_right_and_ignores_other_rows(dtype: torch.dtype) -> None:
    wide = checked(
        dtype,
        lambda x, w: rms_norm(x, w, 1e-6),
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6),
        drawn(37, 96, dtype=dtype), drawn(96, dtype=dtype),
    )  # fmt: skip
    assert torch.equal(rms_norm(drawn(37, 96, dtype=dtype)[5:6], drawn(96, dtype=dtype), 1e-6), wide[5:6])
    heads = drawn(9, 5, 16, dtype=dtype)
    checked(dtype, lambda x: rms_norm(x[:, 1:4], None, 1e-6), lambda x: F.rms_norm(x[:, 1:4], (16,), None, 1e-6), heads)
    cos, sin = drawn(9, 1, 16, dtype=dtype), drawn(9, 1, 16, dtype=dtype, seed=1)
    turned = checked(
        dtype,
        lambda x: rotate(x[:, 1:4], cos, sin),
        lambda x: x[:, 1:4] * cos.double() + x[:, 1:4].roll(8, -1) * sin.double(),
        heads,
    )
    assert torch.equal(rotate(heads[4:5, 1:4], cos[4:5], sin[4:5]), turned[4:5])
    logits = drawn(5, 5000, dtype=dtype, scale=3.0)
    logprobs = checked(dtype, log_softmax, lambda x: x.log_softmax(-1), logits)
    assert torch.equal(log_softmax(logits[3:4]), logprobs[3:4])
    assert logprobs.dtype == torch.float32


def test_the_operators_that_a_model_asks_for_are_those_of_torch_on_any_rows() -> None:
    ops, scores = ExactGpu(torch.float32), drawn(33, 12)
    assert ops.exact
    assert ops == ExactGpu(torch.float32) != ExactGpu(torch.float32, degree=2)
    for ours, theirs in ((ops.softmax, lambda x: x.softmax(-1)), (ops.sigmoid, torch.sigmoid)):
        y = checked(torch.float32, ours, theirs, scores)
        assert torch.equal(ours(scores[20:21]), y[20:21])
    h = drawn(9, 10)
    y = checked(torch.float32, ops.gated, lambda x: F.silu(x[:, :5]) * x[:, 5:], h)
    assert torch.equal(ops.gated(h[3:4]), y[3:4])
    assert ops.top_k(torch.tensor([[1.0, 3.0, 3.0, 0.0]], device=DEVICE), 3).tolist() == [[1, 2, 0]]
    cold = ops.log_softmax(scores, torch.full((33, 1), 0.5, device=DEVICE))
    close(cold, (scores.double() / 0.5).log_softmax(-1), torch.float32)
    q, k, v = (drawn(heads, 7, 16) for heads in (2, 1, 1))
    o = ops.causal_attention()(q, k, v).transpose(0, 1)
    close(o, plain_attention(*(t.transpose(0, 1).double() for t in (q, k, v)), [7]), torch.float32)


def test_equal_scores_go_to_the_lowest_expert_and_replayed_ones_keep_live_gates() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0], [0.0] * 6], device=DEVICE)
    live = choose(scores, Router(3))
    assert live.experts_NK.tolist() == [[1, 2, 4], [0, 1, 2]]
    assert live.gates_NK.sum(1).tolist() == pytest.approx([1.0, 1.0])
    routes = torch.tensor([[5, 1, 0], [255, 255, 255]], dtype=torch.uint8, device=DEVICE)
    replayed = choose(scores, Router(3), routes_NK=routes)
    assert replayed.experts_NK.tolist() == [[5, 1, 0], [0, 1, 2]]
    assert torch.equal(replayed.live_NK, live.experts_NK)
    chosen = scores[0].softmax(-1)[[5, 1, 0]]
    close(replayed.gates_NK[0], chosen / chosen.sum(), torch.float32)


def softmax_gates(scores: torch.Tensor) -> torch.Tensor:
    top = scores.softmax(-1).topk(3, -1).values
    return top / top.sum(-1, keepdim=True)


def grouped_gates(scores: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3's: the two best of four groups of three, chosen with a bias that gates do not see."""
    chance = scores.sigmoid()
    choice = chance.detach() + bias
    best = choice.view(-1, 4, 3).topk(2, -1).values.sum(-1).topk(2, -1).indices
    kept = torch.zeros(len(scores), 4, device=scores.device).scatter_(1, best, 1).bool().repeat_interleave(3, 1)
    top = chance.gather(1, choice.masked_fill(~kept, -math.inf).topk(3, -1).indices)
    return top / top.sum(-1, keepdim=True) * 2.5


def test_both_families_gates_are_right_with_their_gradients_and_ignore_other_rows() -> None:
    scores, bias = drawn(33, 12), drawn(12, scale=0.1)
    checked(torch.float32, lambda x: choose(x, Router(3)).gates_NK, softmax_gates, scores)
    latest = Router(3, sigmoid=True, groups=4, groups_kept=2, scale=2.5)
    gates = checked(
        torch.float32,
        lambda x: choose(x, latest, bias_E=bias).gates_NK,
        lambda x: grouped_gates(x, bias.double()),
        scores,
    )
    assert torch.equal(choose(scores[30:31], latest, bias_E=bias).gates_NK, gates[30:31])


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    out = []
    for q_, k_, v_ in zip(*(t.split(lengths) for t in (q, k, v)), strict=True):
        share = q.shape[1] // k.shape[1]
        scores = torch.einsum("nha,mha->hnm", q_, k_.repeat_interleave(share, 1)) * q.shape[-1] ** -0.5
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        out.append(torch.einsum("hnm,mhb->nhb", weights, v_.repeat_interleave(share, 1)))
    return torch.cat(out)


GROUPED, OTHER, LATENT = (4, 2, 32, 32), (6, 2, 48, 32), (4, 1, 24, 16)  # heads, key heads, widths
CASES = [*((*GROUPED, dtype) for dtype in DTYPES), (*OTHER, torch.bfloat16), (*LATENT, torch.bfloat16)]


@pytest.mark.parametrize(("heads", "key_heads", "key", "value", "dtype"), CASES)
def test_attention_is_right_and_a_row_has_the_same_bits_decoded_in_chunks_and_packed(
    heads: int, key_heads: int, key: int, value: int, dtype: torch.dtype
) -> None:
    lengths = [5, 66 * TIMES, 18 * TIMES]
    n = sum(lengths)
    shared = key_heads == 1
    q, k = drawn(n, heads, key, dtype=dtype), drawn(n, key_heads, key, dtype=dtype, seed=1)
    v = k[..., :value] if shared else drawn(n, key_heads, value, dtype=dtype, seed=2)
    packed = PackedTokens(lengths, DEVICE)
    o = checked(
        dtype,
        lambda q, k, v: attend_packed(q, k, v, packed.tokens),
        lambda q, k, v: plain_attention(q, k, v, lengths),
        q, k, v,
    )  # fmt: skip
    beside = torch.cat([k, k], 1)[:, :key_heads]  # as a product leaves them: rows further apart than they are long
    assert torch.equal(attend_packed(q, beside, beside[..., :value] if shared else v, packed.tokens), o)
    pages = Pages(
        num_layers=1, num_pages=4 * n // 16, page=16, heads=key_heads, key_width=key, value_width=value,
        shared=shared, dtype=dtype, device=DEVICE,
    )  # fmt: skip
    pages.keys.fill_(math.nan)  # what was never written is never read
    pages.values.fill_(math.nan)
    order = torch.randperm(pages.keys.shape[1], generator=torch.Generator().manual_seed(0)).tolist()
    own = [[order.pop() for _ in range(-(-length // 16))] for length in lengths]
    cuts = [[0, 5], [0, 17, lengths[1] - 1, lengths[1]], [0, 1, lengths[2]]]
    while any(len(cut) > 1 for cut in cuts):  # a step: the next chunk of each sequence that has one
        turn = [i for i, cut in enumerate(cuts) if len(cut) > 1]
        rows = [SequenceRows(cuts[i][0], cuts[i][1] - cuts[i].pop(0), own[i]) for i in turn]
        flat = torch.cat(
            [torch.arange(r.count) + sum(lengths[:i]) + r.start for i, r in zip(turn, rows, strict=True)]
        ).to(DEVICE)
        assert torch.equal(PagedTokens(pages, rows).attend(0, q[flat], k[flat], v[flat]), o[flat])


def test_long_contexts_have_the_same_bits_however_their_spans_are_scheduled() -> None:
    length, dtype = 1100, torch.bfloat16  # more than one span
    q, k, v = (drawn(length, heads, 16, dtype=dtype, seed=i) for i, heads in enumerate((2, 1, 1)))
    packed = PackedTokens([length], DEVICE).attend(0, q, k, v)
    close(packed, plain_attention(q.double(), k.double(), v.double(), [length]), dtype)
    slot = PagedKeys(
        k.transpose(0, 1)[None], v.transpose(0, 1)[None], torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), length
    )
    for first, count in ((1099, 1), (3, 1), (1020, 8)):
        at = Queries.of(torch.tensor([count], device=DEVICE), torch.tensor([first], device=DEVICE), count)
        for spread in (False, True):
            assert torch.equal(attend(q[first : first + count], slot, at, spread=spread), packed[first : first + count])


@pytest.mark.skipif(not GPU, reason="streams are a GPU's")
def test_streams_and_threads_change_no_bit() -> None:
    x, weight = drawn(700, 2048, dtype=torch.bfloat16), drawn(2048, 2048, dtype=torch.bfloat16)
    expected, found = linear(x, weight), []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.extend(torch.equal(linear(x[:n], weight), expected[:n]) for n in range(1, 700, 61))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 * 12
    assert all(found)
