"""Sequence packing: which samples are forwarded together, and by which data-parallel rank, balanced by cost.

A token costs a product with every active parameter, and one with each token before it: T tokens cost T + T² / τ, where
at τ tokens attention costs as much as all other products. Ranks wait for the slowest at every collective, so their
forward passes should cost the same; balancing lengths alone ignores the second term.

Samples go, from the most expensive on, to the cheapest bin with enough capacity (Graham's longest processing time
first, 1969: at most 4/3 of the optimum). Bins of similar cost form a row, which the ranks forward together.
Deterministic: the same samples give the same plan on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from etude.models.config import ModelConfig
from etude.training.prefix_tree import PrefixOrder

_CLOSE = 1e-3  # how near the largest cost of a bin comes to the smallest possible one, as a share


@dataclass(frozen=True)
class Cost:
    """The cost of a forward pass of a sequence, in units of the cost of one token without attention.

    `even_tokens`: the length at which attention costs as much as the other products.

    >>> Cost(even_tokens=1000.0).of(1000)
    2000.0
    """

    even_tokens: float
    """Length at which attention costs as much as the other products."""

    @classmethod
    def for_model(cls, config: ModelConfig) -> Cost:
        """Return the cost function of a model.

        A token costs one product with each active parameter. A token that attends to another costs as many products per
        head as a key and a value have numbers; with causal attention half of all pairs do. The backward pass costs
        twice as much, for both parts."""
        c = config
        met = c.num_parameters - c.vocab_size * c.hidden_size  # an embedding is looked up
        met += c.vocab_size * c.hidden_size if c.tie_embeddings else 0
        met -= 3 * c.num_moe_layers * (c.num_experts - c.top_k) * c.expert_size * c.hidden_size
        return cls(2 * met / (c.num_layers * c.num_heads * (c.head_dim + c.value_dim)))

    def of(self, num_tokens: int) -> float:
        """Return the cost of one sequence."""
        return num_tokens + num_tokens**2 / self.even_tokens


def pack(lengths: Sequence[int], *, shares: int, budget_tokens: int, cost: Cost) -> list[list[list[int]]]:
    """Distribute samples over forward passes of data-parallel ranks, balanced by cost.

    Returns rows. All ranks compute a row at the same time. A row has one bin for each of `shares` ranks. A bin is a
    list of indices into `lengths`, ascending, with at most `budget_tokens` in total. A longer sequence has its own bin.
    Bins are empty where there are fewer sequences than shares.

    >>> pack([8, 1, 1, 6], shares=2, budget_tokens=10, cost=Cost(math.inf))
    [[[0], [1, 2, 3]]]
    """
    if not lengths:
        return []
    bins = _bins(lengths, shares, budget_tokens, cost)
    return _rows(bins, [sum(cost.of(lengths[i]) for i in one) for one in bins], shares)


def pack_prefixes(found: PrefixOrder, *, shares: int, budget_tokens: int, cost: Cost) -> list[list[list[int]]]:
    """Distribute paths like `pack`, for forward passes in which tokens that several paths of a bin share are computed
    once.

    Bins are consecutive in the order of `found`, so that only the prefix at a cut is computed twice. The largest cost
    of a bin is as small as such cuts allow.

    >>> order = PrefixOrder(order=(0, 1, 2, 3), shared=(0, 4, 0, 4), lengths=(6, 6, 6, 6))
    >>> pack_prefixes(order, shares=2, budget_tokens=10, cost=Cost(math.inf))
    [[[0, 1], [2, 3]]]
    """
    number, paths = shares, range(len(found.order))
    whole = [cost.of(found.lengths[i]) for i in found.order]
    added = [whole[at] - cost.of(found.shared[at]) for at in paths]
    while True:
        low, high = max(whole), sum(whole)
        best = _cut(found, whole, added, budget_tokens, high)
        if len(best) > number:
            number += shares
            continue
        while high - low > _CLOSE * high:
            middle = (low + high) / 2
            bins = _cut(found, whole, added, budget_tokens, middle)
            low, high, best = (low, middle, bins) if len(bins) <= number else (middle, high, best)
        costs = [whole[one[0]] + sum(added[at] for at in one[1:]) for one in best]
        empty = [list[int]() for _ in range(-len(best) % shares)]
        bins = [sorted(found.order[at] for at in one) for one in best] + empty
        return _rows(bins, [*costs, *(0.0 for _ in empty)], shares)


def _cut(
    found: PrefixOrder, whole: Sequence[float], added: Sequence[float], budget_tokens: int, most: float
) -> list[list[int]]:
    """Fill bins with consecutive paths, each up to a number of tokens and a cost."""
    bins: list[list[int]] = []
    tokens, spent = 0, 0.0
    for at, path in enumerate(found.order):
        new = found.lengths[path] - found.shared[at]
        if bins and tokens + new <= budget_tokens and spent + added[at] <= most:
            bins[-1].append(at)
            tokens, spent = tokens + new, spent + added[at]
        else:
            bins.append([at])
            tokens, spent = found.lengths[path], whole[at]
    return bins


def _rows(bins: list[list[int]], costs: list[float], shares: int) -> list[list[list[int]]]:
    """Distribute bins over shares, a row of bins at a time: the lightest share takes the most expensive bin."""
    order = sorted(range(len(bins)), key=lambda b: (-costs[b], bins[b]))
    rows, loads = [], [0.0] * shares
    for at in range(0, len(order), shares):
        lightest = sorted(range(shares), key=lambda s: (loads[s], s))
        row: list[list[int]] = [[] for _ in range(shares)]
        for share, one in zip(lightest, order[at : at + shares], strict=True):
            row[share] = bins[one]
            loads[share] += costs[one]
        rows.append(row)
    return rows


def _bins(lengths: Sequence[int], shares: int, budget_tokens: int, cost: Cost) -> list[list[int]]:
    """Fill the smallest multiple of `shares` bins that holds all samples."""
    number = max(1, math.ceil(sum(min(n, budget_tokens) for n in lengths) / (shares * budget_tokens))) * shares
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    while True:
        bins: list[list[int]] = [[] for _ in range(number)]
        costs, room = [0.0] * number, [budget_tokens] * number
        for i in order:
            fits = [b for b in range(number) if lengths[i] <= room[b] or not bins[b]]
            if not fits:
                break
            lightest = min(fits, key=lambda b: (costs[b], b))
            bins[lightest].append(i)
            costs[lightest] += cost.of(lengths[i])
            room[lightest] -= lengths[i]
        else:
            return [sorted(one) for one in bins]
        number += shares
