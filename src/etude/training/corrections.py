"""Importance weights for sampler–learner mismatch, truncated or masked to bound their variance.

Use them with engines that are not exact. Where engine and learner agree to the bit, nothing is corrected. ρ is the
learner's probability of a sampled token divided by the sampler's. Weighting a token by ρ gives the gradient of the
learner's own policy. Over T tokens the ratios multiply, and the variance grows with them. So weights are truncated or
masked, which adds a bias:

| function | a token weighs | source |
| --- | --- | --- |
| `truncated` | min(ρ, C) | TIS: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025; Espeholt et al., arXiv 1802.01561 |
| `truncated_sequences` | min(Π ρ, C), the same for each token of its sequence | Liu, Li et al., "When speed kills stability", 2025 |
| `masked` | ρ where low ≤ ρ ≤ high, else 0 | IcePop: arXiv 2510.18855 |
| `masked_sequences` | min(ρ, C) where the geometric mean of ρ over its sequence is in [low, high], and no ρ of it is below the veto; else 0 | Liu, Li et al. 2025 (geometric mask, veto); the mean is GSPO's, arXiv 2507.18071 |

A ratio has two causes. *Mismatch*: the sampler computes other numbers than the learner with the same weights.
*Staleness*: the learner has updated its weights since. `decoupled` separates the two where both are known (arXiv
2110.00641, 2505.24298), so that PPO's clip measures how far the policy moved, not the arithmetic of an engine.

Shapes: R rows, one per sampled token. Log-ratios are in nats and detached; all results are detached.
"""  # noqa: E501  a table

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from etude.training.config import CorrectionKind

VETO = 1e-4
"""A sequence with a token whose ρ is below this value is masked: the sampler made an error there."""
TOKEN_CAP = 2.0
"""Largest weight of a token in a sequence that is kept or masked as a whole: TIS's C, as published."""


@dataclass(frozen=True)
class Corrected:
    """Importance weights [R] of sampled tokens, with and without truncation or masking.

    `weight_R`: the weights to use; never negative, and 0 where a token is masked. `uncut_R`: the same weights without
    truncation or masking, which are unbiased."""

    weight_R: torch.Tensor
    uncut_R: torch.Tensor


class Correction(Protocol):
    """Computes importance weights of sampled tokens. A plug-in of kind "correction" is such a function."""

    def __call__(self, log_ratio_R: torch.Tensor, sequence_R: torch.Tensor) -> Corrected:
        """Compute the weights of the tokens of one forward pass.

        `log_ratio_R` (float32, nats): learner log-probability minus sampler log-probability. `sequence_R` (int64): the
        index of each token's sequence, from 0."""


def correct(
    kind: CorrectionKind, log_ratio_R: torch.Tensor, sequence_R: torch.Tensor, *, low: float, high: float
) -> Corrected:
    """Apply a built-in correction. `NONE` returns the ratios unchanged.

    `sequence_R` (int64): the index of each row's sequence. `low`, `high`: the bounds of the masking corrections. `high`
    is also the cap of the truncating corrections, which do not use `low`."""
    match kind:
        case CorrectionKind.NONE:
            ratio_R = log_ratio_R.exp()
            return Corrected(ratio_R, ratio_R)
        case CorrectionKind.TRUNCATED:
            return truncated(log_ratio_R, cap=high)
        case CorrectionKind.TRUNCATED_SEQUENCES:
            return truncated_sequences(log_ratio_R, sequence_R, cap=high)
        case CorrectionKind.MASKED:
            return masked(log_ratio_R, low=low, high=high)
        case CorrectionKind.MASKED_SEQUENCES:
            return masked_sequences(log_ratio_R, sequence_R, low=low, high=high)


def truncated(log_ratio_R: torch.Tensor, *, cap: float) -> Corrected:
    """Compute truncated importance weights: min(ρ, cap).

    The bias is the probability that truncation removes: Σ (p − cap·q)⁺ over the vocabulary, with p by the learner and q
    by the sampler.

    >>> truncated(torch.tensor([0.5, 1.0, 8.0]).log(), cap=2.0).weight_R
    tensor([0.5000, 1.0000, 2.0000])
    """
    ratio_R = log_ratio_R.exp()
    return Corrected(ratio_R.clamp(max=cap), ratio_R)


