"""How long a request takes on one engine, as it is seen from here.

A line through what was served lately: seconds = alone + each · crowd, where crowd is how many requests ran there
together. The way there and back is in `alone`, so a far engine is slow for one request, and no slower for many; an
engine whose requests share one core is quick for one and slow for many. Pure, without a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.05  # of the newest request
PRIOR = 1.0  # variance of the crowd at which the line is half what was seen, half a line through the origin


@dataclass
class Pace:
    """A moving fit.

    >>> near, far = Pace(), Pace()
    >>> for crowd in [1, 8, 4, 8, 1] * 20:
    ...     near.served(0.02 * crowd, crowd)
    ...     far.served(0.2 + 0.005 * crowd, crowd)
    >>> [round(near.seconds(n), 2) for n in (1, 20)], [round(far.seconds(n), 2) for n in (1, 20)]
    ([0.02, 0.4], [0.2, 0.32])
    """

    num_served: int = 0
    _crowd: float = 0.0  # moving means, variance and covariance
    _seconds: float = 0.0
    _spread: float = 0.0
    _joint: float = 0.0

    def served(self, seconds: float, crowd: float) -> None:
        """A request was served from beginning to end, `crowd` running meanwhile, itself included."""
        self.num_served += 1
        weight = max(WEIGHT, 1 / self.num_served)
        off, late = crowd - self._crowd, seconds - self._seconds
        self._crowd += weight * off
        self._seconds += weight * late
        self._spread = (1 - weight) * (self._spread + weight * off * off)
        self._joint = (1 - weight) * (self._joint + weight * off * late)

    def seconds(self, crowd: float) -> float:
        """What a request is expected to take among so many. Only once something was served."""
        share = self._seconds / self._crowd  # the slope where nothing is known of `alone`
        each = (self._joint + PRIOR * share) / (self._spread + PRIOR)
        return self._seconds + min(max(each, 0.0), share) * (crowd - self._crowd)
