"""Losses and estimators: pure functions of tensors, each with its source. No model, no optimiser, no state.

Shapes: R rows, one a sampled token; V vocabulary. Log-probabilities are in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class SampledTokens:
    """What a policy loss is computed of: one row per sampled token of one forward pass, in the order of the sequences.
    Only `logprobs_R` has a gradient. A batch is several forward passes, whose losses are added.
    """

    logprobs_R: torch.Tensor  # float32, of the learner
    sampler_logprobs_R: torch.Tensor  # float32, of the engine that sampled the token
    advantages_R: torch.Tensor  # float32
    sequence_R: torch.Tensor  # int64, from 0: the sequence of each token. With learner.context_parallel, a part of it
    normaliser: float  # what the summed loss is divided by: the number of sampled tokens in the whole batch


@dataclass(frozen=True)
class PolicyLoss:
    """`loss` is a scalar to differentiate; the others are detached."""

    loss: torch.Tensor
    ratio_R: torch.Tensor  # trainer's probability over sampler's
    clipped_R: torch.Tensor  # bool: the ratio lies outside the range that the loss takes as it is


class PolicyLossFunction(Protocol):
    """The loss of sampled tokens. A plug-in of kind "policy loss" is one."""

    def __call__(self, tokens: SampledTokens) -> PolicyLoss: ...


def ppo_loss(
    logprobs_R: torch.Tensor,
    sampler_logprobs_R: torch.Tensor,
    advantages_R: torch.Tensor,
    *,
    normaliser: float,
    clip_low: float = 0.8,
    clip_high: float = 1.28,
    cap: float = 3.0,
) -> PolicyLoss:
    """PPO's clipped surrogate a token (arXiv 1707.06347, eq. 7) with a higher upper clip (DAPO, arXiv 2503.14476),
    summed over tokens and divided by a constant (Dr. GRPO, arXiv 2503.20783): no length normalisation.

    The ratio is taken against the version that sampled the token, so a stale token is corrected by it; one whose
    ratio has left the range on the side that its advantage pulls to teaches nothing. The clip alone leaves a token of
    negative advantage whose ratio is high without a bound: beyond `cap`, at least `clip_high`, it teaches nothing
    either (dual clip, arXiv 1912.09729, eq. 5). So no token weighs more than `cap`, and no ratio overflows.
    """
    log_ratio = logprobs_R - sampler_logprobs_R
    ratio = log_ratio.clamp(max=math.log(cap)).exp()
    gain = torch.minimum(ratio * advantages_R, ratio.clamp(clip_low, clip_high) * advantages_R)
    seen = log_ratio.detach().exp()
    return PolicyLoss(loss=-gain.sum() / normaliser, ratio_R=seen, clipped_R=(seen < clip_low) | (seen > clip_high))


def cispo_loss(
    logprobs_R: torch.Tensor,
    sampler_logprobs_R: torch.Tensor,
    advantages_R: torch.Tensor,
    *,
    normaliser: float,
    cap: float = 2.0,
) -> PolicyLoss:
    """CISPO (arXiv 2506.13585, eq. 4, without a lower bound, as there): the policy gradient of every token, weighted
    by its ratio, which is cut at `cap` and not differentiated. The same normaliser as PPO's.

    On-policy it is PPO's gradient; a stale token is weighted by its ratio and never silenced by it.
    """
    now = logprobs_R.detach()
    ratio = (now - sampler_logprobs_R).exp()
    gain = ratio.clamp(max=cap) * advantages_R * (logprobs_R - now).exp()  # by 1, whose gradient is the logprob's
    return PolicyLoss(loss=-gain.sum() / normaliser, ratio_R=ratio, clipped_R=ratio > cap)


def k1(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """KL(sampler ‖ trainer) of sampled tokens, unbiased, may be negative: −log r (Schulman, "Approximating KL
    divergence", 2020). As a loss its gradient is zero in expectation on-policy: put it into the reward."""
    return -log_ratio_R


def k2(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """Half of (log r)² (ibid.): biased as an estimate, and right as a loss. On-policy its gradient is in expectation
    that of the divergence, token by token; that of k1 in the reward, of the whole sequence's."""
    return log_ratio_R.square() / 2


def k2_loss(
    logprobs_R: torch.Tensor, reference_logprobs_R: torch.Tensor, weight_R: torch.Tensor, *, normaliser: float
) -> torch.Tensor:
    """KL(policy ‖ reference) as a loss, a scalar: the sum of each token's k2. `weight_R` (detached) is what a token
    weighs whose sampler was another policy: its ratio, which the caller bounds."""
    return (weight_R * k2(logprobs_R - reference_logprobs_R)).sum() / normaliser


def k3(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """The same as k1, unbiased and never negative: r − 1 − log r (ibid.). As a loss its gradient is that of the other
    direction, KL(reference ‖ policy), in expectation on-policy."""
    return torch.expm1(log_ratio_R) - log_ratio_R


def entropy(logprobs_RV: torch.Tensor) -> torch.Tensor:
    """Entropy of each row's distribution, [R]; a probability of zero counts nothing."""
    entropy_RV: torch.Tensor = torch.special.entr(logprobs_RV.exp())
    return entropy_RV.sum(-1)
