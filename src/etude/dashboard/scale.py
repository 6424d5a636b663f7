"""From values to pixels, and where to put the ticks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_TINY = 1e-300  # what is smaller counts as nothing: powers of ten end there


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, stop] pixels, by value or by its logarithm.

    >>> Scale(0.0, 2.0, 100.0, 0.0)(1.0)
    50.0
    >>> Scale(1.0, 100.0, 0.0, 10.0, log=True)(10.0)
    5.0
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        if self.log:
            value = math.log10(max(value, self.low))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + min(1.0, max(0.0, share)) * (self.stop - self.start), 2)

    def ticks(self, count: int = 5) -> list[float]:
        """About `count` round values from low to high."""
        return log_ticks(self.low, self.high, count) if self.log else ticks(self.low, self.high, count)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten.

    >>> ticks(0.0, 1.0), ticks(0, 45, 4)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0, 20, 40])
    """
    if not high - low > max(_TINY, 1e-12 * abs(high)):
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [round(i * step, 12) for i in range(first, last + 1)]
    return [int(v) for v in values] if step >= 1 and all(v == int(v) for v in values) else values


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Powers of ten, thinned out to about `count`.

    >>> log_ticks(1e-6, 1e-2)
    [1e-06, 1e-05, 0.0001, 0.001, 0.01]
    """
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / (count + 1)))
    return [10.0**i for i in range(first, last + 1, every)]


def domain(values: Sequence[float], *, zero: bool = False, log: bool = False) -> tuple[float, float]:
    """A range that shows all values with a little air, from zero if asked; whole decades if logarithmic.

    >>> domain([0.2, 0.8], zero=True)
    (0.0, 0.84)
    >>> domain([2e-5, 3e-3], log=True)
    (1e-05, 0.01)
    """
    if log:
        positive = [v for v in values if v > _TINY] or [1e-9, 1.0]
        first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        return 10.0**first, 10.0 ** (last if last > first else first + 1)
    least, most = (min(values), max(values)) if values else (0.0, 1.0)
    if zero:
        least = min(0.0, least)
    air = 0.05 * (most - least) or 0.05 * abs(most) or 1.0
    return (least if zero and least == 0.0 else least - air), round(most + air, 12)
