"""Makes requests of production with the shape of published traces: a daily cycle, a weekly one, noise and bursts.

No trace is copied; the parameters are set by hand, and a seed gives the same requests each time. What the traces say:

- Azure's traces of LLM inference of May 2024 (Stojkovic et al. 2024, "DynamoLLM", arXiv 2408.00741) show a daily and a
  weekly cycle, with peaks that are several times as high as the valleys.
- BurstGPT (Wang et al. 2024, arXiv 2401.17644; 213 days of a regional Azure OpenAI service) models the times between
  requests by Gamma distributions with more variance than a Poisson process has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etude.config import ranged

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

DAY_S = 86_400.0
GRID_S = 10.0  # resolution of the rate, in seconds


@dataclass(frozen=True)
class TrafficShape:
    """The parameters of production traffic.

    - `requests_s`: requests per second, averaged over a weekday without noise.
    - `peak_to_valley`: the highest rate of a day divided by the lowest. `peak_hour`: when it is highest, in hours since
      midnight, 0 to 24.
    - `weekend_share`: the rate on days 5 and 6 of a week, relative to a weekday.
    - `noise`: standard deviation of the logarithm of a random factor of the rate. The factor changes slowly, over
      `noise_s` seconds.
    - `surges_day`: mean number of sudden rises per day. Each multiplies the rate by `surge_factor` for `surge_s` s.
    - `burst_shape`: shape of the Gamma distribution of times between requests. 1.0 is a Poisson process; smaller
      numbers are burstier.
    - `prompt_tokens`, `sampled_tokens`: medians of log-normal distributions, whose logarithms have the standard
      deviation `tokens_spread`. No request has more than `max_tokens` of either."""

    requests_s: float = ranged(2.0, low=1e-6, high=1e3)
    peak_to_valley: float = ranged(4.0, low=1.0)
    peak_hour: float = ranged(15.0, low=0.0, high=24.0)
    weekend_share: float = ranged(0.6, low=0.0)
    noise: float = ranged(0.12, low=0.0, high=2.0)
    noise_s: float = ranged(1_800.0, low=1.0)
    surges_day: float = ranged(1.0, low=0.0, high=1e3)
    surge_factor: float = ranged(1.5, low=0.0)
    surge_s: float = ranged(600.0, low=0.0)
    burst_shape: float = ranged(0.5, low=0.01)
    prompt_tokens: float = ranged(1_000.0, low=1.0)
    sampled_tokens: float = ranged(400.0, low=1.0)
    tokens_spread: float = ranged(0.8, low=0.0, high=3.0)
    max_tokens: int = ranged(8_192, low=1)


@dataclass(frozen=True)
class Arrivals:
    """Requests in order of arrival: `at_s` [R] in seconds, `prompt_tokens` [R], `sampled_tokens` [R], each at least 1.

    `duration_s`: how long requests arrive, in seconds."""

    at_s: F64
    prompt_tokens: I64
    sampled_tokens: I64
    duration_s: float

    def between(self, start_s: float, stop_s: float) -> Arrivals:
        """Return the requests of the time [start_s, stop_s), with times relative to `start_s`."""
        first, last = np.searchsorted(self.at_s, [start_s, stop_s])
        part = slice(int(first), int(last))
        at_s = self.at_s[part] - start_s
        return Arrivals(at_s, self.prompt_tokens[part], self.sampled_tokens[part], stop_s - start_s)


def make_arrivals(shape: TrafficShape, duration_s: float, *, seed: int) -> Arrivals:
    """Make the requests of the first `duration_s` seconds of a week.

    >>> made = make_arrivals(TrafficShape(), 3_600.0, seed=1)
    >>> bool((made.at_s == make_arrivals(TrafficShape(), 3_600.0, seed=1).at_s).all())
    True
    """
    rng = np.random.default_rng(seed)
    edges = np.append(np.arange(0.0, duration_s, GRID_S), duration_s)
    expected = np.concatenate([[0.0], np.cumsum(_rates(shape, edges[:-1], rng) * np.diff(edges))])
    number = int(expected[-1] + 6 * np.sqrt(expected[-1] / shape.burst_shape) + 10)
    gaps = rng.gamma(shape.burst_shape, 1 / shape.burst_shape, number)  # of mean 1 in units of expected requests
    units = np.cumsum(gaps)
    at_s = np.interp(units[units < expected[-1]], expected, edges)

    def tokens(median: float) -> I64:
        drawn = median * np.exp(shape.tokens_spread * rng.standard_normal(len(at_s)))
        return np.clip(np.rint(drawn), 1, shape.max_tokens).astype(np.int64)

    return Arrivals(at_s, tokens(shape.prompt_tokens), tokens(shape.sampled_tokens), duration_s)


def _rates(shape: TrafficShape, at_s: F64, rng: np.random.Generator) -> F64:
    """The expected requests per second at the times `at_s`, which are `GRID_S` apart."""
    swing = (shape.peak_to_valley - 1) / (shape.peak_to_valley + 1)
    daily = 1 + swing * np.cos(2 * np.pi * (at_s / DAY_S - shape.peak_hour / 24))
    weekly = np.where(at_s // DAY_S % 7 >= 5, shape.weekend_share, 1.0)
    keep = np.exp(-GRID_S / shape.noise_s)
    drawn = rng.standard_normal(len(at_s))
    noise, level = np.empty(len(at_s)), float(rng.standard_normal())
    for i, one in enumerate(drawn):  # a first-order autoregression
        level = keep * level + np.sqrt(1 - keep**2) * one
        noise[i] = level
    rates = shape.requests_s * daily * weekly * np.exp(shape.noise * noise - shape.noise**2 / 2)
    for start in rng.uniform(0, at_s[-1] + GRID_S, rng.poisson(shape.surges_day * (at_s[-1] + GRID_S) / DAY_S)):
        rates[(at_s >= start) & (at_s < start + shape.surge_s)] *= shape.surge_factor
    return rates
