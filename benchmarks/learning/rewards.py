"""When a run in training has reached a solve rate, by the rewards it trained on. Imports nothing: other trainers'
environments have it, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class Rewards:
    """Mean rewards of batches, as they come; each of `batch` rollouts."""

    def __init__(self, batch: int, window: int) -> None:
        self.size = math.ceil(window / batch)  # batches that fill the window; the last of them counts whole
        self.means: list[float] = []

    def add(self, mean: float) -> None:
        self.means.append(mean)

    def reached(self, rate: float) -> bool:
        """Whether the mean reward of the last `window` rollouts is at least `rate`; not before there are so many."""
        last = self.means[-self.size :]
        return len(last) == self.size and math.fsum(last) / self.size >= rate


def first_reached(means: Sequence[float], batch: int, window: int, rate: float) -> int | None:
    """After how many batches the last `window` rollouts first had the mean reward `rate`; None: never."""
    seen = Rewards(batch, window)
    for number, mean in enumerate(means, 1):
        seen.add(mean)
        if seen.reached(rate):
            return number
    return None
