"""The output of ``etude tasks``: proven, weak and mined tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.here import needs
from tests.unit.tasks.repositories import shop

from etude.cli import main
from etude.errors import Exit

CASES = [{"module": "own", "function": "add", "args": [2, 2], "expected": 4}]


@pytest.fixture(autouse=True)
def _machines() -> None:
    needs("namespace")


def _task(folder: Path) -> None:
    (folder / "files").mkdir(parents=True)
    (folder / "answer" / "reference").mkdir(parents=True)
    (folder / "task.toml").write_text('instruction = "write add"\nexports = ["own.py"]\nsplit = "validation"\n')
    (folder / "files" / "own.py").write_text("def add(a, b):\n    pass\n")
    (folder / "answer" / "reference" / "own.py").write_text("def add(a, b):\n    return a + b\n")
    (folder / "answer" / "cases.json").write_text(json.dumps(CASES))


def test_weak_tasks_are_shown_and_every_wrong_patch_that_passes_is_in_the_report(tmp_path, capsys) -> None:
    _task(tmp_path / "tasks" / "one")
    out = tmp_path / "report.json"
    argv = ["tasks", "check", str(tmp_path / "tasks"), "--split", "all", "--mutants", "9", "--leaks", "--out", str(out)]
    assert main(argv) == Exit.DONE
    said = capsys.readouterr().out
    assert "1 of 1 of all splits tasks" in said
    assert "no weak tasks" in said
    report = json.loads(out.read_text())
    assert report["num_proven"] == 1
    assert report["num_mutants"] == 2
    assert report["num_survivors"] == 0
    cases = tmp_path / "tasks" / "one" / "answer" / "cases.json"
    cases.write_text(json.dumps([{**CASES[0], "args": [4, 0]}]))
    assert main(argv) == Exit.DONE
    said = capsys.readouterr().out
    assert "1 of 2 wrong patches pass" in said
    assert "+    return a - b" in said
    [task] = json.loads(out.read_text())["tasks"]
    assert task["weaknesses"] == ["1 of 2 wrong patches pass"]
    assert task["survivors"][0]["kind"] == "arithmetic"


def test_a_task_that_does_not_prove_itself_is_named_with_its_folder(tmp_path, capsys) -> None:
    _task(tmp_path / "tasks" / "fine")
    _task(broken := tmp_path / "tasks" / "wrong")
    (broken / "answer" / "reference" / "own.py").write_text("def add(a, b):\n    return a * b + 1\n")
    assert main(["tasks", "check", str(tmp_path / "tasks"), "--split", "all"]) == Exit.FAILED
    said = capsys.readouterr().out
    assert f" in {broken}: reference solution scores 0" in said
    assert "fine" not in said


@pytest.mark.parametrize(
    ("command", "starts"),
    [
        (["pyhton", "tests.py"], False),
        (["sh", "-c", "pyhton tests.py"], False),
        (["python3", "-c", "import own; own.add(1, 1) == 2 or exit(127); exit(1)"], True),  # it fails, and it ran
    ],
)
def test_a_test_command_that_cannot_start_is_named(tmp_path, capsys, command, starts) -> None:
    _task(folder := tmp_path / "tasks" / "one")
    with (folder / "task.toml").open("a") as out:
        out.write(f"test_command = {json.dumps(command)}\n")
    code = main(["tasks", "check", str(tmp_path / "tasks"), "--split", "validation"])
    said = capsys.readouterr().out
    assert code == (Exit.DONE if starts else Exit.FAILED), said
    assert ("its test_command" in said and "pyhton" in said) is not starts


def test_tasks_are_mined_and_the_same_command_tries_nothing_twice(tmp_path, capsys) -> None:
    shop(tmp_path / "repo")
    argv = ["tasks", "mine", str(tmp_path / "repo"), "--out", str(tmp_path / "out"), "--num", "10"]
    for _ in range(2):
        assert main(argv) == Exit.DONE
        said = capsys.readouterr()
        assert "1 tasks from 4 attempts" in said.out
        assert "its tests pass without it" in said.out
        assert "3 failing tests, 1 passing tests" in said.err


def test_a_repository_that_cannot_be_mined_is_refused_with_the_reason(tmp_path, capsys) -> None:
    (tmp_path / "plain").mkdir()
    assert main(["tasks", "mine", str(tmp_path / "plain"), "--out", str(tmp_path / "out")]) == Exit.BAD_INPUT
    assert "hint: give a Git repository" in capsys.readouterr().err
    assert main(["tasks", "mine", str(tmp_path / "plain"), "--module", "a.py"]) == Exit.BAD_INPUT
    assert main(["tasks", "mine", str(tmp_path / "plain"), "--deletions"]) == Exit.FAILED
    assert "can be deleted to make a task" in capsys.readouterr().err
