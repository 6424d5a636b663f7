"""The gate of a release: what a candidate must keep against the stable version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.evals.test_evals import row
from tests.unit.releases.played import settings

from etude.errors import ConfigError, InputError
from etude.evals import evaluate
from etude.evals.costs import Price
from etude.evals.records import EvalRecord, gate_reports
from etude.evals.suites import Gate, Purpose, Suite, values_of
from etude.prices import TokenPrices
from etude.records.completion import Version
from etude.releases import GateResult, check_gate
from etude.releases.gate import Played, read_parity
from etude.releases.settings import SuiteGate, read_settings

OLD, NEW = Version(1, "0a1b2c3d", "ab" * 32), Version(2, "0a1b2c3d", "cd" * 32)


def played(version: Version, solved: int, /, *, n: int = 400, dollars: float | None = 1.0, **changed: Any) -> Played:
    """A suite of `n` tasks of which a version solved some."""
    rows = [row(f"t{i:04d}", float(i < solved)) for i in range(n)]
    price = Price(machine_second=0.0, tokens=TokenPrices(input=0.0, cached_input=0.0, output=0.0))
    result = replace(evaluate(rows, name="x", split="heldout", step=0, wall_s=1.0, price=price), dollars=dollars)
    suite = Suite("repair", Purpose.CORRECTNESS, gates=(Gate("rate", at_least=0.1),))
    record = EvalRecord(
        suite="repair",
        purpose=suite.purpose,
        suite_digest="0" * 16,
        label=str(version),
        model="model",
        url="",
        version=str(version),
        prompted=False,
        price_name="policy",
        result=result,
        general_bits_per_byte=None,
        gates=gate_reports(suite, values_of(result)),
        date="2026-01-01T00:00:00+00:00",
    )
    return Played(msgspec.structs.replace(record, **changed), rows)


def checked(new: Played, old: Played, **gate: Any) -> GateResult:
    return check_gate(settings(gate=(SuiteGate("repair", **gate),)), NEW, OLD, {"repair": (new, old)})


def test_a_candidate_that_is_as_good_passes_and_one_that_may_be_worse_by_the_margin_does_not() -> None:
    old = played(OLD, 300)
    assert checked(played(NEW, 300), old).failures == ()
    assert checked(played(NEW, 340), old).failures == ()
    [failure] = checked(played(NEW, 290), old).failures  # 2.5 points worse, with a margin of 2
    assert "is not shown to be above -0.02" in failure
    assert checked(played(NEW, 290), old, margin=0.1).failures == ()
    [report] = checked(played(NEW, 290), old).suites
    assert (report.value, report.margin) == (pytest.approx(-0.025), 0.02)


def test_too_few_tasks_show_nothing() -> None:
    [failure] = checked(played(NEW, 8, n=10), played(OLD, 8, n=10)).failures
    assert "not shown" in failure


def test_a_task_that_costs_more_is_a_failure_where_costs_are_compared_and_an_unknown_cost_decides_nothing() -> None:
    old = played(OLD, 300)
    assert checked(played(NEW, 300, dollars=1.05), old, cost_rise=0.1).failures == ()
    assert checked(played(NEW, 300, dollars=1.2), old).failures == ()
    [failure] = checked(played(NEW, 300, dollars=1.2), old, cost_rise=0.1).failures
    assert "cost per task +20.0%" in failure
    with pytest.raises(InputError, match="cost per task is unknown"):
        checked(played(NEW, 300, dollars=None), old, cost_rise=0.1)


def test_the_suites_own_gates_are_part_of_it() -> None:
    failures = checked(played(NEW, 20), played(OLD, 20)).failures
    assert failures == ("repair: rate = 0.05, must be at least 0.1",)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": None}, "an unknown version"),
        ({"version": str(OLD)}, str(OLD)),
        ({"suite_digest": "1" * 16}, "same tasks"),
        ({"prompted": True}, "prompt"),
    ],
)
def test_a_result_that_says_nothing_about_the_candidate_decides_nothing(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match="the gate cannot be decided") as refused:
        checked(played(NEW, 300, **changed), played(OLD, 300))
    assert said in refused.value.facts


def test_exchanged_results_are_told_and_decide_nothing() -> None:
    with pytest.raises(InputError, match="are exchanged"):
        checked(played(OLD, 300), played(NEW, 300))


def test_a_suite_without_a_result_and_unknown_parity_decide_nothing_and_parity_that_is_off_fails(
    tmp_path: Path,
) -> None:
    both = settings(gate=(SuiteGate("repair"), SuiteGate("tools")), parity=True)
    results = {"repair": (played(NEW, 300), played(OLD, 300))}
    with pytest.raises(InputError, match="tools: not evaluated"):
        check_gate(both, NEW, OLD, results, parity="near")
    results["tools"] = results["repair"]
    with pytest.raises(InputError, match="parity: unknown"):
        check_gate(both, NEW, OLD, results)
    assert check_gate(both, NEW, OLD, results, parity="off").failures == ("parity: off, must be equal or near",)
    assert check_gate(both, NEW, OLD, results, parity="near").failures == ()
    path = tmp_path / "parity.json"
    path.write_text('{"verdict": "equal"}')
    assert read_parity(path) == "equal"
    for text in ("[]", "{", "{}"):
        path.write_text(text)
        with pytest.raises(InputError, match="not a result of etude parity"):
            read_parity(path)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "'gate' is missing"),
        ('gate = []\nmetrics = [{name = "kept"}]', "at least one suite"),
        ('gate = [{suite = "a"}]\nmetrics = []', "at least one metric"),
        ('gate = [{suite = "a"}]\nmetrics = [{name = "kept"}]\nshares = [5, 1]', "rising percents"),
        ('gate = [{suite = "a"}]\nmetrics = [{name = "kept"}]\nshares = [100]', "rising percents"),
        ('gate = [{suite = "a"}]\nmetrics = [{name = "a"}, {name = "b", margin = 0}]', "margin = 0"),
        ('gate = [{suite = "a"}]\nmetrics = [{name = "kept"}]\nalhpa = 0.1', "did you mean 'alpha'"),
    ],
)
def test_settings_that_make_no_release_are_refused(tmp_path: Path, lines: str, said: str) -> None:
    path = tmp_path / "release.toml"
    path.write_text(lines)
    with pytest.raises(ConfigError) as caught:
        read_settings(path)
    assert said in str(caught.value)


def test_a_result_of_the_same_weights_counts_whichever_start_of_the_learner_published_them() -> None:
    again = str(NEW).replace(NEW.incarnation, "f" * 8)
    assert checked(played(NEW, 300, version=again), played(OLD, 300)).failures == ()
