"""A correction: importance weights that approach a limit smoothly instead of being cut."""

from dataclasses import dataclass

import torch

from etude.training.corrections import Corrected


@dataclass(frozen=True)
class Saturating:
    """ρ (1 + C) / (ρ + C): 1 if sampler and learner agree, and always below 1 + C."""

    limit: float = 2.0  # C

    def __call__(self, log_ratio_R: torch.Tensor, sequence_R: torch.Tensor) -> Corrected:
        ratio_R = log_ratio_R.exp()
        return Corrected(weight_R=ratio_R * (1 + self.limit) / (ratio_R + self.limit), uncut_R=ratio_R)
