"""The KV cache by slot, and attention whose bits depend on a single request."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from etude.inference.kv import KERNEL_BLOCK, KVCache, Span, StepCache
from etude.models import ModelConfig
from etude.numerics.exact.operators import Exact
from etude.numerics.native import Native
from etude.numerics.operators import Operators

SIZES = ModelConfig(num_heads=4, num_kv_heads=2, head_dim=32, num_layers=1)
NONE = np.zeros(0, np.int64)


def rows(n: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randn(n, heads, 32, generator=torch.Generator().manual_seed(seed))


def whole(kv: KVCache, slot: int, length: int, seed: int) -> torch.Tensor:
    """Attention over a full context as one chunk; o_NHA."""
    q, k, v = rows(length, 4, seed), rows(length, 2, seed + 1), rows(length, 2, seed + 2)
    return StepCache(kv, NONE, NONE, [Span(slot, 0, length)]).attend(0, q, k, v)


@pytest.mark.parametrize("operators", [Exact(), Native()])
def test_a_chunk_attends_as_training_does(operators: Operators) -> None:
    kv = KVCache(SIZES, operators, num_slots=2, context_tokens=300)
    o = whole(kv, 1, 300, seed=5)
    q, k, v = rows(300, 4, 5), rows(300, 2, 6), rows(300, 2, 7)
    expected = operators.causal_attention()(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)).transpose(0, 1)
    assert torch.allclose(o, expected, atol=1e-5)
    assert torch.equal(o, expected) or isinstance(operators, Native)


@pytest.mark.parametrize(
    "cuts", [[0, 300], [0, 1, 300], [0, 256, 300], [0, 7, 8, 150, 299, 300], [0, 17, 50, 147, 164, 300]]
)
def test_the_same_bits_come_however_a_context_is_cut(cuts: list[int]) -> None:
    kv = KVCache(SIZES, Exact(), num_slots=3, context_tokens=300)
    expected = whole(kv, 0, 300, seed=5)
    q, k, v = rows(300, 4, 5), rows(300, 2, 6), rows(300, 2, 7)
    parts = []
    for start, stop in itertools.pairwise(cuts):
        step = StepCache(kv, NONE, NONE, [Span(2, start, stop)])
        parts.append(step.attend(0, q[start:stop], k[start:stop], v[start:stop]))
    assert torch.equal(torch.cat(parts), expected)


@torch.inference_mode()
@pytest.mark.parametrize("length", [5, 20])
def test_native_decoding_attends_to_the_keys_of_each_slot(length: int) -> None:
    kv, slots, lengths = KVCache(SIZES, Native(), num_slots=5, context_tokens=300), [0, 3, 4], [1, 64, 230]
    expected = [whole(kv, slot, n, seed=10 * slot)[-1] for slot, n in zip(slots, lengths, strict=True)]
    last = [torch.cat([rows(n, h, 10 * s + i)[-1:] for s, n in zip(slots, lengths, strict=True)])
            for i, h in enumerate((4, 2, 2))]  # fmt: skip
    step = StepCache(kv, np.array(slots), np.array(lengths) - 1, [Span(1, 0, length)])
    chunk = [rows(length, h, 7 + i) for i, h in enumerate((4, 2, 2))]
    found = step.attend(0, *(torch.cat(pair) for pair in zip(last, chunk, strict=True)))
    assert torch.allclose(found[:3], torch.stack(expected), atol=1e-5)
    assert torch.allclose(found[3:], whole(kv, 2, length, seed=7), atol=1e-5)


@pytest.mark.parametrize("others", [[], [0, 1], [0, 5], [3], [0, 1, 3, 4, 5, 6, 7]])
def test_the_same_bits_come_decoding_among_any_others(others: list[int]) -> None:
    kv = KVCache(SIZES, Exact(), num_slots=8, context_tokens=700)
    length, lengths = 230, {slot: 20 + 90 * slot for slot in others}
    expected = whole(kv, 2, length, seed=5)[-1]
    for slot, n in lengths.items():
        whole(kv, slot, n, seed=10 * slot)
    slots = sorted([2, *others])
    last = [{**lengths, 2: length}[s] - 1 for s in slots]
    seeds = [5 if s == 2 else 10 * s for s in slots]
    parts = [
        torch.stack([rows(p + 1, h, s + a)[p] for p, s in zip(last, seeds, strict=True)])
        for a, h in enumerate((4, 2, 2))
    ]
    o = StepCache(kv, np.array(slots), np.array(last), []).attend(0, *parts)
    assert torch.equal(o[slots.index(2)], expected)


def test_a_mixed_step_keeps_rows_in_order() -> None:
    kv = KVCache(SIZES, Exact(), num_slots=2, context_tokens=64)
    expected = torch.stack([whole(kv, 0, 20, seed=5)[-1], *whole(kv, 1, 10, seed=9)])
    q, k, v = (torch.cat([rows(20, h, 5 + a)[-1:], rows(10, h, 9 + a)]) for a, h in enumerate((4, 2, 2)))
    assert torch.equal(StepCache(kv, np.array([0]), np.array([19]), [Span(1, 0, 10)]).attend(0, q, k, v), expected)


def test_memory_is_whole_kernel_blocks_and_untouched_pages_cost_nothing() -> None:
    kv = KVCache(SIZES, Exact(), num_slots=64, context_tokens=600)
    assert kv.keys[0].shape == (64, 2, 2 * KERNEL_BLOCK, 32)
    assert kv.num_bytes == 2 * 64 * 2 * 1024 * 32 * 4
