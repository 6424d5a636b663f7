"""What the controller that lends engines relies on in a forecast: the built-in one and the example."""

from __future__ import annotations

from typing import Any

from examples.plugins.forecasts import LargestOfLate

from etude.harvest import TimeOfDay
from etude.testing.forecasts import ForecastContract


class TestTimeOfDay(ForecastContract):
    def make(self) -> Any:
        return TimeOfDay()


class TestLargestOfLate(ForecastContract):
    def make(self) -> Any:
        return LargestOfLate()
