"""Policy losses, KL estimators and entropy: pure functions of tensors, each with its source.

Shapes: R rows, one per sampled token; V vocabulary size. Log-probabilities are in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class SampledTokens:
    """The input of a policy loss: one row per sampled token of one forward pass, in the order of the sequences.

    Only `logprobs_R` carries a gradient. A batch may take several forward passes; their losses are added.
    """

    logprobs_R: torch.Tensor  # float32, computed by the learner
    sampler_logprobs_R: torch.Tensor  # float32, computed by the engine that sampled the token
    advantages_R: torch.Tensor  # float32
    sequence_R: (
        torch.Tensor
    )  # int64, from 0: index of each token's sequence (with context parallelism, this rank's part)
    normaliser: float  # divisor of the summed loss: the number of sampled tokens in the full batch


@dataclass(frozen=True)
class PolicyLoss:
    """The result of a policy loss. `loss` is a scalar to differentiate; the other tensors are detached."""

    loss: torch.Tensor
    ratio_R: torch.Tensor  # learner probability over sampler probability
    clipped_R: torch.Tensor  # bool: the ratio is outside the range in which the loss does not clip it


class PolicyLossFunction(Protocol):
    """The loss of the sampled tokens of one forward pass. A plug-in of kind "loss" is such a function."""

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
    """PPO's clipped surrogate per token (arXiv 1707.06347, eq. 7), with a higher upper clip (DAPO, arXiv 2503.14476)
    and dual clip (arXiv 1912.09729, eq. 5).

    The sum over tokens is divided by the constant `normaliser`, without length normalisation (Dr. GRPO, arXiv
    2503.20783). The importance ratio is learner probability over sampler probability, so stale tokens are corrected. A
    token whose ratio has left [`clip_low`, `clip_high`] in the direction of its advantage has no gradient. Clipping
    alone does not bound tokens with a negative advantage and a high ratio: above `cap` (at least `clip_high`) they have
    no gradient either. So no token weighs more than `cap`, and no ratio overflows.
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
    """CISPO (arXiv 2506.13585, eq. 4, without a lower bound, as in the paper): policy gradient with truncated
    importance weights.

    Each token's gradient is weighted by its ratio, which is truncated at `cap` and not differentiated. On-policy this
    is PPO's gradient. Stale tokens always keep a gradient. The normaliser is the same as PPO's.
    """
    now = logprobs_R.detach()
    ratio = (now - sampler_logprobs_R).exp()
    gain = ratio.clamp(max=cap) * advantages_R * (logprobs_R - now).exp()  # times 1, with the gradient of the logprob
    return PolicyLoss(loss=-gain.sum() / normaliser, ratio_R=ratio, clipped_R=ratio > cap)


def k1(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """KL(sampler ‖ learner) per sampled token, k1 estimator: −log r. Unbiased; may be negative.

    `log_ratio_R`: learner log-probability minus sampler log-probability. As a loss, its gradient is zero in expectation
    on-policy, so put it into the reward. Source: Schulman, "Approximating KL divergence", 2020.
    """
    return -log_ratio_R


def k2(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """KL(sampler ‖ learner) per sampled token, k2 estimator: (log r)² / 2. Biased as an estimate, correct as a loss.

    On-policy, its expected gradient is that of the KL of each token. The gradient of k1 in the reward is that of the KL
    of the whole sequence. Source: as k1.
    """
    return log_ratio_R.square() / 2


def k2_loss(
    logprobs_R: torch.Tensor, reference_logprobs_R: torch.Tensor, weight_R: torch.Tensor, *, normaliser: float
) -> torch.Tensor:
    """KL(policy ‖ reference) as a loss: the sum of the tokens' k2, divided by `normaliser`. Returns a scalar.

    `weight_R` (detached): the importance weight of each token, for tokens sampled by an older policy. The caller bounds
    it.
    """
    return (weight_R * k2(logprobs_R - reference_logprobs_R)).sum() / normaliser


def k3(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """KL(sampler ‖ learner) per sampled token, k3 estimator: r − 1 − log r. Unbiased and never negative.

    As a loss, its expected gradient on-policy is that of the reverse direction, KL(reference ‖ policy). Source: as k1.
    """
    return torch.expm1(log_ratio_R) - log_ratio_R


def entropy(logprobs_RV: torch.Tensor) -> torch.Tensor:
    """Entropy of each row's distribution in nats, [R]. A probability of zero contributes nothing."""
    entropy_RV: torch.Tensor = torch.special.entr(logprobs_RV.exp())
    return entropy_RV.sum(-1)
