"""Tables of prices: what is not in them is unknown, never 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.errors import ConfigError
from etude.prices import Prices, TokenPrices, read_prices

TABLE = """
machine_second = 0.00001
[models."gpt-5-mini"]
input = 0.25
cached_input = 0.025
output = 2
[models."acme/local"]
output = 1.0
[gpu_hours]
h100 = 2.5
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    return path


def test_a_table_has_prices_of_tokens_machines_and_gpus(tmp_path: Path) -> None:
    prices = read_prices(written(tmp_path, TABLE))
    assert prices.machine_second == 0.00001
    assert prices.gpu_hours == {"h100": 2.5}
    assert prices.tokens("gpt-5-mini") == TokenPrices(0.25, 0.025, 2.0)
    assert prices.tokens("gpt-5-mini").cost(1_000_000, 400_000, 100_000) == pytest.approx(0.15 + 0.01 + 0.2)


def test_what_needs_an_unknown_price_has_an_unknown_cost_and_not_0(tmp_path: Path) -> None:
    prices = read_prices(written(tmp_path, TABLE))
    assert prices.tokens("acme/local").cost(10, 0, 5) is None
    assert prices.tokens("acme/local").cost(0, 0, 5) == 5e-6
    assert prices.tokens("another").cost(1, 0, 0) is None
    assert prices.tokens("another").cost(0, 0, 0) == 0.0
    assert Prices().machine_second is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("machine_second = -1.0", "machine_second = -1.0 is out of range"),
        ("[gpu_hours]\nh100 = inf", "gpu_hours.h100 = inf is not a finite number"),
        ("[gpu_hours]\nh100 = 'much'", "gpu_hours.h100"),
        ("[models.a]\ninputs = 1.0", "unknown key 'models.a.inputs'"),
        ("[models.a]\ninput = nan", "models.a.input"),
        ("[models]\na = 3", "models.a: expected a section"),
        ("models = 3", "models"),
        ("machine_seconds = 1.0", "did you mean 'machine_second'"),
        ("a = ", "is not valid TOML"),
    ],
)
def test_invalid_tables_are_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_prices(written(tmp_path, text))
    assert named in str(refused.value)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no table of prices at"):
        read_prices(tmp_path / "none.toml")
