"""Sliding windows and attention sinks: the same numbers as explicit sums, and their gradient."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from etude.inference.kv import KVCache, Span, StepCache
from etude.models import ModelConfig, Packed
from etude.models.attention import Branch, PackedTree
from etude.numerics.exact.attention import causal_mask, masked_attention, summed_attention
from etude.numerics.exact.operators import Exact
from etude.numerics.exact.options import AttentionOptions
from etude.numerics.native import Native
from etude.numerics.operators import Operators

SIZES = ModelConfig(num_heads=4, num_kv_heads=2, head_dim=32, num_layers=1, context_tokens=1024)
NONE = np.zeros(0, np.int64)
OPTIONS = AttentionOptions(40, torch.tensor([-1.0, 0.5, 2.0, 5.0]))


def parts(n: int, *, grad: bool = False) -> list[torch.Tensor]:
    """Queries, keys and values of n tokens."""
    drawn = [torch.randn(n, h, 32, generator=torch.Generator().manual_seed(h + i)) for i, h in enumerate((4, 2, 2))]
    return [one.requires_grad_(grad) for one in drawn]


def explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """One softmax over a sink and the keys, in float64; o_NHA."""
    n, heads, _ = q.shape
    q, k, v = (t.double().transpose(0, 1).repeat_interleave(heads // t.shape[1], 0) for t in (q, k, v))
    scores = q @ k.mT / 32**0.5 + causal_mask(torch.arange(n), n, options.window).double()
    if options.sinks_H is not None:
        scores = torch.cat([scores, options.sinks_H.double()[:, None, None].expand(heads, n, 1)], -1)
    return (scores.softmax(-1)[..., :n] @ v).transpose(0, 1)


@pytest.mark.parametrize("operators", [Exact(), Native()], ids=["exact", "native"])
@pytest.mark.parametrize("which", ["window", "sinks", "both"])
def test_attention_and_its_gradient_are_those_of_one_softmax(operators: Operators, which: str) -> None:
    sinks = None if which == "window" else torch.tensor([-1.0, 0.5, 2.0, 5.0], requires_grad=True)
    options = AttentionOptions(None if which == "sinks" else 40, sinks)
    leaves, weights = parts(150, grad=True), torch.randn(150, 4, 32, generator=torch.Generator().manual_seed(0))
    inputs = [*leaves, *([] if sinks is None else [sinks])]
    o = Packed([150], operators).attend(0, *leaves, None, options)
    expected = explicit(*leaves, options)
    assert torch.allclose(o.double(), expected, atol=2e-6)
    plain = Packed([150], operators).attend(0, *leaves)
    assert not torch.allclose(o, plain, atol=1e-2)
    found = torch.autograd.grad((o * weights).sum(), inputs)
    for one, other in zip(found, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_sums_without_the_vendors_kernel_have_sinks_too() -> None:
    q, k, v = (torch.randn(1, 2, 32, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    mask, sinks = causal_mask(torch.arange(32), 32, 7), torch.tensor([[[1.0], [3.0]]])
    kernel, summed = (attend(q, k, v, mask, None, sinks) for attend in (masked_attention, summed_attention))
    assert torch.allclose(kernel, summed, atol=1e-6)
    assert not torch.allclose(kernel, masked_attention(q, k, v, mask), atol=1e-2)


@pytest.mark.parametrize("sliding", [40, 600], ids=str)
def test_an_engine_has_the_learners_bits_however_a_context_is_cut(sliding: int) -> None:
    options, length = AttentionOptions(sliding, OPTIONS.sinks_H), 700
    q, k, v = parts(length)
    learned = Packed([length], Exact()).attend(0, q, k, v, None, options)
    kv = KVCache(SIZES, Exact(), num_slots=3, context_tokens=1024)
    other = StepCache(kv, NONE, NONE, [Span(0, 0, 90)])
    other.attend(0, q[:90] * 2, k[:90], v[:90], None, options)
    found = []
    for start, stop in itertools.pairwise([0, 1, 17, 230, 511, 512, 600, 690]):
        step = StepCache(kv, NONE, NONE, [Span(2, start, stop)])
        found.append(step.attend(0, q[start:stop], k[start:stop], v[start:stop], None, options))
    for at in range(690, length):  # decoding, beside another slot
        rows = [torch.stack([t[90], t[at]]) for t in (q, k, v)]
        step = StepCache(kv, np.array([0, 2]), np.array([90, at]), [])
        found.append(step.attend(0, *rows, None, options)[1:])
    assert torch.equal(torch.cat(found), learned)


def test_a_path_of_a_tree_has_the_bits_of_its_tokens_alone() -> None:
    q, k, v = parts(300)
    tree = PackedTree([200, 60, 40], [Branch(0, 260, (0, 1)), Branch(200, 40, (0, 2))], Exact())
    own = tree.attend(0, q, k, v, None, OPTIONS)[260:]
    alone = [torch.cat([t[:200], t[260:]]) for t in (q, k, v)]
    assert torch.equal(own, Packed([240], Exact()).attend(0, *alone, None, OPTIONS)[200:])
