"""Settings of a simulated fleet of production: the TOML file of ``etude plan --production``."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from etude.config import Plugin, ranged
from etude.harvest.forecast import Forecast, PluginForecast
from etude.harvest.leases import Lease
from etude.harvest.policies import Capacity, Fixed, ForecastLending
from etude.harvest.simulator import FleetShape, simulate
from etude.harvest.traffic import DAY_S, TrafficShape, make_arrivals


class ForecastKind(enum.StrEnum):
    """The built-in forecasts. `forecast.FORECASTS` has their import paths."""

    TIME_OF_DAY = "time-of-day"


@dataclass(frozen=True)
class HarvestConfig:
    """A fleet that serves production and is lent to rollouts.

    - `target`: the share of an engine's slots that production may use on average while other engines are lent.
    - `lease_s`: an engine is lent only if the forecast does not need it for so many seconds.
    - `forecast`: "time-of-day", or the import path of a plug-in (kind `forecast`).
    - `fleet`, `traffic`: the engines with their speed (`fleet.costs`), and what production asks for.
    - `seed`: the seed of the random traffic."""

    target: float = ranged(0.6, low=0.05, high=1.0)
    lease_s: float = ranged(600.0, low=0.0)
    forecast: ForecastKind | Plugin = ForecastKind.TIME_OF_DAY
    fleet: FleetShape = field(default_factory=FleetShape)
    traffic: TrafficShape = field(default_factory=TrafficShape)
    seed: int = ranged(1, low=0)

    def make_forecast(self) -> Forecast:
        """Return a new forecast. Raises `PluginRefused` if a plug-in cannot be used."""
        named = self.forecast
        return PluginForecast(named if isinstance(named, Plugin) else Plugin(named.value))


@dataclass(frozen=True)
class Harvested:
    """The result of a simulation: what rollouts get on one day, and what production loses.

    - `engines`: the number of engines of the fleet. `lent`: the mean number of lent ones over the day.
    - `late_share`, `late_share_unlent`: shares of production's requests that are late (`FleetShape`), if engines are
      lent and if none is.
    - `hand_backs`: how many times production took an engine back."""

    engines: int
    lent: float
    late_share: float
    late_share_unlent: float
    hand_backs: int


def harvested(config: HarvestConfig) -> Harvested:
    """Simulate three days of a fleet, and return the result for the last one. The forecast learns from the others."""
    fleet = config.fleet
    arrivals = make_arrivals(config.traffic, 3 * DAY_S, seed=config.seed)
    forecast = config.make_forecast()
    for tick, load in enumerate(simulate(arrivals.between(0.0, 2 * DAY_S), fleet, Fixed(0)).loads):
        forecast.observe(tick * fleet.tick_s, load)
    capacity = Capacity(fleet.engines, fleet.costs.slots, config.target, fleet.min_serving)
    policy = ForecastLending(capacity, forecast, lead_s=fleet.return_s + 2 * fleet.tick_s, lease_s=config.lease_s)
    day = arrivals.between(2 * DAY_S, 3 * DAY_S)
    unlent, found = (simulate(day, fleet, one, start_s=2 * DAY_S) for one in (Fixed(0), policy))
    return Harvested(
        engines=fleet.engines,
        lent=found.hours[Lease.LENT] / 24,
        late_share=found.late_share,
        late_share_unlent=unlent.late_share,
        hand_backs=len(found.hand_back_s),
    )
