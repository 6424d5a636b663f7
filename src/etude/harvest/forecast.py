"""Forecasts of the load of production. The load is the number of requests that run or wait in its engines.

A forecast is a plug-in: any object with the two methods of `Forecast`. `TimeOfDay` is the built-in one."""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol, runtime_checkable

import numpy as np

from etude.config import Plugin
from etude.plugins import Kind, called, make

FORECASTS = {"time-of-day": "etude.harvest.forecast:TimeOfDay"}
"""The built-in forecasts: name -> import path."""
DAY_S = 86_400.0


@runtime_checkable
class Forecast(Protocol):
    """Predicts the load of production. Each fleet has its own object. Its times never decrease."""

    def observe(self, time_s: float, load: float) -> None:
        """Record the load at a time. The caller calls it at regular intervals.

        `time_s`: in seconds since a midnight. `load`: mean number of requests since the previous call, at least 0."""
        ...

    def predict(self, start_s: float, stop_s: float) -> float:
        """Return the load that is rarely exceeded in the time [start_s, stop_s), which begins now or later.

        The result is at least 0 and finite. If there are too few observations, return a high estimate, such as the
        largest load so far."""
        ...


class TimeOfDay:
    """Predicts the usual load at a time of the day, times recent load over usual load.

    The usual load of each interval of a day is a moving mean over days. The prediction also has a margin: the given
    quantile of the relative errors of earlier predictions, over the last days.

    - `interval_s`: length of an interval of the day, in seconds.
    - `newest`: weight of the newest day in the moving mean.
    - `recent_s`: over how many seconds the recent load is averaged.
    - `quantile`: share of the time in which the load was at most the prediction.

    >>> forecast = TimeOfDay(interval_s=3_600.0)
    >>> for hour in range(48):
    ...     forecast.observe(3_600.0 * hour, 10.0 if hour % 24 < 12 else 40.0)
    >>> forecast.predict(48 * 3_600.0, 49 * 3_600.0) < 20 < forecast.predict(60 * 3_600.0, 61 * 3_600.0)
    True
    """

    def __init__(
        self, interval_s: float = 300.0, newest: float = 0.3, recent_s: float = 1_800.0, quantile: float = 0.9
    ) -> None:
        self._interval_s, self._newest, self._quantile = interval_s, newest, quantile
        self._usual = np.full(max(1, round(DAY_S / interval_s)), np.nan)
        self._now: tuple[int, float, int] | None = None  # interval since the start, sum and number of its loads
        self._recent: deque[tuple[float, float]] = deque(maxlen=max(1, round(recent_s / interval_s)))  # load, usual
        self._errors: deque[float] = deque(maxlen=3 * len(self._usual))  # logarithms of load over prediction
        self._largest, self._margin = 0.0, 1.0

    def observe(self, time_s: float, load: float) -> None:
        number = int(time_s // self._interval_s)
        self._largest = max(self._largest, load)
        if self._now is not None and self._now[0] != number:
            self._close(*self._now)
            self._now = None
        _, total, count = self._now or (number, 0.0, 0)
        self._now = (number, total + load, count + 1)

    def predict(self, start_s: float, stop_s: float) -> float:
        first = int(start_s // self._interval_s)
        last = max(first, math.ceil(stop_s / self._interval_s) - 1)
        usual = self._usual[np.arange(first, last + 1) % len(self._usual)]
        if np.isnan(usual).any() or not self._errors:
            return self._largest
        return max(0.0, float(usual.max()) * self._ratio() * self._margin)

    def _close(self, number: int, total: float, count: int) -> None:
        """Learn from an interval that has ended."""
        at, load = number % len(self._usual), total / count
        usual = float(self._usual[at])
        if np.isnan(usual):
            self._usual[at] = load
            self._recent.append((load, load))
            return
        self._errors.append(math.log((load + 1.0) / (usual * self._ratio() + 1.0)))
        self._margin = max(1.0, math.exp(float(np.quantile(self._errors, self._quantile))))
        self._recent.append((load, usual))
        self._usual[at] += self._newest * (load - usual)

    def _ratio(self) -> float:
        """How much the recent load exceeds the usual one."""
        loads, usual = (sum(column) for column in zip(*self._recent, strict=True)) if self._recent else (1.0, 1.0)
        return min(3.0, max(1 / 3, (loads + 1.0) / (usual + 1.0)))


class PluginForecast:
    """Calls a forecast from a user's package. Both methods raise `PluginError` if the plug-in raises an error, or
    predicts anything but a finite number of at least 0."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._made: Forecast = make(Kind.FORECAST, plugin)

    def observe(self, time_s: float, load: float) -> None:
        with called(Kind.FORECAST, self._plugin, "its method observe"):
            self._made.observe(time_s, load)

    def predict(self, start_s: float, stop_s: float) -> float:
        with called(Kind.FORECAST, self._plugin, "its method predict"):
            found = float(self._made.predict(start_s, stop_s))
            if not 0.0 <= found < math.inf:
                raise ValueError(f"predict returned {found!r}, expected a finite number of at least 0")
            return found
