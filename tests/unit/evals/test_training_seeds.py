"""Several training seeds of a recipe: rates and gains over seeds, what is left out, and the file of the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.evals.test_evals import row

from etude.cli.evaluate import seeds_line
from etude.dashboard.leaderboard import page
from etude.errors import InputError, StoreError
from etude.evals import EvalRow, evaluate, write_rows
from etude.evals.records import EvalRecord, SeedsRecord, read_seeds, seeds_path, write_record
from etude.evals.suites import Purpose
from etude.evals.training_seeds import over_training_seeds


def played(solved: int, *, outcome: str = "graded") -> list[EvalRow]:
    return [row(f"t{i:02d}", float(i < solved), outcome=outcome if i == 0 else "graded") for i in range(40)]


def test_a_recipe_has_the_rate_of_its_models_and_an_interval_that_knows_how_much_they_differ() -> None:
    alike = over_training_seeds({"a": played(20), "b": played(21), "c": played(19)})
    apart = over_training_seeds({"a": played(5), "b": played(20), "c": played(35)})
    assert (alike.rate, apart.rate) == (0.5, 0.5)
    assert apart.by_seed == {"a": 0.125, "b": 0.5, "c": 0.875}
    assert apart.high - apart.low > 2 * (alike.high - alike.low)
    assert (alike.num_tasks, alike.num_problems, alike.num_left_out, alike.gain) == (40, 40, 0, None)


def test_a_gain_is_paired_by_seed_and_task() -> None:
    trained = {"a": played(30), "b": played(32), "c": played(34)}
    found = over_training_seeds(trained, [played(10), played(12), played(14)], general_rises=[0.1, 0.2, 0.15])
    assert found.gain is not None
    assert found.gain[0] == pytest.approx(0.5)
    assert found.gain[1] > 0.2
    assert found.general_rise is not None
    assert found.general_rise[0] == pytest.approx(0.15)
    assert found.general_rise[1] < 0.15 < found.general_rise[2]


def test_tasks_without_a_valid_rollout_of_every_model_are_left_out_and_counted() -> None:
    found = over_training_seeds({"a": played(20), "b": played(20, outcome="machine")})
    assert (found.num_tasks, found.num_left_out) == (39, 1)
    assert found.by_seed["a"] == pytest.approx(19 / 39), "t00 is left out for both"
    found = over_training_seeds({name: played(20, outcome="machine") for name in "ab"})
    assert (found.num_tasks, found.num_left_out) == (39, 1), "also where no model has a valid one"
    with pytest.raises(InputError, match="no task has a valid rollout of every model"):
        over_training_seeds({"a": [row("x", 1.0)], "b": [row("y", 1.0)]})
    with pytest.raises(InputError, match="got 1 models and 0 untrained models"):
        over_training_seeds({"a": played(3)})


def test_the_result_is_read_as_it_was_written_and_damage_is_named(tmp_path: Path) -> None:
    record = SeedsRecord(
        suite="mine",
        purpose=Purpose.CORRECTNESS,
        suite_digest="0" * 16,
        label="3 seeds of x",
        result=over_training_seeds({"a": played(5), "b": played(9)}, [played(2), played(2)], general_rises=[0.1, 0.2]),
        gates=(),
        date="2026-01-01T00:00:00+00:00",
    )
    path = write_record(tmp_path, record)
    assert path == seeds_path(tmp_path, "mine", "3 seeds of x")
    assert read_seeds(tmp_path) == [record]
    line = seeds_line(record)
    assert line.startswith("3 seeds of x: 0.175 (")
    assert "above the untrained models by 0.125" in line
    assert "+0.150 bits per byte" in line
    rows = played(5)
    of_a = evaluate(rows, name="a", split="heldout", step=0, wall_s=1.0)
    model = EvalRecord(
        suite="mine",
        purpose=Purpose.CORRECTNESS,
        suite_digest="0" * 16,
        label="a",
        model="a",
        url="",
        version=None,
        prompted=False,
        price_name="policy",
        result=of_a,
        general_bits_per_byte=None,
        gates=(),
        date="2026-01-01T00:00:00+00:00",
    )
    stored = write_record(tmp_path, model)
    write_rows(stored.with_suffix(".parquet"), rows)
    html = page([(model, stored)], [record])
    assert "<td>3 seeds of x</td><td>0.175</td>" in html
    assert "Recipes over training seeds" not in page([(model, stored)], [])
    raw = json.loads(path.read_text())
    raw["result"]["rate"] = 0.9
    path.write_text(json.dumps(raw))
    with pytest.raises(StoreError, match="is damaged"):
        read_seeds(tmp_path)
