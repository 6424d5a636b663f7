"""A policy loss: GSPO (arXiv 2507.18071), which uses the ratio of the complete sequence."""

from dataclasses import dataclass

import torch

from etude.training.losses import PolicyLoss, SampledTokens


@dataclass(frozen=True)
class Gspo:
    """Clip the geometric mean of the ratios of a sequence; every token of the sequence has the same weight."""

    clip_low: float = 3e-4  # below 1
    clip_high: float = 4e-4  # above 1

    def __call__(self, tokens: SampledTokens) -> PolicyLoss:
        log_ratio_R = tokens.logprobs_R - tokens.sampler_logprobs_R
        sums = (
            torch.zeros(int(tokens.sequence_R.max()) + 1).to(log_ratio_R).index_add(0, tokens.sequence_R, log_ratio_R)
        )
        mean = (sums / torch.bincount(tokens.sequence_R)).clamp(max=10.0)
        ratio_R = mean.exp()[tokens.sequence_R]
        cut_R = ratio_R.clamp(1 - self.clip_low, 1 + self.clip_high)
        gain_R = torch.minimum(ratio_R * tokens.advantages_R, cut_R * tokens.advantages_R)
        return PolicyLoss(
            loss=-gain_R.sum() / tokens.normaliser,
            ratio_R=log_ratio_R.detach().exp(),
            clipped_R=(ratio_R != cut_R).detach(),
        )
