"""Row-invariant products and keyed sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.numerics import sample, uniform
from etude.numerics.exact import linear


def test_a_product_of_no_rows_is_empty() -> None:
    assert linear(torch.ones(0, 3), torch.ones(2, 3)).shape == (0, 2)


def test_the_gradient_of_the_padded_product_matches_finite_differences() -> None:
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(linear, (x, w))


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**40)), min_size=1, max_size=20))
def test_a_uniform_depends_on_its_own_key_alone(keys: list[tuple[int, int]]) -> None:
    seeds, positions = zip(*keys, strict=True)
    together = uniform(seeds, positions)
    assert ((together >= 0) & (together < 1)).all()
    assert together.tolist() == [float(uniform([s], [p])[0]) for s, p in keys]


def test_uniforms_are_uniform_over_seeds_and_over_positions() -> None:
    for seeds, positions in ((np.arange(20_000), np.zeros(20_000)), (np.full(20_000, 3), np.arange(20_000))):
        counts = np.histogram(uniform(seeds, positions), 20, (0, 1))[0]
        assert np.abs(counts - 1000).max() < 150  # five standard deviations


def test_neighbouring_seeds_do_not_share_shifted_sequences() -> None:
    a, b = uniform([1] * 1000, range(1000)), uniform([2] * 1000, range(1000))
    assert not np.intersect1d(a[:50], b).size


def test_sampling_follows_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.2, 0.3, 0.0])).expand(30_000, 4)
    tokens, logprobs = sample(logits, np.ones(30_000), np.full(30_000, 5), np.arange(30_000))
    shares = torch.bincount(tokens, minlength=4) / 30_000
    assert torch.allclose(shares, torch.tensor([0.5, 0.2, 0.3, 0.0]), atol=0.015)
    assert shares[3] == 0
    assert torch.allclose(logprobs, logits[0].log_softmax(-1)[tokens])


def test_a_row_samples_the_same_token_and_logprob_alone_and_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(33, 768, generator=generator) * 3
    temperatures = [0.0, 1.0, 0.7] * 11
    tokens, logprobs = sample(logits, temperatures, range(33), range(100, 133))
    for i in range(33):
        token, logprob = sample(logits[i : i + 1], temperatures[i : i + 1], [i], [100 + i])
        assert token.item() == tokens[i].item()
        assert logprob.item() == logprobs[i].item()


def test_temperature_zero_is_greedy_with_the_logprob_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    for seed in range(50):
        token, logprob = sample(logits, [0.0], [seed], [0])
        assert token.item() == 1
        assert logprob.item() == pytest.approx(logits.log_softmax(-1)[0, 1].item())


def test_logprobs_are_those_of_the_distribution_sampled_from() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    token, logprob = sample(logits, [0.5], [1], [1])
    assert logprob.item() == pytest.approx((logits / 0.5).log_softmax(-1)[0, token.item()].item())
