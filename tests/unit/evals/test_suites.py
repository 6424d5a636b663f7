"""Suites as files, their gates and results, and what an evaluation costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.evals.test_evals import row

from etude.dashboard.leaderboard import page, write_leaderboard
from etude.errors import ConfigError, InputError, StoreError
from etude.evals import EvalRow, evaluate, read_rows, write_rows
from etude.evals.costs import NO_PRICE, Price, cost, price_of, quantile
from etude.evals.records import EvalRecord, gate_reports, read_record, read_records, record_path, write_record
from etude.evals.result import TermMean
from etude.evals.suites import BUILT_IN, METRICS, Gate, Purpose, read_suite, values_of
from etude.prices import Prices, TokenPrices
from etude.records.task import Split

SUITE = """
name = "mine"
purpose = "tool use"
splits = ["heldout", "transfer"]
samples = 4

[tasks]
source = "repair"

[[gates]]
metric = "rate"
at_least = 0.5

[[gates]]
metric = "dollars_per_solved"
at_most = 0.01
"""


def test_every_built_in_suite_can_be_read_and_has_the_name_of_its_file() -> None:
    assert {"own", "repair", "brevity", "following", "interruption", "long", "humaneval", "tools"} <= {*BUILT_IN}
    assert {"mined", "swe", "harbor"} <= {*BUILT_IN}
    for name in BUILT_IN:
        assert read_suite(name).name == name
    assert {read_suite(name).purpose for name in BUILT_IN} == set(Purpose)


def test_a_suite_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SUITE)
    found = read_suite(str(path), ["num_tasks=7"])
    assert (found.num_tasks, found.samples, found.splits) == (7, 4, (Split.HELDOUT, Split.TRANSFER))
    path.write_text('general_text = "text.txt"\n' + SUITE)
    assert read_suite(str(path)).general_text == tmp_path / "text.txt"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('purpose = "toll use"', "did you mean 'tool use'"),
        ("smaples = 4", "did you mean 'samples'"),
        ('splits = ["heldout", "heldout"]', "none twice"),
        ('name = "../x"', "cannot be the name of a folder"),
    ],
)
def test_a_mistake_in_a_suite_is_named(change: str, said: str, tmp_path: Path) -> None:
    path, key = tmp_path / "mine.toml", change.split(" = ")[0]
    kept = [line for line in SUITE.splitlines() if not line.startswith(f"{key} = ")]
    path.write_text("\n".join([change, *kept]))
    with pytest.raises(ConfigError) as raised:
        read_suite(str(path))
    assert said in str(raised.value)


def test_unknown_suites_metrics_and_gates_without_a_bound_are_refused() -> None:
    with pytest.raises(InputError, match="no suite 'reapir'") as raised:
        read_suite("reapir")
    assert "did you mean 'repair'" in raised.value.hint
    with pytest.raises(ValueError, match="did you mean 'rate'"):
        Gate("rat", at_least=0.5)
    with pytest.raises(ValueError, match="neither at_least nor at_most"):
        Gate("rate")


def played(solved: int, n: int, **facts: object) -> list[EvalRow]:
    rows = [row(f"t{i // 2:02d}", float(i < solved), attempt=i % 2) for i in range(n)]
    return [replace(one, prompt=1000, cached=400, **facts) for one in rows]  # type: ignore[arg-type]


PRICE = Price(machine_second=0.001, tokens=TokenPrices(input=2.0, cached_input=0.5, output=10.0))


def test_dollars_are_those_of_tokens_and_machines_by_solved_rollouts_and_by_solved_tasks() -> None:
    rows = played(6, 8)  # three tasks solved twice, one never
    each = (600 * 2.0 + 400 * 0.5 + 20 * 10.0) / 1e6 + 0.5 * 0.001
    found = evaluate(rows, name="a", split="heldout", step=0, wall_s=9.0, price=PRICE)
    assert found.dollars == pytest.approx(8 * each)
    assert found.dollars_per_solved == pytest.approx(8 * each / 6)
    assert found.dollars_per_solved_task == pytest.approx(8 * each / 3)
    assert (found.prompt_mean, found.cached_share, found.machine_s) == (1000.0, 0.4, 4.0)
    assert evaluate(played(0, 8), name="a", split="", step=0, wall_s=9.0, price=PRICE).dollars_per_solved is None


TERMS = """
[[rewards.terms]]
name = "tone"
kind = "my_package.rewards:Tone"

