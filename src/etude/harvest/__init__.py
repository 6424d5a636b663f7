"""Lends idle engines of production to rollouts and takes them back before they are needed. Production comes first.

There are three ways to share an engine (tiers). They differ in how fast production gets the engine back:

- Milliseconds: rollouts are requests of another class in the same engine (`records.completion.Traffic`). Nothing is
  lent; a rollout whose slot is taken keeps its tokens.
- Seconds: the engine loads the version of the rollouts by a delta, and later that of production (`Harvester`).
- Tens of seconds: the engine serves another model. This is only simulated.

>>> fleet, arrivals = FleetShape(engines=4), make_arrivals(TrafficShape(), 3_600.0, seed=1)
>>> found = simulate(arrivals, fleet, Fixed(1))
>>> round(sum(found.hours.values()), 6), found.hours[Lease.LENT] > 0.9
(4.0, True)
"""

from etude.harvest.config import HarvestConfig, harvested
from etude.harvest.forecast import Forecast, TimeOfDay
from etude.harvest.leases import Lease
from etude.harvest.policies import Capacity, Fixed, ForecastLending, Reactive
from etude.harvest.simulator import EngineCosts, FleetShape, Simulated, simulate
from etude.harvest.traffic import TrafficShape, make_arrivals

__all__ = [
    "Capacity",
    "EngineCosts",
    "Fixed",
    "FleetShape",
    "Forecast",
    "ForecastLending",
    "HarvestConfig",
    "Lease",
    "Reactive",
    "Simulated",
    "TimeOfDay",
    "TrafficShape",
    "harvested",
    "make_arrivals",
    "simulate",
]
