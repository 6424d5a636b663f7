from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from etude.environments.burst.forecast import Demand, Forecast


def periodic(every_s: float, n: int, until_s: float) -> Demand:
    demand = Demand(lead_s=1.0, memory_s=60.0)
    t = 0.0
    while t < until_s:
        demand.asked(t, n)
        t += every_s
    return demand


def test_bursts_that_come_often_enough_are_held_ready_whole():
    assert periodic(10.0, 48, 120.0).quantile(0.95, 120.0) == 48


def test_bursts_that_come_too_seldom_are_not():
    assert periodic(40.0, 48, 240.0).quantile(0.9, 239.0) == 0


def test_a_snapshot_that_was_asked_for_once_is_not_made_again():
    demand = Demand(lead_s=1.0, memory_s=60.0)
    demand.asked(0.5, 8)
    demand.asked(0.7, 8)  # the same burst
    assert demand.quantile(0.95, 1.0) == 0


def test_a_forecast_falls_when_nobody_asks_any_more():
    demand = periodic(2.0, 8, 60.0)
    held = [demand.quantile(0.9, t) for t in (60.0, 120.0, 240.0, 600.0)]
    assert held[0] == 8
    assert held[-1] == 0
    assert held == sorted(held, reverse=True)


def kept(quantile: float) -> tuple[float, float]:
    """(share of windows in which more was asked for than was at hand, machines that idled in a window on average), of
    a demand of 1 to 40 machines in every second window."""
    forecast, rng = Forecast(quantile=quantile, lead_s=1.0, memory_s=300.0), random.Random(5)
    missed = idle = 0
    for t in range(3000):
        held = forecast.plan(float(t), budget=1000).get("x", 0)
        n = rng.choice((0, rng.randint(1, 40)))
        if n:
            forecast.asked("x", t + 0.5, n)
        if t >= 500:
            missed, idle = missed + (n > held), idle + max(0, held - n)
    return missed / 2500, idle / 2500


def test_machines_at_hand_are_too_few_as_often_as_the_quantile_says_and_idle_in_return():
    (seldom, costly), (often, cheap) = kept(0.95), kept(0.75)
    assert 0.02 < seldom < 0.08
    assert 0.2 < often < 0.3
    assert cheap < costly < 40 - 10.25  # what 40 at hand always would cost: the demand is 10.25 on average


def test_a_budget_goes_to_what_will_most_probably_be_used():
    forecast = Forecast(quantile=0.95, lead_s=1.0, memory_s=60.0)
    for t in range(40):
        forecast.asked("always", float(t), 4)
        if t % 8 == 0:
            forecast.asked("at times", float(t), 32)
    assert forecast.plan(40.0, budget=100) == {"always": 4, "at times": 32}
    assert forecast.plan(40.0, budget=6) == {"always": 4, "at times": 2}
    assert forecast.plan(40.0, budget=0) == {}


def test_snapshots_that_were_not_asked_for_lately_are_forgotten():
    forecast = Forecast(lead_s=1.0, max_snapshots=2)
    for t in range(3):
        for name in ("a", "b"):
            forecast.asked(name, 2.0 * t, 1)
    forecast.asked("c", 7.0, 1)
    assert "a" not in forecast.plan(7.0, budget=10)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), max_size=40), st.floats(0.5, 0.99), st.integers(0, 60)
)
def test_a_plan_is_within_its_budget_and_what_was_ever_asked_for(asked, share, budget):
    forecast = Forecast(quantile=share, lead_s=1.0, memory_s=30.0)
    for t, n in sorted(asked):
        forecast.asked("x", t, n)
    planned = forecast.plan(101.0, budget=budget)
    assert sum(planned.values()) <= min(budget, sum(n for _, n in asked))
    assert all(n > 0 for n in planned.values())
