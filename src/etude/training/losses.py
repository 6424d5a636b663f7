"""Losses of texts and policies, KL estimators and entropy: pure functions of tensors, each with its source.

Shapes: R rows, one per sampled token; V vocabulary size. Log-probabilities are in nats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F


def text_loss(logits_RV: torch.Tensor, targets_R: torch.Tensor, *, normaliser: float) -> torch.Tensor:
    """Compute the loss of mid-training: the negative log-likelihood of the next tokens, in nats. Returns a scalar.

    `logits_RV`: float32, of the tokens whose next one has a loss. `normaliser`: the divisor of the sum, which is the
    number of tokens with a loss in the full batch."""
    return F.cross_entropy(logits_RV, targets_R, reduction="sum") / normaliser


@dataclass(frozen=True)
class SampledTokens:
    """The input of a policy loss: one row per sampled token of one forward pass, in the order of the sequences.

    - `logprobs_R`: float32, computed by the learner. Only these have a gradient.
    - `sampler_logprobs_R`: float32, computed by the engine that sampled the token.
    - `advantages_R`: float32.
    - `sequence_R`: int64, the index of each token's sequence from 0 (with context parallelism, this rank's part of it).
    - `normaliser`: the divisor of the summed loss, which is the number of sampled tokens in the full batch.

    A batch may take several forward passes; their losses are added."""

    logprobs_R: torch.Tensor
    sampler_logprobs_R: torch.Tensor
    advantages_R: torch.Tensor
    sequence_R: torch.Tensor
    normaliser: float


@dataclass(frozen=True)
class PolicyLoss:
    """The result of a policy loss.

    `loss`: a scalar to differentiate. `ratio_R`: learner probability over sampler probability, detached. `clipped_R`:
    bool, whether the ratio is in the range in which the loss clips it."""

    loss: torch.Tensor
    ratio_R: torch.Tensor
    clipped_R: torch.Tensor


class PolicyLossFunction(Protocol):
    """A function that returns the loss of the sampled tokens of one forward pass. A plug-in of kind "loss" is one."""

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
    """Compute PPO's clipped surrogate per token, with a higher upper clip and dual clip.

    Sources: arXiv 1707.06347, eq. 7; DAPO, arXiv 2503.14476; dual clip, arXiv 1912.09729, eq. 5. The sum over tokens is
    divided by the constant `normaliser`, without length normalisation (Dr. GRPO, arXiv 2503.20783). The importance
    ratio is learner probability over sampler probability, so stale tokens are corrected. A token whose ratio has left
    [`clip_low`, `clip_high`] in the direction of its advantage has no gradient. This does not bound tokens with a
    negative advantage and a high ratio, so above `cap` (at least `clip_high`) these have no gradient either. So no
    token has a weight above `cap`, and no ratio overflows."""
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
    """Compute CISPO: the policy gradient with truncated importance weights.

    Each token's gradient is weighted by its ratio, which is truncated at `cap` and not differentiated. On-policy this
    is PPO's gradient. Stale tokens always keep a gradient. The normaliser is the same as PPO's. Source: arXiv
    2506.13585, eq. 4, without a lower bound, as in the paper."""
    now = logprobs_R.detach()
    ratio = (now - sampler_logprobs_R).exp()
    gain = ratio.clamp(max=cap) * advantages_R * (logprobs_R - now).exp()  # times 1, with the gradient of the logprob
    return PolicyLoss(loss=-gain.sum() / normaliser, ratio_R=ratio, clipped_R=ratio > cap)


def k1(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """Estimate KL(sampler ‖ learner) per sampled token by k1: −log r. It is unbiased and may be negative.

    `log_ratio_R`: learner log-probability minus sampler log-probability. As a loss, its gradient is zero in expectation
    on-policy, so put it into the reward. Source: Schulman, "Approximating KL divergence", 2020."""
    return -log_ratio_R


def k2(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """Estimate KL(sampler ‖ learner) per sampled token by k2: (log r)² / 2.

    `log_ratio_R`: learner log-probability minus sampler log-probability. k2 is biased as an estimate, correct as a
    loss: on-policy, its expected gradient is that of the KL of each token. The gradient of k1 in the reward is that of
    the KL of the whole sequence. Source: Schulman, "Approximating KL divergence", 2020."""
    return log_ratio_R.square() / 2


def k2_loss(
    logprobs_R: torch.Tensor, reference_logprobs_R: torch.Tensor, weight_R: torch.Tensor, *, normaliser: float
) -> torch.Tensor:
    """Compute KL(policy ‖ reference) as a loss: the sum of the tokens' k2, divided by `normaliser`. Returns a scalar.

    `weight_R` (detached): the importance weight of each token, for tokens sampled by an older policy. The caller bounds
    it."""
    return (weight_R * k2(logprobs_R - reference_logprobs_R)).sum() / normaliser


def k3(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """Estimate KL(sampler ‖ learner) per sampled token by k3: r − 1 − log r. It is unbiased and never negative.

    `log_ratio_R`: learner log-probability minus sampler log-probability. As a loss, its expected gradient on-policy is
    that of the reverse direction, KL(reference ‖ policy). Source: Schulman, "Approximating KL divergence", 2020."""
    return torch.expm1(log_ratio_R) - log_ratio_R


def entropy(logprobs_RV: torch.Tensor) -> torch.Tensor:
    """Compute the entropy of each row's distribution in nats, [R]. A probability of zero contributes nothing."""
    entropy_RV: torch.Tensor = torch.special.entr(logprobs_RV.exp())
    return entropy_RV.sum(-1)
