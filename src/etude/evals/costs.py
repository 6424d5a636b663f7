"""Money and time of evaluations: dollars of tokens, machines and GPUs, and quantiles of latency.

What is not known is None, never 0: a server that does not report its tokens, a price that the table does not have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from etude.evals.rows import EvalRow
from etude.prices import UNKNOWN, Prices, TokenPrices


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The prices that an evaluation pays.

    - `machine_second`: dollars per second of a machine (a sandbox). None: unknown.
    - `tokens`: prices of the model's tokens. If none of them is known, engines are paid by the hour: `gpu_hour`, in
      dollars for one GPU, and `num_gpus`."""

    machine_second: float | None = None
    tokens: TokenPrices = UNKNOWN
    gpu_hour: float | None = None
    num_gpus: int = 0


NO_PRICE = Price()


def price_of(prices: Prices, model: str, *, gpu: str = "", num_gpus: int = 0) -> Price:
    """Return the prices for the evaluation of a model.

    `model` is its name in the table. `gpu` is the kind of the GPUs of its engines, and `num_gpus` their number; "" and
    0: the engines have no GPUs, or these cost nothing."""
    hour = prices.gpu_hours.get(gpu)
    return Price(machine_second=prices.machine_second, tokens=prices.tokens(model), gpu_hour=hour, num_gpus=num_gpus)


def lacking(price: Price, model: str) -> list[str]:
    """Return the unknown prices that a cost may need, by their places in a table of prices.

    >>> lacking(Price(tokens=TokenPrices(input=1.0, output=2.0)), "policy")
    ['machine_second', 'models.policy.cached_input']
    """
    found = [] if price.machine_second is not None else ["machine_second"]
    if price.gpu_hour is None or price.tokens != UNKNOWN:
        tokens = price.tokens
        known = {"input": tokens.input, "cached_input": tokens.cached_input, "output": tokens.output}
        found += [f"models.{model}.{key}" for key, one in known.items() if one is None]
    return found


def cost(rows: Sequence[EvalRow], price: Price, *, wall_s: float) -> float | None:
    """Return the dollars that the rollouts of an evaluation cost, valid or not; None if a part of it is unknown.

    `wall_s` is the duration of the evaluation in seconds; its GPUs are paid for this time."""
    machine_s = math.fsum(row.wall_s for row in rows)
    model = _tokens(rows, price) if price.tokens != UNKNOWN else _gpus(price, wall_s)
    if model is None or price.machine_second is None:
        return None
    return model + machine_s * price.machine_second


def _tokens(rows: Sequence[EvalRow], price: Price) -> float | None:
    prompt, cached = total(row.prompt for row in rows), total(row.cached for row in rows)
    if prompt is None:
        return None
    return price.tokens.cost(prompt, cached, sum(row.sampled for row in rows))


def _gpus(price: Price, wall_s: float) -> float | None:
    return None if price.gpu_hour is None or not price.num_gpus else price.gpu_hour * price.num_gpus * wall_s / 3600


def total(values: Iterable[int | None]) -> int | None:
    """Return the sum of values; None if one of them is unknown."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of the values do not exceed; None without values.

    >>> quantile([3.0, 1.0, 2.0, 4.0], 0.5), quantile([], 0.5)
    (2.0, None)
    """
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
