"""Rollouts of evaluations, as the command line shows them. Those of training: tests/loop/test_circle.py."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.small_rollouts import finishing, read, version

from etude.cli import main
from etude.cli.rollout_tree import print_views
from etude.dashboard.summary import summarise
from etude.evals import EvalRow, write_rows
from etude.experience import Ledger, make_batch, plan_batch
from etude.records.rollout import Start, TurnKind
from etude.records.view import RolloutView, TurnView
from etude.records.wire import from_json, to_json
from etude.run import RunFolder


def row(rollout_id: str, reward: float, transcript: str, outcome: str = "graded") -> EvalRow:
    return EvalRow(
        task_id=f"task of {rollout_id}", rollout_id=rollout_id, family="arith", problem="", outcome=outcome,
        reward=reward,
        ending="submitted", reason="because", turns=2, sampled=9, malformed=0, wall_s=1.0, tool_s=0.1,
        transcript=transcript,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that was evaluated and has not begun RL."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(tmp_path / "runs" / "a", config_toml="", seed=0)
    write_rows(folder / "evals" / "before.parquet", [row("heldout000001.0", 0.0, "[user] one"), row("b", 1.0, "")])
    write_rows(folder / "evals" / "after.parquet", [row("heldout000001.0", 0.0, "[user] [bold]two", "machine")])
    (folder / "evals" / "during-000010.parquet").write_bytes(b"torn")
    return folder


def test_a_rollout_of_an_evaluation_is_shown_as_each_evaluation_had_it(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollouts", "show", "heldout000001.0"]) == 0
    said = capsys.readouterr()
    task, old = (
        "task of heldout000001.0",
        "(recorded by an earlier version of etude, which kept the text and not the turns)",
    )
    assert f"evaluation before · arith · task {task}\nreward 0: because\n  {old}\n  [user] one\n" in said.out
    assert (
        f"evaluation after · arith · task {task}\ninvalid at machine: because\n  {old}\n  [user] [bold]two\n"
        in said.out
    )
    assert "during-000010.parquet is not an evaluation" in said.err


def test_the_rollouts_of_an_evaluation_are_listed(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", "list", "--eval", "before", "--limit", "1"]) == 0
    said = capsys.readouterr().out
    assert "│ heldout000001.0 " in said
    assert "│ b " not in said
    assert "the last 1 of 2 rollouts; all of them: --limit 2" in said
    assert main(["rollouts", "list", "--eval", "before"]) == 0
    assert "the last" not in capsys.readouterr().out


def test_the_rollouts_of_training_are_listed_with_their_number(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(run / "ledger.sqlite", capacity=8)
    finishing(ledger)("g000000", [0.0, 1.0, 1.0])
    ledger.close()
    monkeypatch.setattr("etude.cli.rollouts.console", lambda: Console(width=60))
    for argv, says in (([], "the last 2 of 3 rollouts"), (["--state", "graded"], "the last 2 of 3 rollouts")):
        assert main(["rollouts", "list", "--limit", "2", *argv]) == 0
        said = capsys.readouterr().out
        assert says in said
        assert "│ g000000.2 │" in said, "an id is never cut or wrapped"
        assert "g000000.0" not in said


def test_the_history_of_a_rollout_has_dates(capsys: pytest.CaptureFixture[str]) -> None:
    move = {"t": 1.8e9, "origin": "admitted", "state": "running", "reason": ""}
    print_views([RolloutView(rollout_id="g0.1", source="training", history=(move,))], full=False)
    assert re.search(r"\n    2027-01-1\d \d\d:\d\d:\d\d admitted -> running\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("show nosuch", "runs/a has no rollout 'nosuch': 2 rollouts of training and evaluations\n  hint: list them"),
        ("show heldout00001.0", "hint: did you mean 'heldout000001.0'?, or list them"),
        ("show heldout000001", "hint: it is a group of heldout000001.0, or list them"),
        ("list --eval beofre", "did you mean 'before'?"),
        ("list --eval before --state trained", "--state and --eval cannot be used together"),
        ("show g000003.0 a", "the run comes first: etude rollouts show a g000003.0"),
    ],
)
def test_what_is_not_there_is_bad_input(
    run: RunFolder, argv: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollouts", *argv.split()]) == 2
    assert says in capsys.readouterr().err


def test_all_of_a_rollout_is_printed_as_json_and_texts_are_whole_with_full(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    facts: dict[str, Any] = {"kind": TurnKind.ACT, "start": Start.FIRST, "stop_reason": "stop", "engine": "e"}
    numbers: dict[str, Any] = {"num_new": 9, "num_prompt": 9, "num_sampled": 2, "num_cached": 4, "steps": (3,)}
    long = "[tool] " + "\n".join(f"line {i}" for i in range(9)) + " \x1b[2J"
    turn = TurnView(number=0, parent=None, prompt=long, reply="[call] submit", **facts, **numbers)
    told = dataclasses.replace(row("heldout000007.0", 1.0, ""), tree=to_json((turn,)).decode())
    write_rows(run / "evals" / "after.parquet", [told])
    assert main(["rollouts", "show", "heldout000007.0"]) == 0
    said = capsys.readouterr().out
    assert "  conversation 1\n    0 act  prompt 9 (4 cached), sampled 2 · step 3\n        [tool] line 0\n" in said
    assert "        … 5 more lines\n        [call] submit\n" in said
    assert main(["rollouts", "show", "heldout000007.0", "--full"]) == 0
    said = capsys.readouterr().out
    assert "        line 8 \\x1b[2J\n" in said, "the text of a tool cannot control the terminal"
    assert "more lines" not in said
    assert main(["rollouts", "show", "heldout000007.0", "--json"]) == 0
    [view] = from_json(capsys.readouterr().out, list[RolloutView])
    assert (view.source, view.reward, view.turns) == ("evaluation after", 1.0, (turn,))


def test_rollouts_in_quarantine_are_listed_with_sign_and_grade_whatever_became_of_their_group(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(run / "ledger.sqlite", capacity=8)
    finishing(ledger)("g000000", [0.0, 1.0])
    ledger.quarantine("g000000.0", reason="exit: ends the process by os._exit (calc.py:3)", graded=1.0)
    batch = make_batch(plan_batch([ledger.group("g000000")], batch_id="b000001", step=1, max_lag=0), read)
    ledger.batch(batch)
    ledger.commit(batch.rollout_ids, version(1))
    ledger.close()
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["rollouts", "list", "--state", "quarantined"]) == 0
    said = capsys.readouterr().out
    assert "g000000.0" in said
    assert "trained" in said
    assert "quarantined, graded 1: exit: ends the process by os._exit (calc.py:3)" in said
    assert "g000000.1" not in said
    assert main(["status"]) == 0
    assert "rollouts: 2 trained; 1 of them quarantined" in capsys.readouterr().out
    assert summarise(run.path)["rollouts"] == {"trained": 2}
