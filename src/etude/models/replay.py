"""Router replay: use recorded experts in place of the router's own choice.

A sampler and a learner with slightly different arithmetic choose different experts for some tokens, and one other
expert changes a token's probability more than all rounding does. So the learner uses the experts that the sampler
recorded (R3, arXiv 2510.11370). Gates are computed from live scores, so gradients reach the router.

Only plausible records are used: an expert whose live score is far below the scores of the live choice is replaced. Then
the weights have moved on, or the record belongs to something else.

Works with any router with positive scores. Shapes: N tokens, E experts, K experts per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RecordedRoutes:
    """The experts that a sampler recorded for one layer, to be used again.

    `routes_NK`: uint8 or uint16; the dtype's largest value marks a missing expert. `plausible`: a recorded expert is
    used only if its score now is at least this share of the lowest score in the router's own choice.

    >>> recorded = RecordedRoutes(torch.tensor([[1, 3], [1, 0], [255, 255]], dtype=torch.uint8), plausible=0.5)
    >>> scores = torch.tensor([[.4, .3, .2, .1]] * 3)
    >>> recorded.apply(torch.tensor([[0, 1]] * 3), scores).tolist()  # expert 3 has less than half of expert 1's score
    [[1, 0], [1, 0], [0, 1]]
    """

    routes_NK: torch.Tensor
    plausible: float = 0.0

    @torch.no_grad()
    def apply(self, live_NK: torch.Tensor, scores_NE: torch.Tensor) -> torch.Tensor:
        """Return the experts to use, int64 [N, K], distinct for each token.

        Recorded experts keep their places. Missing and implausible ones are replaced by the best experts of `live_NK`
        (the router's own choice, best first) that the token does not use yet. `scores_NE`: the positive scores from
        which gates are computed."""
        recorded = self.routes_NK.long()
        refused = recorded == torch.iinfo(self.routes_NK.dtype).max
        if self.plausible:
            least = self.plausible * scores_NE.gather(-1, live_NK).amin(-1, keepdim=True)
            refused |= scores_NE.gather(-1, recorded.masked_fill(refused, 0)) < least
        if refused.device.type == "cpu" and not bool(refused.any()):  # on a GPU this would synchronise
            return recorded
        return _refilled(recorded, refused, live_NK)


def _refilled(recorded_NK: torch.Tensor, refused_NK: torch.Tensor, live_NK: torch.Tensor) -> torch.Tensor:
    """Fill the refused slots, in order, with the best live experts that no other slot has."""
    kept_NKK = (recorded_NK[:, :, None] == live_NK[:, None, :]) & ~refused_NK[:, :, None]
    free_first = kept_NKK.any(1).to(torch.uint8).argsort(stable=True, dim=-1)
    place_NK = (refused_NK.cumsum(-1) - 1).clamp_min(0)
    return torch.where(refused_NK, live_NK.gather(-1, free_first).gather(-1, place_NK), recorded_NK)
