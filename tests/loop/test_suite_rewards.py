"""Reward terms of a suite: measured on held-out tasks, in the result, its gates and the leaderboard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.judge_server import ScriptedJudge, judge_in_a_thread

from etude import cli as etude
from etude.evals.records import read_record, rows_beside

SUITE = """
name = "terms"
purpose = "correctness"
num_tasks = 2
samples = 2

[tasks]
source = "repair"

[[rewards.terms]]
name = "brief"
kind = "examples.plugins.rewards:FewTurns"

[[rewards.terms]]
name = "facts"
when = "grade"

[rewards.terms.kind]
kind = "judge"
rubric = "{folder}/facts.toml"
url = "{url}/v1"
model = "m"
cache = "{folder}/j.sqlite"
prices = "{folder}/prices.toml"

[[gates]]
metric = "rewards.brief"
at_least = 0.99
"""


@pytest.fixture
def judge() -> Iterator[ScriptedJudge]:
    yield from judge_in_a_thread()


def test_a_suites_terms_are_measured_on_its_rollouts_and_their_judges_are_paid(
    tmp_path: Path, judge: ScriptedJudge, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "facts.toml").write_text('[[aspects]]\nname = "facts"\nquestion = "How many facts?"\n')
    (tmp_path / "prices.toml").write_text("[models.m]\ninput = 2.0\noutput = 2.0\ncached_input = 2.0\n")
    suite, out = tmp_path / "suite.toml", tmp_path / "out"
    suite.write_text(SUITE.format(folder=tmp_path, url=judge.url))
    assert etude.main(["eval", str(suite), "--baseline", "oracle", "--out", str(out)]) == 1, "the gate is not passed"
    said = capsys.readouterr()
    path = out / "terms" / "oracle.json"
    record = read_record(path)
    assert record.result.rate == 1.0
    brief, facts = record.result.terms["brief"], record.result.terms["facts"]
    assert (brief.num_known, brief.num_unknown, facts.num_known) == (4, 0, 4)
    turns = [1.0 - row.turns / 8 for row in rows_beside(path)]
    assert brief.value == pytest.approx(sum(turns) / 4)
    assert brief.low is not None
    assert brief.low < 0.99
    assert "rewards.brief = " in said.err
    assert "remark" not in said.err
    assert all({*json.loads(row.terms)} == {"brief", "facts"} for row in rows_beside(path))
    assert record.result.judge_dollars is not None
    assert 0.0 < record.result.judge_dollars < 1.0
    assert etude.main(["leaderboard", str(out)]) == 0
    html = (out / "leaderboard.html").read_text()
    assert "<th>brief</th><th>facts</th>" in html
    assert f"{brief.value:.3f} (" in html


@pytest.mark.slow
def test_a_gate_on_the_cost_of_a_judge_that_never_answered_passes_with_a_remark(
    tmp_path: Path, judge: ScriptedJudge, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "facts.toml").write_text('[[aspects]]\nname = "facts"\nquestion = "How many facts?"\n')
    (tmp_path / "prices.toml").write_text("[models.m]\ninput = 2.0\noutput = 2.0\ncached_input = 2.0\n")
    judge.fault = lambda _: 401
    suite, out = tmp_path / "suite.toml", tmp_path / "out"
    text = SUITE.format(folder=tmp_path, url=judge.url).replace("rewards.brief", "judge_dollars")
    suite.write_text(text.replace("at_least = 0.99", "at_most = 1.0"))
    assert etude.main(["eval", str(suite), "--baseline", "oracle", "--out", str(out)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "remark: the judge's term facts is unknown for 4 of 4 rollouts of oracle" in said
    assert read_record(out / "terms" / "oracle.json").result.judge_dollars == 0.0
