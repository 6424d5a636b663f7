"""Packs samples into the input of one forward pass: the tokens of several paths, and the rows with a loss.

A path is the token sequence of one sample. The model computes it up to, and excluding, its last sampled token, which is
only predicted. Paths are packed one after another without padding, or as a tree in which each shared token occurs once
(`training.prefix_tree`). The rows are the same in both: one for each sampled token of each sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from etude.models.attention import Cache, PackedTree
from etude.numerics.operators import Operators
from etude.records import Sample
from etude.training.batches import group_by_budget
from etude.training.prefix_tree import PrefixTree, prefix_order
from etude.training.routes import RouteReplay
from etude.training.token_batch import TokenBatch


@dataclass(frozen=True, kw_only=True)
class FlatBatch(TokenBatch):
    """The input of one forward pass over samples, whose texts are paths. L layers, K experts per token.

    - `routes_NLK`: experts to replay, or `missing_route`; None: replay nothing.
    - `sampler_logprobs_R`, `advantages_R`: float32.
    - `sample_R`: int64, the index of each row's sample.
    - `temperatures_R`: float32, NaN for the run's temperature; None: the run's for all rows.
    - `tree`: how the tokens form paths, where shared ones occur once; None: paths one after another."""

    routes_NLK: torch.Tensor | None
    sampler_logprobs_R: torch.Tensor
    advantages_R: torch.Tensor
    sample_R: torch.Tensor
    temperatures_R: torch.Tensor | None = None
    tree: PrefixTree | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all paths; 0 for an `empty` batch."""
        return self.num_forwarded if self.tree is None else len(self.tree.index_P)

    @property
    def counts_N(self) -> torch.Tensor | None:
        """The number of paths that contain each token, float32 [N]; None: each token is in one path."""
        return None if self.tree is None else self.tree.counts_N.to(self.tokens_N.device)

    def cache(self, operators: Operators) -> Cache:
        if self.tree is not None:
            return PackedTree(self.tree.pieces, self.tree.branches, operators, device=self.tokens_N.device)
        return super().cache(operators)

    def by_path(self, each_N: torch.Tensor) -> torch.Tensor:
        """Expand one value per token, [N], to one value per position of every path, [P], path after path."""
        return each_N if self.tree is None else each_N[self.tree.index_P.to(each_N.device)]

    def place(self, token: int, sample: int | None = None) -> tuple[int, int]:
        """Return (index of the sample, position in its path) of token `token`, an index into the N tokens.

        `sample`: which of the samples that share the token; None: the first."""
        ends = np.cumsum(self.lengths)
        if self.kept_N is not None:
            token = int(self.kept_N[token])
        elif self.tree is not None:
            where_P = self.tree.index_P == token
            if sample is not None:
                where_P[: int(ends[sample]) - self.lengths[sample]] = False
            token = int(where_P.nonzero()[0])
        of = int(np.searchsorted(ends, token, side="right"))
        return of, token - int(ends[of]) + self.lengths[of]

    def per_row(self, of_samples: Sequence[bool]) -> torch.Tensor:
        """Expand one value per sample to one value per row, bool [R]."""
        return torch.tensor(of_samples, dtype=torch.bool, device=self.sample_R.device)[self.sample_R]

    def places_in(self, whole: FlatBatch) -> torch.Tensor:
        """Return for each row of this batch its row index in `whole`, int64 [R].

        This batch must be a part of `whole` that `select` returned."""
        if self.kept_N is None:
            return torch.arange(len(self.rows_R))
        return torch.searchsorted(whole.rows_R, self.kept_N.cpu()[self.rows_R.cpu()])

    def temperature(self, run: float) -> torch.Tensor | float:
        """Return the sampling temperature of each row, [R, 1]; or the number `run`, if all rows have this temperature.

        `run`: the sampling temperature of the run."""
        if self.temperatures_R is None:
            return run
        return torch.where(self.temperatures_R.isnan(), run, self.temperatures_R)[:, None]


