"""One order of summation for each operator: every row alone, among others, cut and padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from etude.numerics.exact import Causal, causal_mask, in_lanes, key_windows, matmul, top_k
from etude.numerics.exact.attention import ANY, BLOCK, KERNEL_BLOCK, SEVERAL, masked_attention, summed_attention
from etude.numerics.exact.operators import Exact


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What was measured is measured anew, and again after the test."""
    measured = (
        matmul.safe_counts,
        matmul._measured_path,
        matmul._measured_columns,
        matmul._gaps_alike,
    )
    for cache in measured:
        cache.cache_clear()
    yield
    for cache in measured:
        cache.cache_clear()


@pytest.mark.parametrize("product", [matmul.linear, matmul.tiled_product, matmul.summed_product])
def test_every_way_to_multiply_has_rows_that_depend_on_themselves_alone(product: matmul.Product) -> None:
    x, weight = random(70, 24), random(11, 24, seed=1)
    whole = product(x, weight)
    assert torch.allclose(whole, x @ weight.T, atol=1e-5)
    for n in (1, 2, 3, 5, 9, 31, 33, 69):
        assert torch.equal(product(x[:n], weight), whole[:n])
        assert torch.equal(product(x[-n:], weight), whole[-n:])


def test_a_vendor_whose_rows_differ_is_not_used(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    real = F.linear

    def planted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return real(x, weight) + (1e-6 if len(x) % 2 else 0.0)

    monkeypatch.setattr(F, "linear", planted)
    assert all(count % 2 == 0 for count in matmul.safe_counts(torch.get_num_threads()))
    monkeypatch.setattr(matmul, "vendor_product", planted)
    assert matmul.product_for(8, 16) is matmul.tiled_product
    monkeypatch.setattr(F, "linear", lambda x, w: real(x, w) + torch.arange(len(x))[:, None] * 1e-6)
    matmul._measured_path.cache_clear()
    assert matmul.product_for(8, 16) is matmul.summed_product
    Exact().linear(random(3, 16), random(8, 16))  # and works


@pytest.mark.parametrize(("size", "in_size"), [(5, 20), (8, 32), (9, 24), (10, 32), (11, 24), (64, 128)])
def test_an_output_has_the_same_bits_whichever_others_a_rank_has(size: int, in_size: int) -> None:
    product, x, weight = matmul.column_product(size, in_size, 4), random(30, in_size), random(4 * size, in_size, seed=1)
    whole = product(x, weight)
    mixed = torch.randperm(4 * size, generator=torch.Generator().manual_seed(2))
    for ranks in (1, 2, 4):
        shares = torch.cat([product(x, share) for share in weight[mixed].chunk(ranks)], -1)
        assert torch.equal(shares, whole[:, mixed])


def test_a_vendor_whose_outputs_depend_on_each_other_is_called_share_by_share_or_not(
    monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    real = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w: real(x, w) + (1e-6 if len(w) < 24 else 0.0))
    shared = matmul.column_product(16, 8, 2)
    assert shared not in (matmul.linear, matmul.summed_product)
    assert torch.equal(shared(random(3, 8), random(16, 8)), shared(random(3, 8), random(32, 8))[:, :16])
    monkeypatch.setattr(F, "linear", lambda x, w: real(x, w) + torch.arange(len(w)) * 1e-6)
    matmul._measured_columns.cache_clear()
    assert matmul.column_product(16, 8, 2) is matmul.summed_product


@pytest.mark.parametrize("number", [1, 2, 4])
def test_pieces_of_an_inner_sum_make_a_tree_that_ranks_can_share(number: int) -> None:
    x, weight = random(9, 48), random(20, 48, seed=1)
    whole = matmul.partial_products(x, weight, 4)
    assert torch.allclose(whole, x @ weight.T, atol=1e-5)
    parts = [
        matmul.partial_products(a, w, 4 // number)
        for a, w in zip(x.chunk(number, 1), weight.chunk(number, 1), strict=True)
    ]
    assert torch.equal(matmul.tree_sum(parts), whole)


def test_a_vendor_who_minds_gaps_between_rows_gets_none(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    assert not matmul.split_inner(random(8, 16), 2)[1].is_contiguous()
    matmul._gaps_alike.cache_clear()
    real = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w: real(x, w) + (0.0 if w.is_contiguous() else 1e-6))
    assert matmul.split_inner(random(8, 16), 2)[1].is_contiguous()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("function", [F.silu, torch.sigmoid])
def test_a_numbers_bits_do_not_depend_on_where_it_lies(
    function: Callable[[torch.Tensor], torch.Tensor], threads: int
) -> None:
    x = random(4000, 24, seed=3)
    before = torch.get_num_threads()
    whole = in_lanes(function, x)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(in_lanes(function, x), whole)
    finally:
        torch.set_num_threads(before)
    for n in (1, 2, 3, 5, 131):
        assert torch.equal(in_lanes(function, x[-n:]), whole[-n:])


def test_equal_scores_are_chosen_in_order_of_index() -> None:
    values = torch.randint(0, 3, (200, 16), generator=torch.Generator().manual_seed(0)) / 7
    expected = torch.sort(values, dim=-1, descending=True, stable=True).indices
    assert torch.equal(top_k(values, 5), expected[:, :5])


@pytest.mark.parametrize(("heads", "width"), [(2, 32), (1, 16), (2, 20)])
def test_there_is_a_window_for_every_position(heads: int, width: int) -> None:
    found = key_windows(heads, width)
    assert KERNEL_BLOCK in found.usable
    assert SEVERAL in found.usable
    for stop in (1, 64, 65, 511, 512, 513, 1024, 1025, 5000, 100_000):
        assert stop <= found.covering(stop) <= -(-stop // KERNEL_BLOCK) * KERNEL_BLOCK
        assert ANY.covering(stop) == -(-stop // BLOCK) * BLOCK
    assert [found.padded(n) for n in (1, 4, 5, 33, 191, 192, 193, 800)] == [4, 4, 8, 64, 192, 192, 256, 1024]


def test_attention_written_out_is_attention() -> None:
    q, k, v = random(1, 4, 9, 16), random(1, 2, 128, 16, seed=1), random(1, 2, 128, 12, seed=2)
    mask = causal_mask(torch.arange(100, 109), 128)
    expected = masked_attention(q, k, v, mask, 0.3)
    assert torch.allclose(summed_attention(q, k, v, mask, 0.3), expected, atol=1e-5)
    for n in (1, 2, 5):
        assert torch.equal(
            summed_attention(q[:, :, -n:], k, v, mask[-n:], 0.3), summed_attention(q, k, v, mask, 0.3)[:, :, -n:]
        )


@pytest.mark.parametrize("value_width", [32, 20])
def test_a_sequence_attends_to_the_same_bits_however_long_it_goes_on(value_width: int) -> None:
    q, k, v = random(4, 300, 32), random(2, 300, 32, seed=1), random(2, 300, value_width, seed=2)
    whole = Causal()(q, k, v)
    assert torch.allclose(whole, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), atol=1e-5)
    for n in (1, 2, 63, 65, 128, 129, 250):
        assert torch.equal(Causal()(q[:, :n], k[:, :n], v[:, :n]), whole[:, :n])


def test_the_gradient_of_attention_in_windows_is_attentions() -> None:
    leaves = [
        random(4, 150, 8).requires_grad_(),
        random(2, 150, 8).requires_grad_(),
        random(2, 150, 6).requires_grad_(),
    ]
    weight = random(4, 150, 6, seed=9)
    ours = torch.autograd.grad((Causal()(*leaves) * weight).sum(), leaves)
    plain = F.scaled_dot_product_attention(*(t[None] for t in leaves), is_causal=True, enable_gqa=True)[0]
    theirs = torch.autograd.grad((plain * weight).sum(), leaves)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
