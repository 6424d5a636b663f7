"""Packing by cost: what ranks forward together costs the same, and nothing is lost on the way."""

from __future__ import annotations

import random

import pytest

from etude.models import ModelConfig
from etude.training.batches import group_by_budget
from etude.training.packing import Cost, pack

MODEL = ModelConfig(  # Qwen3-30B-A3B's: attention costs as much as the rest at 16k tokens
    vocab_size=151_936,
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    expert_size=768,
    num_experts=128,
    top_k=8,
    context_tokens=32_768,
)
COST = Cost.for_model(MODEL)
SHARES, BUDGET = 4, 40_000


def skewed(seed: int, number: int = 256) -> list[int]:
    """Lengths of rollouts as they come: most are short, some very long."""
    generator = random.Random(seed)
    return [min(30_000, int(200 * generator.paretovariate(0.8))) for _ in range(number)]


def imbalance(rows: list[list[list[int]]], lengths: list[int]) -> float:
    """What all ranks wait for over what they compute: max / mean of each row's bins."""
    costs = [[sum(COST.of(lengths[i]) for i in one) for one in row] for row in rows]
    return sum(map(max, costs)) * SHARES / sum(map(sum, costs))


def first_fit(lengths: list[int]) -> list[list[list[int]]]:
    """Consecutive samples up to the budget, dealt to the shares as they come."""
    bins = [list(range(len(lengths)))[part] for part in group_by_budget(lengths, BUDGET)]
    bins += [[] for _ in range(-len(bins) % SHARES)]
    return [bins[at : at + SHARES] for at in range(0, len(bins), SHARES)]


@pytest.mark.parametrize("seed", range(5))
def test_skewed_lengths_are_balanced_by_cost_where_first_fit_is_not(seed: int) -> None:
    lengths = skewed(seed)
    rows = pack(lengths, shares=SHARES, budget_tokens=BUDGET, cost=COST)
    assert imbalance(rows, lengths) < 1.15
    assert imbalance(first_fit(lengths), lengths) > 1.4


def test_balance_by_tokens_alone_leaves_the_ranks_waiting() -> None:
    """A text of 16,000 tokens costs twice what short ones of as many tokens together do."""
    lengths = [*[16_000] * 3, *[300] * 200]
    by_tokens = pack(lengths, shares=SHARES, budget_tokens=BUDGET, cost=Cost(float("inf")))
    by_cost = pack(lengths, shares=SHARES, budget_tokens=BUDGET, cost=COST)
    assert imbalance(by_cost, lengths) < 1.01
    assert imbalance(by_tokens, lengths) > 1.08


@pytest.mark.parametrize("seed", range(5))
def test_every_sample_is_forwarded_once_within_the_budget_and_on_every_rank_alike(seed: int) -> None:
    lengths = [*skewed(seed), BUDGET + 1]
    rows = pack(lengths, shares=SHARES, budget_tokens=BUDGET, cost=COST)
    assert all(len(row) == SHARES for row in rows)
    bins = [one for row in rows for one in row]
    assert sorted(i for one in bins for i in one) == list(range(len(lengths)))
    assert all(len(one) <= 1 or sum(lengths[i] for i in one) <= BUDGET for one in bins)
    assert rows == pack(lengths, shares=SHARES, budget_tokens=BUDGET, cost=COST)


def test_samples_that_fit_into_one_forward_stay_in_their_order() -> None:
    assert pack([5, 9, 2], shares=1, budget_tokens=16, cost=COST) == [[[0, 1, 2]]]


def test_the_cost_is_that_of_counted_products() -> None:
    """At τ tokens attention costs as much as the rest: a key's and a value's width for each pair."""
    c = MODEL
    pairs = c.num_layers * c.num_heads * 2 * c.head_dim * COST.even_tokens**2 / 2
    matrices = 2 * c.num_heads * c.head_dim + 2 * c.num_kv_heads * c.head_dim
    layer = c.hidden_size * (matrices + c.num_experts + 3 * c.top_k * c.expert_size)
    rest = COST.even_tokens * (c.num_layers * layer + c.vocab_size * c.hidden_size)
    assert pairs == pytest.approx(rest, rel=0.01)