def _empty_batch() -> FlatBatch:
    ints, floats = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    return FlatBatch(
        lengths=[],
        tokens_N=torch.zeros(1, dtype=torch.int64),
        routes_NLK=None,
        rows_R=ints,
        targets_R=ints,
        sampler_logprobs_R=floats,
        advantages_R=floats,
        sample_R=ints,
    )


def microbatches(samples: Sequence[Sample], *, budget_tokens: int) -> Iterator[list[Sample]]:
    """Split samples into consecutive groups with at most `budget_tokens` each; a longer sample is alone.

    The order is kept, so that a repeated step sums gradients in the same order."""
    for part in group_by_budget([num_forwarded(sample) for sample in samples], budget_tokens):
        yield list(samples[part])


def flatten_samples(
    samples: Sequence[Sample], replay: RouteReplay | None = None, *, share_prefixes: bool = False
) -> FlatBatch:
    """Pack samples into a batch. Without samples it is one of one token and no rows, as `TokenBatch.empty`.

    `replay`: which recorded routes to replay; None: none. `share_prefixes`: compute tokens that paths share once.
    Raises `ValueError` for a path that begins with a sampled token, and `ParityError` for routes that cannot be
    replayed."""
    if not samples:
        return _empty_batch()
    ends = [num_forwarded(sample) for sample in samples]
    paths = [sample.path for sample in samples]
    sampled = [np.flatnonzero(path.mask) for path in paths]
    if any(where[0] == 0 for where in sampled):
        raise ValueError("a path begins with a sampled token: it needs at least one token of context before it")
    counts = [len(where) for where in sampled]
    flat = FlatBatch(
        lengths=ends,
        tokens_N=_tensor([path.token_ids[:end] for path, end in zip(paths, ends, strict=True)], np.int64),
        routes_NLK=None if replay is None else replay.routes(samples, ends),
        rows_R=path_rows(samples),
        targets_R=_tensor([path.token_ids[where] for path, where in zip(paths, sampled, strict=True)], np.int64),
        sampler_logprobs_R=_tensor(
            [path.logprobs[where] for path, where in zip(paths, sampled, strict=True)], np.float32
        ),
        advantages_R=_tensor([sample.advantages for sample in samples], np.float32),
        sample_R=_tensor([np.repeat(np.arange(len(samples)), counts)], np.int64),
        temperatures_R=_temperatures(samples),
    )
    if not share_prefixes:
        return flat
    found = prefix_order(samples, ends, replay)
    return _merged(flat, PrefixTree.of(found)) if any(found.shared) else flat


def path_rows(samples: Sequence[Sample]) -> torch.Tensor:
    """Return for each row with loss its place among the positions of all paths, path after path, int64 [R]."""
    starts = np.cumsum([0, *(num_forwarded(sample) for sample in samples)])
    places = [start + np.flatnonzero(s.path.mask) - 1 for start, s in zip(starts, samples, strict=False)]
    return _tensor(places, np.int64)


def _merged(flat: FlatBatch, tree: PrefixTree) -> FlatBatch:
    """Return the batch with each shared token once, in the order of the tree."""
    return replace(
        flat,
        tokens_N=flat.tokens_N[tree.first_N],
        routes_NLK=None if flat.routes_NLK is None else flat.routes_NLK[tree.first_N],
        rows_R=tree.index_P[flat.rows_R],
        tree=tree,
    )


def num_forwarded(sample: Sample) -> int:
    """Return the number of tokens of a sample that the model computes: those before the last sampled token.

    Raises `ValueError` for a sample without a sampled token."""
    where = np.flatnonzero(sample.path.mask)
    if not len(where):
        raise ValueError(f"rollout {sample.rollout_id} has no sampled token")
    return int(where[-1])


def _tensor(parts: Sequence[np.ndarray], dtype: type) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(dtype))


def _temperatures(samples: Sequence[Sample]) -> torch.Tensor | None:
    if all(sample.temperatures is None for sample in samples):
        return None
    of = [np.full_like(s.advantages, np.nan) if s.temperatures is None else s.temperatures for s in samples]
    return _tensor(of, np.float32)
