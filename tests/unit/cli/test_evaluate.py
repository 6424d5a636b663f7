"""The arguments of ``etude eval`` that do not fit together."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from etude.cli.evaluate import _price, check_labels, unknown_dollars
from etude.errors import InputError
from etude.loop.evaluation import Baseline
from etude.prices import UNKNOWN


@pytest.mark.parametrize("labels", [["a b", "c", "a/b"], ["a-b", "a-b"]])
def test_labels_with_the_same_file_are_refused_with_the_characters_that_files_may_have(labels: list[str]) -> None:
    with pytest.raises(InputError, match="2 models have the same file for their results") as refused:
        check_labels(Path("evals"), "repair", labels)
    assert "a-b.json" in refused.value.facts
    assert "letters, digits, '@', '.', '_' and '-'" in refused.value.facts
    check_labels(Path("evals"), "repair", ["a b", "c", "a_b"])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text("[models.policy]\ninput = 1.0\noutput = 2.0\n[gpu_hours]\nh100 = 2.5\n")
    return path


def arguments(prices: Path | None, **given: object) -> argparse.Namespace:
    usual = {"price_name": "", "gpu": "", "gpus": 1, "url": None, "model": None}
    return argparse.Namespace(prices=prices, **usual | given)


def test_a_price_that_the_table_does_not_have_is_refused_by_name_and_a_gpu_replaces_those_of_tokens(
    table: Path,
) -> None:
    for given in ({"gpu": "h200"}, {"price_name": "polcy"}):
        with pytest.raises(InputError, match="there is no price of ") as caught:
            _price(arguments(table, **given))
        assert "did you mean" in caught.value.hint
    for prices, given in ((None, {"gpu": "h100"}), (table, {"gpu": "h100", "price_name": "policy"})):
        with pytest.raises(InputError, match=r"needs --prices|exclude each other"):
            _price(arguments(prices, **given))
    name, price = _price(arguments(table, gpu="h100", gpus=2))
    assert (name, price.tokens, price.gpu_hour, price.num_gpus) == ("policy", UNKNOWN, 2.5, 2)
    assert _price(arguments(table))[1].tokens.output == 2.0


def test_an_unknown_cost_is_explained(table: Path, tmp_path: Path) -> None:
    name, price = _price(arguments(table))
    said = unknown_dollars(tmp_path, name, price, table)
    assert said.endswith("does not have machine_second, models.policy.cached_input")
    assert "a script has no prices" in unknown_dollars(Baseline.ORACLE, name, price, table)
    name, price = _price(arguments(table, url="http://x", model="other"))
    assert "models.other.input, models.other.cached_input" in unknown_dollars(tmp_path, name, price, table)
