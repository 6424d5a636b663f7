"""Settings of fleets of production that are lent: the TOML files of ``etude serve --lend`` and, for a simulated one,
of ``etude plan --production``."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from etude.config import Plugin, ranged
from etude.harvest.forecast import Forecast, PluginForecast
from etude.harvest.leases import Lease
from etude.harvest.policies import Capacity, Fixed, ForecastLending, LendingPolicy, Reactive
from etude.harvest.simulator import FleetShape, simulate
from etude.harvest.traffic import DAY_S, TrafficShape, make_arrivals


class ForecastKind(enum.StrEnum):
    """The built-in forecasts. `forecast.FORECASTS` has their import paths."""

    TIME_OF_DAY = "time-of-day"


class PolicyKind(enum.StrEnum):
    """The policies of `LendConfig`."""

    FORECAST = "forecast"  # `ForecastLending`
    REACTIVE = "reactive"  # `Reactive`
    STATIC = "static"  # `Fixed`: all engines but `min_serving`


@dataclass(frozen=True)
class LendConfig:
    """How a gateway lends idle engines to the rollouts of a run.

    - `registry`: the URL of the run's registry (`fleet.listen`).
    - `engines`: the number of engines that the gateway starts. `min_serving` of them are never lent.
    - `policy`: what decides how many engines are lent. `forecast`: the forecast of the policy of this name:
      "time-of-day", or the import path of a plug-in (kind `forecast`).
    - `target`: the share of an engine's sequences that production may use on average while other engines are lent.
    - `lease_s`: an engine is lent if production will not need it for so many seconds, by the forecast; with the policy
      "reactive", if production did not need it for so long.
    - `tick_s`: the interval of decisions, in seconds.
    - `silence_s`: if the run's registry does not answer for so many seconds, all engines are taken back.

    Raises `ValueError` if `registry` is not an HTTP URL, or if `min_serving` leaves no engine to be lent."""

    registry: str
    engines: int = ranged(2, low=2, high=64)
    min_serving: int = ranged(1, low=1)
    policy: PolicyKind = PolicyKind.FORECAST
    forecast: ForecastKind | Plugin = ForecastKind.TIME_OF_DAY
    target: float = ranged(0.6, low=0.05, high=1.0)
    lease_s: float = ranged(600.0, low=0.0)
    tick_s: float = ranged(5.0, low=0.1, high=600.0)
    silence_s: float = ranged(60.0, low=1.0)

    def __post_init__(self) -> None:
        if not _is_http(self.registry):
            raise ValueError(
                f"registry = {self.registry!r} is not an http:// or https:// address: set it to http://HOST:PORT, the "
                "address of fleet.listen in the run's config"
            )
        if self.min_serving >= self.engines:
            raise ValueError(
                f"min_serving = {self.min_serving} leaves none of engines = {self.engines} to be lent: set it lower"
            )

    def make_policy(self, slots: int) -> LendingPolicy:
        """Return a new policy for engines that decode `slots` sequences each. Raises `PluginRefused` if a plug-in
        cannot be used."""
        if self.policy is PolicyKind.STATIC:
            return Fixed(self.engines - self.min_serving)
        capacity = Capacity(self.engines, slots, self.target, self.min_serving)
        if self.policy is PolicyKind.REACTIVE:
            return Reactive(capacity, calm_s=self.lease_s)
        return ForecastLending(capacity, make_forecast(self.forecast), lead_s=2 * self.tick_s, lease_s=self.lease_s)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or too large
        return False


def make_forecast(named: ForecastKind | Plugin) -> Forecast:
    """Return a new forecast. Raises `PluginRefused` if a plug-in cannot be used."""
    return PluginForecast(named if isinstance(named, Plugin) else Plugin(named.value))


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
    forecast = make_forecast(config.forecast)
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
