"""The simulator of lent engines: nothing appears or vanishes, and time passes as the formulas say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from etude.harvest.traffic import Arrivals

COSTS = EngineCosts(slots=4, step_s=0.02, sequence_s=0.001, prompt_token_s=0.0001)


class Erratic:
    """Asks for a random number of lent engines, also for impossible ones."""

    def __init__(self, seed: int, most: int) -> None:
        self._rng, self._most = np.random.default_rng(seed), most

    def away(self, time_s: float, load: float, away: int) -> int:
        return int(self._rng.integers(-1, self._most + 2))


def requests(*rows: tuple[float, int, int], duration_s: float = 100.0) -> Arrivals:
    at_s, prompts, sampled = zip(*rows, strict=True) if rows else ((), (), ())
    return Arrivals(np.array(at_s, float), np.array(prompts, int), np.array(sampled, int), duration_s)


def test_a_request_alone_takes_its_prompt_and_a_step_for_each_token() -> None:
    found = simulate(requests((1.0, 500, 100)), FleetShape(engines=1, costs=COSTS), Fixed(0))
    assert found.first_s[0] == pytest.approx(500 * 0.0001 + 0.021)
    assert found.latency_s[0] == pytest.approx(500 * 0.0001 + 100 * 0.021)
    assert found.production_tokens == pytest.approx(100)


def test_requests_together_share_steps_and_the_fifth_waits_for_a_slot() -> None:
    found = simulate(requests(*[(1.0, 0, 100)] * 5), FleetShape(engines=1, costs=COSTS), Fixed(0))
    together = 100 * (0.02 + 4 * 0.001)
    assert found.latency_s[:4] == pytest.approx([together] * 4)
    assert found.first_s[4] == pytest.approx(together + 0.021, abs=0.004)  # others end at the same time


def test_lent_engines_serve_rollouts_only_and_are_back_after_their_swap() -> None:
    class Once:
        def away(self, time_s: float, load: float, away: int) -> int:
            return 1 if 10 <= time_s < 50 else 0

    fleet = FleetShape(engines=2, costs=COSTS, tick_s=10.0, lend_s=3.0, return_s=2.0, bulk_prompt_tokens=0.0)
    found = simulate(requests(), fleet, Once())
    lent_s = 50 - 10 - 3
    assert found.hours[Lease.LENT] == pytest.approx(lent_s / 3600)
    assert found.hand_back_s == [pytest.approx(2.0)]
    assert found.bulk_tokens == found.lent_tokens == pytest.approx(4 * lent_s / (0.02 + 4 * 0.001))


def test_rollouts_in_a_serving_engine_give_their_slots_to_production_and_resume_later() -> None:
    fleet = FleetShape(engines=1, costs=COSTS, bulk_slots=4, bulk_prompt_tokens=100.0, bulk_sampled_tokens=100.0)
    found = simulate(requests((10.0, 0, 50), (10.0, 0, 50)), fleet, Fixed(0))
    assert found.num_preempted == 2
    assert found.first_s[0] < 0.1
    undisturbed = simulate(requests(), fleet, Fixed(0))
    assert found.lent_tokens == 0 < found.bulk_tokens < undisturbed.bulk_tokens


traffic = st.builds(
    TrafficShape,
    requests_s=st.floats(0.2, 3.0),
    burst_shape=st.floats(0.2, 1.0),
    sampled_tokens=st.just(60.0),
    prompt_tokens=st.just(100.0),
)


@settings(max_examples=25, deadline=None)
@given(traffic, st.integers(0, 1000), st.integers(1, 5), st.integers(0, 4), st.floats(0.0, 30.0))
def test_tokens_requests_and_engine_hours_are_conserved(
    shape: TrafficShape, seed: int, engines: int, bulk_slots: int, swap_s: float
) -> None:
    duration_s = 300.0
    arrivals = make_arrivals(shape, duration_s, seed=seed)
    fleet = FleetShape(
        engines=engines, costs=COSTS, tick_s=7.0, lend_s=swap_s, return_s=swap_s / 2, bulk_slots=bulk_slots
    )
    found = simulate(arrivals, fleet, Erratic(seed, engines))
    assert sum(found.hours.values()) == pytest.approx(engines * duration_s / 3600)
    assert found.hours[Lease.SERVING] >= duration_s / 3600 * (1 - 1e-9)  # one engine stays
    ended = ~np.isnan(found.latency_s)
    begun = ~np.isnan(found.first_s)
    assert (begun | ~ended).all()
    low = arrivals.sampled_tokens[ended].sum()
    high = arrivals.sampled_tokens[begun].sum() + begun.sum()  # and the rest of the step in which each arrived
    assert low - 1e-6 <= found.production_tokens <= high + 1e-6
    assert found.lent_tokens <= found.bulk_tokens + 1e-9
    fastest = COSTS.slots / (COSTS.step_s + COSTS.slots * COSTS.sequence_s)
    assert found.production_tokens + found.bulk_tokens <= fastest * engines * duration_s
    assert (found.latency_s[ended] >= found.first_s[ended] - COSTS.step_s - COSTS.slots * COSTS.sequence_s).all()
    assert all(one == pytest.approx(swap_s / 2) for one in found.hand_back_s)
    assert 0.0 <= found.late_share <= 1.0


def test_the_same_seed_gives_the_same_simulation_and_another_seed_another() -> None:
    def run(seed: int) -> Simulated:
        arrivals = make_arrivals(TrafficShape(requests_s=1.0), 600.0, seed=seed)
        capacity = Capacity(engines=3, slots=4, target=0.8)
        return simulate(arrivals, FleetShape(engines=3, costs=COSTS), ForecastLending(capacity, TimeOfDay()))

    assert run(1).bulk_tokens == run(1).bulk_tokens != run(2).bulk_tokens


@pytest.mark.parametrize("shape", [0.25, 1.0])
def test_arrivals_have_the_rate_the_daily_swing_and_the_burstiness_that_were_asked_for(shape: float) -> None:
    plain = TrafficShape(requests_s=1.0, peak_to_valley=4.0, noise=0.0, surges_day=0.0, burst_shape=shape)
    made = make_arrivals(plain, 86_400.0, seed=3)
    assert len(made.at_s) == pytest.approx(86_400, rel=0.02)
    hours = np.bincount((made.at_s // 3600).astype(int), minlength=24)
    assert 13 <= hours.argmax() <= 16
    assert hours[14:16].mean() / hours[2:4].mean() == pytest.approx(4.0, rel=0.15)
    gaps = np.diff(made.between(14.5 * 3600, 15.5 * 3600).at_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(shape), rel=0.1)


def test_weekends_have_less_traffic() -> None:
    made = make_arrivals(TrafficShape(requests_s=0.2, noise=0.0, surges_day=0.0), 7 * 86_400.0, seed=1)
    days = np.bincount((made.at_s // 86_400).astype(int))
    assert days[5:].mean() / days[:5].mean() == pytest.approx(0.6, rel=0.05)


def policies(capacity: Capacity) -> list[LendingPolicy]:
    return [Reactive(capacity), ForecastLending(capacity, TimeOfDay())]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.0, 60.0), min_size=1, max_size=60), st.floats(0.3, 1.0))
def test_no_policy_lends_an_engine_that_the_present_load_needs(loads: list[float], target: float) -> None:
    capacity = Capacity(engines=6, slots=8, target=target)
    for policy in policies(capacity):
        away = 0
        for tick, load in enumerate(loads):
            away = policy.away(30.0 * tick, load, away)
            need = max(1, math.ceil(load / (8 * target) - 1e-9))
            assert 0 <= away <= max(0, 6 - need)


def test_the_forecast_takes_engines_back_before_the_load_rises() -> None:
    capacity = Capacity(engines=4, slots=10, target=0.5)
    policy, away, history = ForecastLending(capacity, TimeOfDay(), lead_s=600.0, lease_s=600.0), 0, []
    for tick in range(3 * 288):
        hour = tick * 300 / 3600 % 24
        away = policy.away(tick * 300.0, 18.0 if 9 <= hour < 18 else 2.0, away)
        history.append(away)
    eight_to_nine = history[2 * 288 + 8 * 12 : 2 * 288 + 9 * 12]
    assert eight_to_nine[0] == 3
    assert eight_to_nine[-1] == 0  # ten minutes before the load, not with it
    assert history[2 * 288 + 20 * 12] == 3
