"""The contract suite of forecasts of production's load."""

from __future__ import annotations

import math
import random

from etude.testing.contracts import Contract

TICK_S, DAY_S = 60.0, 86_400.0


class ForecastContract(Contract):
    """Contract suite for forecasts: tests what the controller needs of an `etude.harvest.Forecast`.

    How good the predictions are is not tested: a low one makes production wait, a high one keeps engines idle. Compare
    forecasts by `etude.harvest.simulate`."""

    def test_a_prediction_before_the_first_observation_is_a_load(self) -> None:
        found = self.make().predict(0.0, 600.0)
        assert 0.0 <= found < math.inf, f"predict returned {found!r}"

    def test_predictions_are_loads_over_days_with_a_quiet_night_and_bursts(self) -> None:
        forecast, rng = self.make(), random.Random(1)
        for tick in range(int(3 * DAY_S / TICK_S)):
            now = tick * TICK_S
            load = 0.0 if now % DAY_S < 6 * 3600 else rng.expovariate(1 / 20)
            forecast.observe(now, load)
            if tick % 97 == 0:
                for ahead in (1.0, 60.0, 7_200.0):
                    found = forecast.predict(now, now + ahead)
                    assert 0.0 <= found < math.inf, f"predict returned {found!r} at {now} s for {ahead} s"

    def test_a_longer_time_is_not_predicted_to_need_less(self) -> None:
        forecast = self.make()
        for tick in range(int(2 * DAY_S / TICK_S)):
            now = tick * TICK_S
            forecast.observe(now, 40.0 if 9 <= now % DAY_S / 3600 < 18 else 10.0)
        short, long = forecast.predict(2 * DAY_S, 2 * DAY_S + 600), forecast.predict(2 * DAY_S, 2 * DAY_S + 12 * 3600)
        assert short <= long, f"{short} for ten minutes, {long} for the twelve hours that begin with them"

    def test_two_forecasts_with_the_same_observations_predict_the_same(self) -> None:
        one, other, rng = self.make(), self.make(), random.Random(2)
        for tick in range(2_000):
            load = rng.uniform(0, 50)
            one.observe(tick * TICK_S, load)
            other.observe(tick * TICK_S, load)
        now = 2_000 * TICK_S
        assert one.predict(now, now + 900) == other.predict(now, now + 900)
