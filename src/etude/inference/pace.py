"""How long a request takes on one engine, as it is seen from here.

A line through what was served lately: seconds = alone + each · crowd, where crowd is how many requests ran there
together. The way there and back is in `alone`, so a far engine is slow for one request, and no slower for many; an
engine whose requests share one core is quick for one and slow for many. What was seen is worth nothing after a while:
a line that is slow for a time would otherwise keep its name for ever. Pure, the clock is passed.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.05  # of the newest request
FORGET_S = 60.0  # after the last request
PRIOR = 1.0  # variance of the crowd at which the line is half what was seen, half a line through the origin


@dataclass
class Pace:
    """A moving fit.

    >>> near, far = Pace(), Pace()
    >>> for crowd in [1, 8, 4, 8, 1] * 20:
    ...     near.served(0.02 * crowd, crowd, now=0.0)
    ...     far.served(0.2 + 0.005 * crowd, crowd, now=0.0)
    >>> [round(near.seconds(n), 2) for n in (1, 20)], [round(far.seconds(n), 2) for n in (1, 20)]  # 0.3 leans to 1.0
    ([0.02, 0.4], [0.19, 0.37])
    >>> far.known(now=1.0), far.known(now=100.0)
    (True, False)
    >>> far.served(0.01, 1, now=100.0)  # its way is another by now
    >>> round(far.seconds(1), 2)
    0.01
    """

    _num_served: int = 0
    _last: float = 0.0
    _crowd: float = 0.0  # moving means, variance and covariance
    _seconds: float = 0.0
    _spread: float = 0.0
    _joint: float = 0.0

    def known(self, now: float) -> bool:
        """Whether something was served lately."""
        return self._num_served > 0 and now - self._last < FORGET_S

    def served(self, seconds: float, crowd: float, *, now: float) -> None:
        """A request was served from beginning to end, `crowd` running meanwhile, itself included."""
        self._num_served, self._last = (self._num_served if self.known(now) else 0) + 1, now
        weight = max(WEIGHT, 1 / self._num_served)
        off, late = crowd - self._crowd, seconds - self._seconds
        self._crowd += weight * off
        self._seconds += weight * late
        self._spread = (1 - weight) * (self._spread + weight * off * off)
        self._joint = (1 - weight) * (self._joint + weight * off * late)

    def seconds(self, crowd: float) -> float:
        """What a request is expected to take among so many. Only where it is `known`."""
        share = self._seconds / self._crowd  # the slope where nothing is known of `alone`
        each = (self._joint + PRIOR * share) / (self._spread + PRIOR)
        return self._seconds + min(max(each, 0.0), share) * (crowd - self._crowd)
