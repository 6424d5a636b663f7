"""The tables in the documentation equal the committed results."""

from __future__ import annotations

import json

from benchmarks.fleet import placement as fleet
from benchmarks.learning import laptop_table
from benchmarks.machines import table as machines_table
from benchmarks.numerics import table as numerics_table
from benchmarks.report import RESULTS
from benchmarks.run import plan, scale_table
from benchmarks.weights import delta_table


def test_the_page_of_deltas_has_the_tables_of_the_committed_results():
    text = delta_table.PAGE.read_text()
    assert delta_table.page(text) == text


def test_the_page_of_bursts_has_the_numbers_of_the_committed_result():
    text = fleet.PAGE.read_text()
    assert fleet.page(text) == text


def test_the_guide_to_machines_has_the_numbers_of_the_committed_results():
    text = machines_table.PAGE.read_text()
    assert machines_table.page(text) == text


def test_the_first_page_and_the_example_have_the_numbers_of_the_committed_result():
    for path in laptop_table.PAGES:
        assert laptop_table.page(path) == path.read_text()


def test_the_page_of_scale_has_the_tables_of_the_committed_results():
    text = scale_table.PAGE.read_text()
    assert scale_table.page(text) == text


def test_the_guide_to_plans_has_the_table_of_the_committed_result():
    text = plan.PAGE.read_text()
    assert plan.page(text) == text


def test_the_page_of_numerics_has_the_tables_and_the_pictures_of_the_committed_results():
    text = numerics_table.PAGE.read_text()
    assert numerics_table.page(text) == text
    assert len(numerics_table.pictures()) == 3
    for name, picture in numerics_table.pictures().items():
        assert numerics_table.PAGE.with_name(name).read_text() == picture
        assert f"({name})" in text


def test_a_result_of_numerics_is_told_once_it_is_there(tmp_path, monkeypatch):
    (tmp_path / "floating_point.json").write_bytes((RESULTS / "floating_point.json").read_bytes())
    monkeypatch.setattr(numerics_table, "RESULTS", tmp_path)
    assert [line for line in numerics_table.tables() if line.startswith("| ---")] == [
        "| --- | --- | --- | --- | --- | --- |"
    ]
    found = {"family": "qwen3-moe", "dtype": "bfloat16", "compared": 1200}
    rate = {"rate": 0.5, "low": 0.4, "high": 0.6}
    behind = {"difference": -0.01, "low": -0.03, "high": 0.01}
    made = {
        "exact": {
            "bits": [{**found, "mode": "exact", "differing": 0}, {**found, "mode": "native", "differing": 300}],
            "cost": [{"dtype": "float32", "what": "prefill", "exact_costs": 1.124}],
            "operators": [{"operator": "linear", "tokens": n, "exact_costs": 1 + n / 100} for n in (1, 64)],
        },
        "parity_doctor": {
            "far_by_dtype_and_mode": {"float32 native": {"cases": 9, "named": 5, "blamed": 7}},
            "clean": [{"dtype": "float32", "mode": "native", "engines": 6, "false_alarms": i} for i in (0, 1)],
        },
        "quantised": {
            "formats": {
                "mxfp8": {
                    "exact, float32": {"tokens": 1000, "differing": 0},
                    "error": {"kl": 0.00123, "same_best_token": 0.985},
                    "shipped": {"bytes": 1_600_000},
                    "decode_ratio": 1.2,
                    "training_ratio": 1.5,
                }
            }
        },
        "numerics_runs": {
            "ways": {way: {"before": rate, "after": rate} for way in ("default", "mxfp8")},
            "after_minus_default": {"mxfp8": behind},
            "seconds": {way: {"rl_cpu_s": 80.4} for way in ("default", "mxfp8")},
        },
    }
    for name, numbers in made.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(numbers))
    lines = numerics_table.tables()
    for row in (
        "| qwen3-moe, bf16 | 1,200 | none | 25 % |",
        "| prefill | × 1.12 |  |  |",
        "| linear | × 1.01 | × 1.64 |  |",
        "| native, fp32 | 9 | 5 | 2 | 2 | 1 in 12 engines |",
        "| exact, rounded to mxfp8 | 1,000 |  |  |  | none |",
        "| rounding to mxfp8 | decoding × 1.20, training × 1.50 (emulated) |",
        "| mxfp8 | 0.0012 | 98.5 % | 1,600,000 |",
        "| exact: the default | 0.500 [0.400, 0.600] | 0.500 [0.400, 0.600] |  | 80 s |",
        "| mxfp8 | 0.500 [0.400, 0.600] | 0.500 [0.400, 0.600] | -0.010 [-0.030, +0.010] | 80 s |",
    ):
        assert row in lines