[[gates]]
metric = "rewards.tone"
at_least = 0.6
"""


def test_a_suites_terms_have_means_with_intervals_that_gates_may_bound_and_unknown_passes_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SUITE + TERMS)
    suite = read_suite(str(path))

    def gate(rows: list[EvalRow]) -> tuple[TermMean, str]:
        result = evaluate(rows, name="a", split="", step=0, wall_s=1.0)
        return result.terms["tone"], gate_reports(suite, values_of(result))[-1].failure

    rows = [replace(one, terms=f'{{"tone": {0.5 + i / 14}}}') for i, one in enumerate(played(6, 8))]
    mean, failure = gate(rows)
    assert (mean.value, mean.num_known, failure) == (pytest.approx(0.75), 8, "")
    assert mean.low is not None
    assert mean.high is not None
    assert 0.3 < mean.low < 0.6 < 0.9 < mean.high < 1.0
    mean, failure = gate([replace(rows[0], terms='{"tone": null}'), *rows[1:]])
    assert (mean.num_known, mean.num_unknown, failure) == (7, 1, "rewards.tone is unknown")
    mean, failure = gate([replace(one, terms='{"tone": -2.5}') for one in rows])
    assert (mean.value, mean.low, failure) == (-2.5, -2.5, "rewards.tone = -2.5, must be at least 0.6")
    mean, _ = gate([replace(rows[0], terms='{"tone": -2.5}')])
    assert (mean.value, mean.low, mean.high) == (-2.5, None, None), "one problem has no interval"
    assert evaluate(rows, name="a", split="", step=0, wall_s=1.0).rate == 0.75


def test_a_gate_on_a_term_that_the_suite_does_not_measure_and_audits_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SUITE + TERMS.replace('"rewards.tone"', '"rewards.tune"'))
    with pytest.raises(ConfigError, match=r"did you mean 'rewards\.tone'"):
        read_suite(str(path))
    path.write_text(SUITE + TERMS + '[[rewards.audits]]\nterm = "tone"\nby = "grade"\n')
    with pytest.raises(ConfigError, match="leave them out of a suite"):
        read_suite(str(path))


def test_what_is_unknown_is_never_0() -> None:
    rows = played(4, 8)
    assert cost(rows, NO_PRICE, wall_s=1.0) is None
    assert cost(rows, replace(PRICE, machine_second=None), wall_s=1.0) is None
    assert cost(rows, replace(PRICE, tokens=TokenPrices(input=2.0, output=10.0)), wall_s=1.0) is None
    assert cost([replace(rows[0], prompt=None)], PRICE, wall_s=1.0) is None
    assert cost([replace(rows[0], cached=None)], PRICE, wall_s=1.0) is None
    same = replace(PRICE, tokens=TokenPrices(input=2.0, cached_input=2.0, output=10.0))
    assert cost([replace(rows[0], cached=None)], same, wall_s=1.0) == pytest.approx(0.0022 + 0.0005)
    known = evaluate([row("a")], name="a", split="", step=0, wall_s=1.0)
    assert (known.dollars, known.prompt_mean, known.cached_share) == (None, None, None)
    assert evaluate([], name="a", split="", step=0, wall_s=1.0).latency_p50_s is None


def test_engines_are_paid_by_the_hour_when_the_model_has_no_price() -> None:
    table = Prices(machine_second=0.0, gpu_hours={"h100": 3.6})
    price = price_of(table, "policy", gpu="h100", num_gpus=2)
    assert cost(played(4, 8), price, wall_s=100.0) == pytest.approx(0.2)
    assert cost(played(4, 8), price_of(table, "policy"), wall_s=100.0) is None


def test_quantiles_of_latency_are_values_that_were_measured() -> None:
    values = [float(i) for i in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([7.0], 0.99)) == (50.0, 99.0, 7.0)


def record(tmp_path: Path, label: str, solved: int, price: Price = PRICE) -> EvalRecord:
    rows = played(solved, 8)
    suite_file = tmp_path / "mine.toml"
    suite_file.write_text(SUITE)
    suite = read_suite(str(suite_file))
    result = evaluate(rows, name=label, split="heldout", step=0, wall_s=2.0, price=price)
    values = values_of(result)
    found = EvalRecord(
        suite=suite.name,
        purpose=suite.purpose,
        suite_digest=suite.digest([]),
        label=label,
        model="model",
        url="",
        version=None,
        prompted=False,
        price_name="policy",
        result=result,
        general_bits_per_byte=None,
        gates=gate_reports(suite, values),
        date="2026-01-01T00:00:00+00:00",
    )
    out = tmp_path / "out"
    write_rows(record_path(out, suite.name, label).with_suffix(".parquet"), rows)
    write_record(out, found)
    return found


def test_gates_of_unknown_and_of_broken_bounds_are_not_passed(tmp_path: Path) -> None:
    assert [report.failure for report in record(tmp_path, "good", 6).gates] == ["", ""]
    broken = [report.failure for report in record(tmp_path, "bad", 2, NO_PRICE).gates]
    assert broken == ["rate = 0.25, must be at least 0.5", "dollars_per_solved is unknown"]


def test_a_result_is_read_as_it_was_written_and_damage_is_named(tmp_path: Path) -> None:
    written = record(tmp_path, "a model/with <b>", 6)
    [(found, path)] = read_records(tmp_path / "out")
    assert found == written
    assert [one.cached for one in read_rows(path.with_suffix(".parquet"))] == [400] * 8
    raw = json.loads(path.read_text())
    raw["result"]["solved"] = 8
    path.write_text(json.dumps(raw))
    with pytest.raises(StoreError, match="is damaged") as damaged:
        read_record(path)
    assert str(damaged.value).count("hint:") == 1
    path.write_text("{")
    with pytest.raises(StoreError, match="is not the result"):
        read_record(path)
    with pytest.raises(StoreError, match="cannot be read"):
        read_record(tmp_path)  # a folder
    with pytest.raises(StoreError, match="has no result"):
        read_records(tmp_path / "nowhere")


def test_the_leaderboard_compares_models_of_a_suite_and_escapes_their_names(tmp_path: Path) -> None:
    record(tmp_path, "good", 8)
    record(tmp_path, "<script>", 3, NO_PRICE)
    records = read_records(tmp_path / "out")
    html = page(records)
    assert html.index("<td>good</td>") < html.index("<td>&lt;script&gt;</td>")
    assert "<script" not in html
    assert "<td>unknown</td>" in html
    assert "-0.625" in html
    assert html.count("<svg") == 3
    table = html.index("<table")
    assert html[:table].rindex('<div class="results">') > html[:table].rindex("</div>"), "wide tables can be scrolled"
    assert ".results { overflow-x: auto;" in html
    assert "<td>–</td>" in html, "no judges"
    assert write_leaderboard(tmp_path / "page.html", records).read_text().startswith("<!doctype html>")


def test_a_gate_may_bound_what_a_model_forgets_and_needs_the_untrained_one_beside(tmp_path: Path) -> None:
    result = evaluate(played(6, 8), name="a", split="heldout", step=0, wall_s=1.0)
    gate = Gate("general_rise", at_most=0.05)
    alone = values_of(result, general_bits_per_byte=2.5)
    assert (alone["general_bits_per_byte"], gate.failure(alone["general_rise"])) == (2.5, "general_rise is unknown")
    risen = values_of(result, general_bits_per_byte=2.5, untrained_bits_per_byte=2.25)
    assert gate.failure(risen["general_rise"]) == "general_rise = 0.25, must be at most 0.05"
    assert values_of(result)["num_invalid"] == 0.0
    assert set(risen) == set(METRICS)


def test_the_digest_of_a_suite_depends_on_what_is_measured_and_not_on_its_gates(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SUITE)
    with_gates = read_suite(str(path))
    path.write_text(SUITE[: SUITE.index("[[gates]]")])
    assert read_suite(str(path)).digest([]) == with_gates.digest([])
    assert read_suite(str(path), ["samples=5"]).digest([]) != with_gates.digest([])
