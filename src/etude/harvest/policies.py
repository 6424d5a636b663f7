"""Policies that decide how many engines are lent to rollouts: the forecasting controller, and simpler ones to compare.

All but `Fixed` share one rule: production needs ``load / (slots * target)`` engines, rounded up, where `target`
is the share of an engine's slots that production may use on average. They differ in the load that they expect."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from etude.harvest.forecast import Forecast


class LendingPolicy(Protocol):
    """Decides how many engines are lent."""

    def away(self, time_s: float, load: float, away: int) -> int:
        """Return how many engines should be lent or about to be, at the time `time_s` (seconds since a midnight).

        `load`: mean number of requests of production that ran or waited since the previous call. `away`: how many
        engines are lent or about to be now."""
        ...


@dataclass(frozen=True)
class Capacity:
    """How many engines a load needs: `engines` with `slots` slots each, used to the share `target`. At least
    `min_serving` stay.

    >>> Capacity(engines=8, slots=10, target=0.5).spare(11.0)
    5
    """

    engines: int
    slots: int
    target: float
    min_serving: int = 1

    def spare(self, load: float) -> int:
        """Return how many engines production does not need at this load."""
        need = max(self.min_serving, math.ceil(load / (self.slots * self.target) - 1e-9))
        return max(0, self.engines - need)


@dataclass(frozen=True)
class Fixed:
    """Lends the same number of engines at all times."""

    number: int

    def away(self, time_s: float, load: float, away: int) -> int:
        return self.number


class Reactive:
    """Lends the engines that production does not need at the present load.

    It lends one more engine only after production did not need that engine for `calm_s` seconds."""

    def __init__(self, capacity: Capacity, *, calm_s: float = 300.0) -> None:
        self._capacity, self._calm_s = capacity, calm_s
        self._spare: list[tuple[float, int]] = []

    def away(self, time_s: float, load: float, away: int) -> int:
        spare = self._capacity.spare(load)
        self._spare = [(at, n) for at, n in self._spare if at >= time_s - self._calm_s] + [(time_s, spare)]
        return min(spare, max(away, min(n for _, n in self._spare)))


class ForecastLending:
    """The controller: lends the engines that production will not need, and takes them back before the load rises.

    - `lead_s`: seconds until a lent engine serves production again, plus the interval between calls. If production will
      need a lent engine within this time, by the forecast, it is taken back now.
    - `lease_s`: an engine is lent only if production will not need it for this many seconds, since each lease costs two
      swaps of weights.

    It expects at least the present load, even if the forecast is lower."""

    def __init__(self, capacity: Capacity, forecast: Forecast, *, lead_s: float = 60.0, lease_s: float = 600.0) -> None:
        self._capacity, self._forecast = capacity, forecast
        self._lead_s, self._lease_s = lead_s, max(lease_s, lead_s)

    def away(self, time_s: float, load: float, away: int) -> int:
        self._forecast.observe(time_s, load)
        soon = self._capacity.spare(max(load, self._forecast.predict(time_s, time_s + self._lead_s)))
        if away >= soon:
            return soon
        later = self._capacity.spare(max(load, self._forecast.predict(time_s, time_s + self._lease_s)))
        return max(away, later)
