"""Prefixes that several samples share, so that a forward pass computes each of their tokens once.

The calls of one rollout branch off each other, and the rollouts of a group begin with one prompt. A token's results
depend on the tokens before it and on the experts that they used. So paths share their tokens up to the first one with
another id, or another route to replay. In an order in which paths with a common prefix are adjacent, each path adds a
*branch* to the tree: its tokens after the prefix that it shares with the path before.

Shapes: N tokens of the tree, P tokens of all paths, each path on its own."""

from __future__ import annotations

import functools
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from etude.models.attention import Branch
from etude.records import Sample
from etude.records.wire import Bools
from etude.training.routes import RouteReplay


@dataclass(frozen=True)
class PrefixOrder:
    """An order of paths in which those with a common prefix are adjacent.

    - `order`: indices of the paths.
    - `shared`: how many tokens each path shares with the one before it in this order, 0 for the first. No earlier path
      shares more tokens with it.
    - `lengths`: tokens of each path, in the original order."""

    order: tuple[int, ...]
    shared: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def num_unique(self) -> int:
        """The number of tokens, with shared tokens counted once."""
        return sum(self.lengths) - sum(self.shared)


def prefix_order(samples: Sequence[Sample], ends: Sequence[int], replay: RouteReplay | None) -> PrefixOrder:
    """Find what the paths of samples share among their first `ends` tokens.

    `replay`: which recorded routes are replayed; tokens are shared only if these routes are equal, too. None: no
    routes."""
    paths = [_Path(sample, end, replay) for sample, end in zip(samples, ends, strict=True)]

    def compare(a: int, b: int) -> int:
        return paths[a].compare(paths[b])

    order = sorted(range(len(paths)), key=functools.cmp_to_key(compare))
    shared = [paths[a].shared(paths[b]) for a, b in pairwise(order)]
    return PrefixOrder(tuple(order), (0, *shared)[: len(order)], tuple(ends))


class _Path:
    """The tokens of a path, and those routes that are replayed."""

    def __init__(self, sample: Sample, end: int, replay: RouteReplay | None) -> None:
        self.tokens = sample.path.token_ids[:end]
        self.stale: Bools | None = None if replay is None else replay.stale(sample, end)
        self.routes = sample.path.routes[:end]

    def shared(self, other: _Path) -> int:
        """Return the number of tokens up to the first difference."""
        most = min(len(self.tokens), len(other.tokens))
        most = _first(self.tokens[:most] != other.tokens[:most])
        if self.stale is None or other.stale is None or not most:
            return most
        live = ~(self.stale[:most] & other.stale[:most])
        if not live.any():
            return most
        a, b = self.routes[:most], other.routes[:most]
        if a.shape != b.shape or len(a) < most or a.dtype != b.dtype:  # some are missing: reported when they are read
            return 0
        return _first((self.stale[:most] != other.stale[:most]) | (live & (a != b).any((1, 2))))

    def compare(self, other: _Path) -> int:
        """Return a negative number if this path comes before the other, a positive one after it, 0 for equal ones."""
        at = self.shared(other)
        if at == min(len(self.tokens), len(other.tokens)):
            return len(self.tokens) - len(other.tokens)
        return -1 if self._key(at) < other._key(at) else 1

    def _key(self, at: int) -> tuple[int, bool, bytes]:
        stale = self.stale is not None and bool(self.stale[at])
        routes = b"" if self.stale is None or stale else self.routes[at : at + 1].tobytes()
        return int(self.tokens[at]), stale, routes


def _first(different: Bools) -> int:
    """Return the index of the first True, or the length without one."""
    at = int(different.argmax()) if len(different) else 0
    return at if len(different) and different[at] else len(different)


@dataclass(frozen=True)
class PrefixTree:
    """The layout of a forward pass that computes each shared token once.

    - `pieces`: numbers of consecutive tokens between places where paths part, N in all.
    - `branches`: how the pieces form paths, in the order of their tokens.
    - `index_P`: int64, the token of the tree at each position of each path, in the order of the samples.
    - `first_N`: int64, for each token of the tree, its first position in `index_P`.
    - `counts_N`: float32, the number of paths with each token."""

    pieces: tuple[int, ...]
    branches: tuple[Branch, ...]
    index_P: torch.Tensor
    first_N: torch.Tensor
    counts_N: torch.Tensor

    @classmethod
    def of(cls, found: PrefixOrder) -> PrefixTree:
        """Lay out the tree of some paths.

        >>> tree = PrefixTree.of(PrefixOrder(order=(1, 0), shared=(0, 2), lengths=(4, 3)))
        >>> tree.pieces, tree.index_P.tolist()
        ((2, 1, 2), [0, 1, 3, 4, 0, 1, 2])
        """
        places: list[np.ndarray] = []  # of the tokens of each path, in tree order
        ends, size = {0}, 0
        for path, shared in zip(found.order, found.shared, strict=True):
            new = found.lengths[path] - shared
            before = places[-1][:shared] if places else np.zeros(0, np.int64)
            places.append(np.concatenate([before, np.arange(size, size + new)]))
            size += new
            ends |= {size} | ({int(before[-1]) + 1} if shared else set())
        cuts = sorted(ends)
        branches = []
        for where, shared in zip(places, found.shared, strict=True):
            if len(where) > shared:
                branches.append(Branch(start=shared, length=len(where) - shared, seen=_pieces(where, cuts)))
        by_path = dict(zip(found.order, places, strict=True))
        index = np.concatenate([by_path[path] for path in range(len(places))])
        _, first, counts = np.unique(index, return_index=True, return_counts=True)
        return cls(
            tuple(np.diff(cuts).tolist()),
            tuple(branches),
            torch.from_numpy(index),
            torch.from_numpy(first),
            torch.from_numpy(counts.astype(np.float32)),
        )


def _pieces(where: np.ndarray, cuts: list[int]) -> tuple[int, ...]:
    """Return the pieces that a path consists of: every piece ends at a cut, and so does each part of a path."""
    found, at = list[int](), 0
    while at < len(where):
        piece = bisect(cuts, int(where[at])) - 1
        found.append(piece)
        at += cuts[piece + 1] - cuts[piece]
    return tuple(found)
