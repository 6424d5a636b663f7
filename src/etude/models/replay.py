"""Recorded experts in the place of a router's own choice.

A sampler and a learner that compute a little differently choose other experts for some tokens, and one other expert
moves a token's probability more than all rounding does. So the learner takes the experts that the sampler recorded
(R3, arXiv 2510.11370); gates are computed from live scores, so that the router's gradient flows.

What was recorded is believed as far as it is plausible: an expert that the live router scores far under those it would
choose (weights have moved on, or the record is of something else) is replaced by the live choice.

Knows nothing of how scores come to be; any router whose scores are positive will do. Shapes: N tokens, L layers that
have a router, E experts, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RecordedRoutes:
    """One layer's recorded experts.

    >>> recorded = Recorded(torch.tensor([[1, 3], [1, 0], [255, 255]], dtype=torch.uint8), plausible=0.5)
    >>> scores = torch.tensor([[.4, .3, .2, .1]] * 3)
    >>> recorded.over(torch.tensor([[0, 1]] * 3), scores).tolist()  # expert 3 has less than half of expert 1's score
    [[1, 0], [1, 0], [0, 1]]
    """

    routes_NK: torch.Tensor  # uint8 or uint16; the dtype's largest value where none is known
    plausible: float = 0.0  # least score of a recorded expert, as a share of the smallest live chosen one's

    @torch.no_grad()
    def apply(self, live_NK: torch.Tensor, scores_NE: torch.Tensor) -> torch.Tensor:
        """The experts to use, int64 [N, K], all of a token's distinct: recorded ones stay in their slots; into the
        others go the best of `live_NK` (best first) that the token does not use yet. `scores_NE` is what gates are
        made of, positive."""
        recorded = self.routes_NK.long()
        refused = recorded == torch.iinfo(self.routes_NK.dtype).max
        if self.plausible:
            least = self.plausible * scores_NE.gather(-1, live_NK).amin(-1, keepdim=True)
            refused |= scores_NE.gather(-1, recorded.masked_fill(refused, 0)) < least
        if refused.device.type == "cpu" and not bool(refused.any()):  # a device is not asked: it would be waited for
            return recorded
        return _refilled(recorded, refused, live_NK)


def _refilled(recorded_NK: torch.Tensor, refused_NK: torch.Tensor, live_NK: torch.Tensor) -> torch.Tensor:
    """Refused slots, from the first on, take the live experts that no other slot holds, from the best on."""
    kept_NKK = (recorded_NK[:, :, None] == live_NK[:, None, :]) & ~refused_NK[:, :, None]
    free_first = kept_NKK.any(1).to(torch.uint8).argsort(stable=True, dim=-1)
    place_NK = (refused_NK.cumsum(-1) - 1).clamp_min(0)
    return torch.where(refused_NK, live_NK.gather(-1, free_first).gather(-1, place_NK), recorded_NK)
