"""What a token weighs whose sampler computed another probability than the learner does: importance weights, and how
they are kept from exploding. Pure functions; for engines that cannot be exact, and off where parity holds.

ρ is the learner's probability of a sampled token over its sampler's. Weighing a token by ρ makes the gradient that of
the learner's own policy, token by token; over T tokens the ratios multiply, and with them the variance. So weights are
cut, at the price of a bias:

| function | a token weighs | source |
| --- | --- | --- |
| `truncated` | min(ρ, C) | TIS: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025; Espeholt et al., arXiv 1802.01561 |
| `truncated_sequences` | min(Π ρ, C), the same for each token of its sequence | Liu, Li et al., "When speed kills stability", 2025 |
| `masked` | ρ where low ≤ ρ ≤ high, else 0 | IcePop: arXiv 2510.18855 |
| `masked_sequences` | min(ρ, C) where the geometric mean over its sequence is within, and no token of it is below the veto; else 0 | ibid. 2025 (geometric mask, veto); the mean is GSPO's, arXiv 2507.18071 |

A ratio has two causes. The *mismatch*: the sampler computes otherwise than the learner, with the same weights. The
*staleness*: the learner has changed its weights since. `decoupled` keeps them apart where both are known (arXiv 2110.00641,
2505.24298), so that PPO's clip judges how far the policy moved, and never the arithmetic of an engine.

Shapes: R rows, one a sampled token. Log-ratios are in nats, detached; everything returned is, too.
"""  # noqa: E501  a table

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from etude.training.config import CorrectionKind

VETO = 1e-4
"""A token that the learner finds so much less likely than its sampler did is the sampler's mistake."""
TOKEN_CAP = 2.0
"""The most that one token weighs in a sequence that is kept or dropped as a whole: TIS's C, as published."""


@dataclass(frozen=True)
class Corrected:
    """Weights of tokens in place of their ratios."""

    weight_R: torch.Tensor  # never negative; 0 where the token is masked
    uncut_R: torch.Tensor  # the unbiased weight that was cut


class Correction(Protocol):
    """Weights of sampled tokens. A plug-in of kind "correction" is one."""

    def __call__(self, log_ratio_R: torch.Tensor, sequence_R: torch.Tensor) -> Corrected:
        """`log_ratio_R` (float32, nats): the learner's log-probability minus the sampler's. `sequence_R` (int64): the
        sequence of each token, from 0."""
        ...


def correct(
    kind: CorrectionKind, log_ratio_R: torch.Tensor, sequence_R: torch.Tensor, *, low: float, high: float
) -> Corrected:
    """The correction of that name. `sequence_R` (int64) is the sequence of each row; `high` is the cap of those that
    truncate, which know no `low`. `NONE` leaves the ratio as it is."""
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
    """min(ρ, cap). Its bias is what the sampler gives too little of: Σ (p − cap·q)⁺ over the vocabulary.

    >>> truncated(torch.tensor([0.5, 1.0, 8.0]).log(), cap=2.0).weight_R
    tensor([0.5000, 1.0000, 2.0000])
    """
    ratio_R = log_ratio_R.exp()
    return Corrected(ratio_R.clamp(max=cap), ratio_R)


def truncated_sequences(log_ratio_R: torch.Tensor, sequence_R: torch.Tensor, *, cap: float) -> Corrected:
    """min(Π ρ, cap) for every token of a sequence: unbiased for a reward of whole sequences where nothing is cut,
    which no weight of single tokens is."""
    total, _ = _sums(log_ratio_R, sequence_R)
    uncut_R = total[sequence_R].exp()
    return Corrected(uncut_R.clamp(max=cap), uncut_R)


def masked(log_ratio_R: torch.Tensor, *, low: float, high: float) -> Corrected:
    """ρ within [low, high], else 0.

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
    """min(ρ, cap), in sequences whose geometric mean of ρ is within [low, high] and whose worst token has ρ ≥ `veto`;
    else 0. The mean of a long sequence says little about one token of it: without the cap that may weigh anything.

    The mean's logarithm tends to minus the divergence of a token however long the sequence is, so that long ones are
    not refused for being long. The bounds are tight for that reason: a mean of 0.99 is 0.01 nats a token.
    """
    total, number = _sums(log_ratio_R, sequence_R)
    mean = (total / number.clamp(min=1)).exp()
    worst = torch.zeros_like(total).scatter_reduce(0, sequence_R, log_ratio_R, "amin", include_self=False).exp()
    kept = (mean >= low) & (mean <= high) & (worst >= veto)
    ratio_R = log_ratio_R.exp()
    return Corrected(_where(kept[sequence_R], ratio_R.clamp(max=cap)), ratio_R)


def decoupled(
    weight_R: torch.Tensor, logprobs_R: torch.Tensor, sampler_logprobs_R: torch.Tensor, own_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a policy loss takes so that a token's gradient weighs `weight_R` and its clip sees no mismatch: the
    log-probabilities to take its ratio against, [R], and what to multiply the advantage with, [R].

    Where the live weights themselves sampled (`own_R`, bool), the whole ratio is mismatch: the loss's own is 1, and the
    weight stands beside it. Of an older version only the product is known, since its weights are gone: it stays with
    the loss, and what a correction cuts off it is the factor.
    """
    live_R = logprobs_R.detach()
    whole_R = own_R | (weight_R == 0)  # of a masked token not even the ratio counts: it may be infinite
    anchor_R = torch.where(whole_R, live_R, sampler_logprobs_R)
    return anchor_R, weight_R * (anchor_R - live_R).exp()


def effective_share(weight_R: torch.Tensor) -> float:
    """(Σ w)² / (R Σ w²): of the tokens there are, the share whose even weight would be as good (Kong, 1992).

    >>> effective_share(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    0.5
    """
    squares = float(weight_R.double().square().sum())
    return float(weight_R.double().sum()) ** 2 / (len(weight_R) * squares) if squares else 0.0


def _where(kept_R: torch.Tensor, ratio_R: torch.Tensor) -> torch.Tensor:
    return torch.where(kept_R, ratio_R, 0.0)  # no product: a ratio may be infinite


def _sums(log_ratio_R: torch.Tensor, sequence_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over each sequence, and how many rows it has."""
    sequences = int(sequence_R.max()) + 1 if len(sequence_R) else 0
    total = log_ratio_R.new_zeros(sequences).index_add(0, sequence_R, log_ratio_R)
    return total, torch.bincount(sequence_R, minlength=sequences)
