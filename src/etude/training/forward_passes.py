"""Forward passes of a model over samples: which samples share a pass, and the log-probabilities of their tokens.

The training pass of a batch, its scores with hints and its log-ratios for preference pairs are such passes. This module
knows nothing of losses, gradients and optimisers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from etude import progress
from etude.models.hooks import ForwardHook, no_hook
from etude.models.transformer import Forward
from etude.records import Batch, Sample
from etude.records.wire import F32
from etude.training.config import LearnerConfig
from etude.training.core import TrainingCore
from etude.training.flat_batch import FlatBatch, flatten_samples, microbatches, num_forwarded
from etude.training.nan_check import check_logits, check_sampled, describe_token
from etude.training.packing import Cost, pack, pack_prefixes
from etude.training.prefix_tree import prefix_order
from etude.training.routes import RouteReplay

Logprobs = Callable[[FlatBatch], torch.Tensor]
"""Computes the log-probability of each sampled token, float32 [R]."""
LEAST_SHARED = 0.25
"""Prefixes are shared from this share of tokens on that need not be computed again."""
UNREPLAYED_EVERY = 64
"""One of this many samples is computed again without route replay, to measure the unreplayed ratio."""


@dataclass(frozen=True)
class PackedSamples:
    """The samples of a batch, distributed over forward passes and ranks.

    `rows`: for each forward pass, and each data-parallel rank, the indices of its samples. `shared`: whether tokens
    that paths share are computed once. `num_tokens`: tokens of all paths. `num_unique`: the same number with shared
    tokens counted once."""

    samples: Sequence[Sample]
    rows: list[list[list[int]]]
    shared: bool
    num_tokens: int
    num_unique: int


@dataclass(frozen=True)
class _Scores:
    """The part of a rank in the scores of a forward pass.

    `samples`: indices of the samples in the pass. `rows`: indices, among their tokens with loss, of the rank's tokens.
    `logprobs`: one for each of these."""

    samples: list[int]
    rows: list[int]
    logprobs: list[float]


class ForwardPasses:
    """Computes log-probabilities of samples under the weights of `core`, at one step of a learner.

    - `temperature`: the run's sampling temperature, for samples without their own.
    - `replay`: the routes (chosen experts) to replay in training passes; None: none.
    - `step`: the training step of the model, named in errors.
    - `share_prefixes`: whether tokens that several paths share may be computed once."""

    def __init__(
        self,
        core: TrainingCore,
        config: LearnerConfig,
        *,
        temperature: float,
        replay: RouteReplay | None,
        step: int,
        share_prefixes: bool,
    ) -> None:
        self._core, self._config = core, config
        self._model, self._group, self._device = core.model, core.group, core.device
        self._temperature, self._replay, self._step, self._share_prefixes = temperature, replay, step, share_prefixes

    def pack(self, samples: Sequence[Sample], *, replayed: bool = True) -> PackedSamples:
        """Distribute samples over forward passes, and decide whether the passes share prefixes.

        `replayed`: whether the passes will replay routes."""
        lengths, cost = [num_forwarded(sample) for sample in samples], Cost.for_model(self._model.config)
        found = prefix_order(samples, lengths, self._replay if replayed else None)
        budget, shares = self._config.budget_tokens, self._config.shares
        shared = self._share_prefixes and found.num_unique < (1 - LEAST_SHARED) * sum(lengths)
        if shared:
            rows = pack_prefixes(found, shares=shares, budget_tokens=budget, cost=cost)
        else:
            rows = pack(lengths, shares=shares, budget_tokens=budget, cost=cost)
        return PackedSamples(samples, rows, shared, sum(lengths), found.num_unique)

    def flatten(self, samples: Sequence[Sample], packed: PackedSamples) -> FlatBatch:
        """Return this rank's part of the tokens of one forward pass, on its device."""
        with self._group.propagate_errors("samples"):
            flat = flatten_samples(samples, self._replay, share_prefixes=packed.shared)
            check_sampled(samples, flat, step=self._step + 1)
        return self._group.local_tokens(flat).to(self._device)

    def run(self, rows: FlatBatch, hook: ForwardHook = no_hook) -> Forward:
        """Run the forward pass of these tokens. `hook`: called at each named tensor (`models.hooks`)."""
        plausible = self._config.replay_plausible
        return self._core.forward(
            rows, routes_NLK=rows.routes_NLK, plausible=plausible, counts_N=rows.counts_N, hook=hook
        )

    def logprobs(self, logits_RV: torch.Tensor, rows: FlatBatch) -> torch.Tensor:
        """Return the log-probability of every token of the vocabulary, at the temperature of each row, [R, V]."""
        return self._model.operators.log_softmax(logits_RV, rows.temperature(self._temperature))

    def check_logits(self, done: Forward, samples: Sequence[Sample], rows: FlatBatch) -> None:
        """Check that the logits of a forward pass of these samples are finite. Raises `NotFinite`."""
        again = functools.partial(self.run, rows) if self._group.size == 1 else None
        place = functools.partial(describe_token, samples, rows)
        check_logits(done.logits, again, rows.rows_R, step=self._step + 1, place=place)

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[F32]:
        """Return the log-probability of each token with loss under the live weights, [S] per sample, on every rank.

        No routes are replayed, since engines recorded none for contexts with hints."""
        group, packed, found = self._group, self.pack(samples, replayed=False), list[_Scores]()
        for row in packed.rows:
            for share in group.own_shares(len(row)):
                some = [samples[i] for i in row[share]]
                with group.propagate_errors("hints"):
                    flat = flatten_samples(some, share_prefixes=packed.shared)
                rows = group.local_tokens(flat).to(self._device)
                with group.collective("hints"):
                    done = self.run(rows)
                with group.propagate_errors("hints"):
                    self.check_logits(done, some, rows)
                    logprobs_R = self.logprobs(done.logits, rows).gather(1, rows.targets_R[:, None])[:, 0]
                found.append(_Scores(row[share], rows.places_in(flat).tolist(), logprobs_R.tolist()))
                progress.tick()
        counts = [int(sample.path.mask.sum()) for sample in samples]
        scores = [np.zeros(count, np.float32) for count in counts]
        for one in [one for rank in group.all_gather(found) for one in rank if one.samples]:
            whole = np.concatenate([scores[i] for i in one.samples])
            whole[one.rows] = one.logprobs
            parts = np.split(whole, np.cumsum([counts[i] for i in one.samples[:-1]]))
            for i, part in zip(one.samples, parts, strict=True):
                scores[i] = part
        return scores

    @torch.no_grad()
    def log_ratios(self, packed: PackedSamples, reference: Logprobs) -> dict[str, float]:
        """Return log π − log π_ref of each rollout, in nats: the sum over its tokens with loss, on all ranks.

        `reference` computes log π_ref of each sampled token, [R]. The sums are float64, and do not depend on how
        samples are distributed over forward passes and ranks."""
        own = list[tuple[str, float]]()
        for row in packed.rows:
            for share in self._group.own_shares(len(row)):
                samples = [packed.samples[i] for i in row[share]]
                rows = self.flatten(samples, packed)
                with self._group.collective("forward pass"):
                    done = self.run(rows)
                with self._group.propagate_errors("forward pass"):
                    self.check_logits(done, samples, rows)
                    logprobs_R = self.logprobs(done.logits, rows).gather(1, rows.targets_R[:, None])[:, 0]
                    log_ratio_R = (logprobs_R - reference(rows)).double().cpu()  # GPUs add in any order
                    per_sample = log_ratio_R.new_zeros(len(samples)).index_add_(0, rows.sample_R.cpu(), log_ratio_R)
                own += zip((sample.rollout_id for sample in samples), per_sample.tolist(), strict=True)
                progress.tick()
        parts: dict[str, list[float]] = {}
        for rollout_id, part in (one for rank in self._group.all_gather(own) for one in rank):
            parts.setdefault(rollout_id, []).append(part)
        return {rollout_id: math.fsum(of) for rollout_id, of in parts.items()}

    @torch.no_grad()
    def unreplayed_log_ratios(self, batch: Batch) -> list[torch.Tensor]:
        """Return log-ratios of a few tokens, without replay: one sample in `UNREPLAYED_EVERY`, others each step.

        It takes about a third of the time of training on these samples, about 0.5 % of a step."""
        few = batch.samples[batch.step % UNREPLAYED_EVERY :: UNREPLAYED_EVERY] or batch.samples[:1]
        found = []
        for samples in microbatches(few, budget_tokens=self._config.budget_tokens):
            rows = self._group.local_tokens(flatten_samples(samples)).to(self._device)
            logprobs_RV = self.logprobs(self.run(rows).logits, rows)
            found.append(logprobs_RV.gather(1, rows.targets_R[:, None])[:, 0] - rows.sampler_logprobs_R)
        return [one.cpu() for one in found]
