"""A table of prices in dollars, read from a TOML file: tokens of models, seconds of machines, hours of GPUs.

    machine_second = 0.00001

    [models."gpt-5-mini"]     # dollars per million tokens
    input = 0.25
    cached_input = 0.025
    output = 2.0

    [gpu_hours]
    h100 = 2.5

A price that the table does not have is unknown (None), never 0, and so is every cost that needs it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from etude import config

Dollars = Annotated[float, msgspec.Meta(ge=0.0)]
MaybeDollars = Annotated[float | None, msgspec.Meta(ge=0.0)]


@dataclass(frozen=True)
class TokenPrices:
    """The prices of one model's tokens, in dollars per million. None: unknown."""

    input: MaybeDollars = None
    cached_input: MaybeDollars = None  # of input tokens that the server had in its cache
    output: MaybeDollars = None

    def cost(self, num_input: int, num_cached: int | None, num_output: int) -> float | None:
        """Return the dollars of a number of tokens; None if the price of some of them is unknown.

        `num_input` is all input tokens. `num_cached` of them were in the server's cache; None: it is unknown how many,
        so the dollars are, too, unless both prices are equal.

        >>> TokenPrices(input=2.0, output=10.0).cost(1000, 0, 100)
        0.003
        >>> TokenPrices(input=2.0, output=10.0).cost(1000, 500, 100) is None
        True
        """
        if num_cached is None:
            if self.input != self.cached_input:
                return None
            num_cached = 0
        counts = ((num_input - num_cached, self.input), (num_cached, self.cached_input), (num_output, self.output))
        parts = [(count, price) for count, price in counts if count]
        known = [count * price for count, price in parts if price is not None]
        return math.fsum(known) / 1e6 if len(known) == len(parts) else None


UNKNOWN = TokenPrices()


@dataclass(frozen=True)
class Prices:
    """A table of prices in dollars. Prices that are not in the table are unknown.

    `models`: prices of tokens by the name of the model. `machine_second`: the price of one machine (a sandbox) for a
    second; None: unknown. `gpu_hours`: the price of one GPU for an hour, by the name of its kind."""

    models: Mapping[str, TokenPrices] = field(default_factory=dict)
    machine_second: MaybeDollars = None
    gpu_hours: Mapping[str, Dollars] = field(default_factory=dict)

    def tokens(self, model: str) -> TokenPrices:
        """Return the prices of a model's tokens; all of them are None for a model that the table does not have."""
        return self.models.get(model, UNKNOWN)


def read_prices(path: Path | str) -> Prices:
    """Read a table of prices. Raises `ConfigError` for unknown keys, and for prices that are negative or not
    numbers."""
    return config.build(Prices, config.read(path, noun="table of prices", example="docs/guides/judges.md"))