def truncated_sequences(log_ratio_R: torch.Tensor, sequence_R: torch.Tensor, *, cap: float) -> Corrected:
    """Compute importance weights of sequences: min(Π ρ, cap) for each token of a sequence.

    They are unbiased for rewards of whole sequences where nothing is truncated; token-level weights never are."""
    total, _ = _sums(log_ratio_R, sequence_R)
    uncut_R = total[sequence_R].exp()
    return Corrected(uncut_R.clamp(max=cap), uncut_R)


def masked(log_ratio_R: torch.Tensor, *, low: float, high: float) -> Corrected:
    """Mask tokens (IcePop): the weight is ρ where low ≤ ρ ≤ high, else 0.

    >>> masked(torch.tensor([0.4, 1.0, 8.0]).log(), low=0.5, high=5.0).weight_R
    tensor([0., 1., 0.])
    """
    ratio_R = log_ratio_R.exp()
    return Corrected(_where((ratio_R >= low) & (ratio_R <= high), ratio_R), ratio_R)


def masked_sequences(
    log_ratio_R: torch.Tensor,
    sequence_R: torch.Tensor,
    *,
    low: float,
    high: float,
    veto: float = VETO,
    cap: float = TOKEN_CAP,
) -> Corrected:
    """Mask sequences: the weight is min(ρ, cap) in sequences that pass two tests, else 0.

    A sequence passes when the geometric mean of its ρ is within [low, high] and each token has ρ ≥ `veto`. In a long
    sequence, single tokens may differ much from the mean, so `cap` bounds their weights.

    The logarithm of the mean is about minus the KL per token and does not depend on the length, so long sequences are
    not masked more often. The bounds must be close to 1: a mean of 0.99 is a KL of 0.01 nats per token."""
    total, number = _sums(log_ratio_R, sequence_R)
    mean = (total / number.clamp(min=1)).exp()
    worst = torch.zeros_like(total).scatter_reduce(0, sequence_R, log_ratio_R, "amin", include_self=False).exp()
    kept = (mean >= low) & (mean <= high) & (worst >= veto)
    ratio_R = log_ratio_R.exp()
    return Corrected(_where(kept[sequence_R], ratio_R.clamp(max=cap)), ratio_R)


def decoupled(
    weight_R: torch.Tensor, logprobs_R: torch.Tensor, sampler_logprobs_R: torch.Tensor, fresh_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split importance weights into engine mismatch and staleness, which a loss treats differently.

    Mismatch: the sampler computes other numbers with the same weights. Staleness: the weights have changed since.
    Returns the anchor log-probabilities, from which the loss takes its ratio, and the factor of the advantages, both
    [R]. Then each token's gradient is weighted by `weight_R`, and PPO's clip does not see the mismatch.

    - `weight_R`: the corrected importance weights.
    - `logprobs_R`, `sampler_logprobs_R`: log-probabilities by learner and sampler.
    - `fresh_R`: bool, tokens that the live weights sampled.

    For fresh tokens the whole ratio is mismatch: the ratio in the loss is 1, and the factor is the weight. For tokens
    of older versions mismatch and staleness cannot be told apart, since those weights are gone: the ratio stays in the
    loss, and the factor is the weight divided by the ratio."""
    live_R = logprobs_R.detach()
    whole_R = fresh_R | (weight_R == 0)  # the ratio of a masked token may be infinite: do not use it
    anchor_R = torch.where(whole_R, live_R, sampler_logprobs_R)
    return anchor_R, weight_R * (anchor_R - live_R).exp()


def effective_share(weight_R: torch.Tensor) -> float:
    """Return the effective sample size over the number of tokens: (Σ w)² / (R Σ w²) (Kong, 1992).

    >>> effective_share(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    0.5
    """
    squares = float(weight_R.double().square().sum())
    return float(weight_R.double().sum()) ** 2 / (len(weight_R) * squares) if squares else 0.0


def _where(kept_R: torch.Tensor, ratio_R: torch.Tensor) -> torch.Tensor:
    return torch.where(kept_R, ratio_R, 0.0)  # not a product: a ratio may be infinite


def _sums(log_ratio_R: torch.Tensor, sequence_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sequences = int(sequence_R.max()) + 1 if len(sequence_R) else 0
    total = log_ratio_R.new_zeros(sequences).index_add(0, sequence_R, log_ratio_R)
    return total, torch.bincount(sequence_R, minlength=sequences)
