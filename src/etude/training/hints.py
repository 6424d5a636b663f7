"""Adds credit from hints to advantages: dense credit for the tokens of a faulty turn, by on-policy self-distillation.

A hint is a text that would have helped the policy in a turn. The live weights score the sampled tokens of the turn
twice, with the hint in their context and without it. The advantage of each token gets
``weight * (log p(token | context with the hint) - log p(token | context))`` added. So the policy learns to act without
the hint as it would with it. The expected gradient is that of minus the reverse KL divergence
KL(policy || policy with the hint), per token. Neither score has a gradient, and nothing new is sampled.

The difference of log-probabilities has no bound: one token that the hint makes nearly impossible could outweigh a
batch. So it is clipped to ± ln V nats, for a vocabulary of V tokens. A token that falls further is less likely with the
hint than in a uniform draw, even if it was certain without it: the difference says no more than that the token is
wrong. For V from 32,000 to 250,000 the bound is 10.4 to 12.4; verl's recipes of on-policy distillation clip at 10.

Source: Agarwal et al. 2024, "On-Policy Distillation of Language Models" (arXiv 2306.13649), with the policy
as its own teacher.

Shapes: S tokens with loss of a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from etude.records import Sample
from etude.records.rollout import UNKNOWN, Path
from etude.records.sample import PlacedHint, StepReport
from etude.records.wire import F32, I32, Bools

Score = Callable[[Sequence[Sample]], list[F32]]
"""Computes for each sample the log-probabilities of its tokens with loss under the live weights, [S], in nats."""


@dataclass(frozen=True)
class HintCredit:
    """The result of `with_hint_credit`: samples whose advantages include the effect of their hints, and its metrics.

    `samples`: the samples with these advantages; without their hints, which have been used. `kl`, `clip_share`:
    `hint_kl` and `hint_clip_share` of `StepReport`; None if there were no hints."""

    samples: list[Sample]
    kl: float | None = None
    clip_share: float | None = None

    def added_to(self, report: StepReport) -> StepReport:
        """Return a copy of `report` with the metrics of the hints added."""
        return msgspec.structs.replace(report, hint_kl=self.kl, hint_clip_share=self.clip_share)


def with_hint_credit(samples: Sequence[Sample], score: Score, *, bound: float) -> HintCredit:
    """Add to each token's advantage its hint's weight times the change of the token's log-probability by the hint.

    `score`: returns the log-probabilities of the samples' tokens; called at most once. `bound`: larger changes are
    clipped to this value, in nats. Samples without hints are returned unchanged."""
    plain = {i: _without(sample) for i, sample in enumerate(samples) if sample.hints}
    if not plain:
        return HintCredit(list(samples))
    hinted = [(i, hint) for i in plain for hint in samples[i].hints]
    found = score([*plain.values(), *(_with(samples[i], hint) for i, hint in hinted)])
    before = dict(zip(plain, found, strict=False))
    credit = {i: np.zeros(len(samples[i].advantages)) for i in plain}
    gains = list[float]()
    for (i, hint), after in zip(hinted, found[len(plain) :], strict=True):
        own = _within(samples[i], hint)
        without = before[i][own[plain[i].path.mask[samples[i].path.mask]]]
        gain = after.astype(np.float64) - without
        credit[i][own] += hint.weight * gain.clip(-bound, bound)
        gains += gain.tolist()
    credited = [
        msgspec.structs.replace(one, advantages=(one.advantages + credit[i]).astype(np.float32), hints=())
        if i in plain
        else one
        for i, one in enumerate(samples)
    ]
    clipped = sum(abs(gain) > bound for gain in gains)
    return HintCredit(credited, kl=-math.fsum(gains) / len(gains), clip_share=clipped / len(gains))


def _within(sample: Sample, hint: PlacedHint) -> Bools:
    """Return which of the tokens with loss are in the turn of a hint, [S]."""
    at = np.flatnonzero(sample.path.mask)
    return (at >= hint.at) & (at < hint.stop)


def _without(sample: Sample) -> Sample:
    """Return a sample to score without hints, with loss only on the tokens of turns with a hint."""
    of_hints = np.logical_or.reduce([_within(sample, hint) for hint in sample.hints])
    mask = sample.path.mask.copy()
    mask[mask] = of_hints
    return _scored(sample, sample.path.token_ids, mask, of_hints)


def _with(sample: Sample, hint: PlacedHint) -> Sample:
    """Return a sample to score with a hint in its context, with loss only on the tokens of the hint's turn."""
    path, at = sample.path, hint.at
    token_ids = np.concatenate([path.token_ids[:at], hint.token_ids, path.token_ids[at : hint.stop]])
    mask = np.concatenate([np.zeros(at + len(hint.token_ids), bool), path.mask[at : hint.stop]])
    return _scored(sample, token_ids, mask, _within(sample, hint))


def _scored(sample: Sample, token_ids: I32, mask: Bools, own: Bools) -> Sample:
    """Return a sample that is only scored. `own`: which tokens with loss of `sample` it has, [S]."""
    path = Path(
        token_ids=token_ids.astype(np.int32),
        mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        steps=np.full(len(mask), UNKNOWN, np.int32),
        kv_epochs=np.zeros(len(mask), np.int32),
        routes=np.zeros((0, 0, 0), np.uint8),
    )
    temperatures = None if sample.temperatures is None else sample.temperatures[own]
    return Sample.uniform(sample.rollout_id, path, 0.0, temperatures)
