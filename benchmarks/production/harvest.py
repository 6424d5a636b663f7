"""How much of the idle time of production's engines each policy lends to rollouts, and what it costs production.

    python -m benchmarks.production.harvest [--seeds 2]

Simulated (`etude.harvest.simulate`): a fleet that production uses to about 70 % at the peak of a day, and a third day
after two days of history. Each policy has a parameter (the forecast two), which is chosen on a day of other traffic as
the one that lends the most at a loss of at most half a point of late requests; then it is measured on days that nobody
has seen. The oracle knows the load of the future, and its parameter is chosen on the measured day itself: an upper
bound.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

from benchmarks.report import report
from etude.harvest import (
    Capacity,
    EngineCosts,
    Fixed,
    FleetShape,
    ForecastLending,
    Lease,
    Reactive,
    Simulated,
    TimeOfDay,
    TrafficShape,
    make_arrivals,
    simulate,
)
from etude.harvest.policies import LendingPolicy
from etude.harvest.traffic import DAY_S, Arrivals

LOSS = 0.005  # share of requests
LONG = TrafficShape(requests_s=0.8, sampled_tokens=1_200.0)  # few requests and long ones: a short simulation
TRAFFIC = {
    "diurnal, bursty": replace(LONG, surges_day=2.0),
    "calm": replace(LONG, noise=0.05, surges_day=0.0, burst_shape=1.0),
    "nervous": replace(LONG, noise=0.25, surges_day=6.0, surge_factor=1.8, burst_shape=0.25),
}
FLEET = FleetShape(engines=8, costs=EngineCosts(slots=16), first_s=1.0, token_s=0.05)
TIERS = {"seconds": (2.0, 2.0), "tens of seconds": (40.0, 40.0)}
TARGETS = (0.6, 0.7, 0.8, 0.9)
QUANTILES = (0.5, 0.75, 0.9)
ORACLE = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
Parameter = float | tuple[float, float]
Make = Callable[[Any, Sequence[float], Sequence[float]], LendingPolicy]
"""Makes a policy from its parameter, the loads of the history and those of the measured day."""


@dataclass(frozen=True)
class Night:
    """Lends `number` engines from the hour `start` to the hour `stop` of each day, and none otherwise."""

    number: int
    start: float = 22.0
    stop: float = 8.0

    def away(self, time_s: float, load: float, away: int) -> int:
        hour = time_s % DAY_S / 3600
        inside = self.start <= hour < self.stop if self.start < self.stop else not self.stop <= hour < self.start
        return self.number if inside else 0


class Oracle:
    """Knows the future load: `loads[i]` is the load at the call at ``start_s + i * tick_s``. It lends the engines that
    production does not need in the next `lead_s` seconds."""

    def __init__(
        self, capacity: Capacity, loads: Sequence[float], *, start_s: float, tick_s: float, lead_s: float = 60.0
    ) -> None:
        self._capacity, self._loads, self._start_s, self._tick_s = capacity, loads, start_s, tick_s
        self._ahead = math.ceil(lead_s / tick_s)

    def away(self, time_s: float, load: float, away: int) -> int:
        now = round((time_s - self._start_s) / self._tick_s)
        coming = self._loads[now : now + self._ahead + 1]
        return self._capacity.spare(max(coming, default=load))


def policies(fleet: FleetShape) -> dict[str, tuple[Make, Sequence[Parameter]]]:
    """Return each policy with the parameters that are tried."""
    lead_s = fleet.return_s + 2 * fleet.tick_s

    def capacity(target: float) -> Capacity:
        return Capacity(fleet.engines, fleet.costs.slots, target)

    def forecast(parameter: tuple[float, float], history: Sequence[float], _: Sequence[float]) -> LendingPolicy:
        target, quantile = parameter
        learnt = TimeOfDay(quantile=quantile)
        for tick, load in enumerate(history):
            learnt.observe(tick * fleet.tick_s, load)
        return ForecastLending(capacity(target), learnt, lead_s=lead_s)

    return {
        "static": (lambda n, *_: Fixed(n), range(1, 5)),
        "night": (lambda n, *_: Night(n), range(3, 7)),
        "reactive": (lambda target, *_: Reactive(capacity(target)), TARGETS),
        "forecast": (forecast, tuple(product(TARGETS, QUANTILES))),
        "oracle": (
            lambda target, _, loads: Oracle(
                capacity(target), loads, start_s=2 * DAY_S, tick_s=fleet.tick_s, lead_s=lead_s
            ),
            ORACLE,
        ),
    }


class Day:
    """The traffic of three days, of which the last is measured."""

    def __init__(self, shape: TrafficShape, fleet: FleetShape, seed: int) -> None:
        self.fleet, made = fleet, make_arrivals(shape, 3 * DAY_S, seed=seed)
        self.history = loads_of(made.between(0.0, 2 * DAY_S), fleet)
        self.arrivals = made.between(2 * DAY_S, 3 * DAY_S)
        self.unlent = self.run(Fixed(0))

    def run(self, policy: LendingPolicy) -> Simulated:
        return simulate(self.arrivals, self.fleet, policy, start_s=2 * DAY_S)

    def tried(self, make: Make, parameter: Parameter) -> tuple[float, float, Simulated]:
        """Return (lent engine hours, loss in shares of requests, all)."""
        found = self.run(make(parameter, self.history, self.unlent.loads))
        return found.hours[Lease.LENT], found.late_share - self.unlent.late_share, found

    def best(self, make: Make, parameters: Sequence[Parameter]) -> Parameter:
        """Return the parameter that lends the most at a loss of at most `LOSS`; the smallest loss if there is none."""
        tried = {one: self.tried(make, one)[:2] for one in parameters}
        able = [one for one, (_, loss) in tried.items() if loss <= LOSS]
        return max(able, key=lambda one: tried[one][0]) if able else min(tried, key=lambda one: tried[one][1])


def loads_of(arrivals: Arrivals, fleet: FleetShape) -> list[float]:
    """Return the loads of a fleet that lends nothing, as its gateway sees them."""
    return simulate(arrivals, fleet, Fixed(0)).loads


def compare(shape: TrafficShape, fleet: FleetShape, seeds: Sequence[int]) -> dict[str, Any]:
    """Choose the parameters of all policies on one day, and measure them on others."""
    chosen_on, days = Day(shape, fleet, 100), [Day(shape, fleet, seed) for seed in seeds]
    found: dict[str, Any] = {}
    for name, (make, parameters) in policies(fleet).items():
        fixed = None if name == "oracle" else chosen_on.best(make, parameters)
        results = [day.tried(make, day.best(make, parameters) if fixed is None else fixed) for day in days]
        found[name] = {
            "parameter": fixed,
            "lent_hours": round(fmean(hours for hours, _, _ in results), 1),
            "loss_points": [round(100 * loss, 3) for _, loss, _ in results],
            "leases": fmean(one.num_leases for _, _, one in results),
            "of_oracle": [round(hours, 3) for hours, _, _ in results],
        }
    oracle = found["oracle"]["of_oracle"]
    for row in found.values():
        row["of_oracle"] = [round(hours / most, 3) for hours, most in zip(row["of_oracle"], oracle, strict=True)]
    peak = max(max(day.unlent.loads) for day in days) / fleet.engines / fleet.costs.slots
    return {"peak_use": round(peak, 2), "late_unlent": [round(d.unlent.late_share, 4) for d in days], "policies": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="measured days for each kind of traffic")
    args = parser.parse_args()
    cpu, numbers = time.process_time(), {}
    for tier, (lend_s, return_s) in TIERS.items():
        for name, shape in TRAFFIC.items():
            if tier != "seconds" and name != "diurnal, bursty":
                continue
            fleet = replace(FLEET, lend_s=lend_s, return_s=return_s)
            numbers[f"{name}; tier of {tier}"] = compare(shape, fleet, range(1, args.seeds + 1))
            cpu_s = round(time.process_time() - cpu, 1)
            report("harvest", {"seeds": args.seeds, "cpu_s": cpu_s, "traffic": numbers})  # also if it is interrupted


if __name__ == "__main__":
    main()
