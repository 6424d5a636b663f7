"""A forecast of production's load: the largest load of the last hours, with a reserve."""

from __future__ import annotations

from collections import deque


class LargestOfLate:
    """Predicts `reserve` times the largest load of the last `hours` hours."""

    def __init__(self, hours: float = 2.0, reserve: float = 1.2) -> None:
        self._seconds, self._reserve = 3600 * hours, reserve
        self._loads: deque[tuple[float, float]] = deque()  # falling: a smaller one before a larger one never counts

    def observe(self, time_s: float, load: float) -> None:
        while self._loads and self._loads[-1][1] <= load:
            self._loads.pop()
        self._loads.append((time_s, load))
        while self._loads[0][0] < time_s - self._seconds:
            self._loads.popleft()

    def predict(self, start_s: float, stop_s: float) -> float:
        return self._reserve * self._loads[0][1] if self._loads else 0.0
