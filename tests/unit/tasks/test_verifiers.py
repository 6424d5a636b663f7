"""Environments of the `verifiers` package: the protocol by a recorded child, the real package where it is."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import etude.tasks.verifiers
from etude.errors import NoSource, TaskError
from etude.records.rollout import Boundary, Graded, Invalid
from etude.records.task import Answer, Split
from etude.tasks import check, open_source
from etude.tasks.verifiers import PYTHON, VerifiersSource
from etude.tasks.verifiers.process import Child

CHILD = """
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    def say(**what):
        print(json.dumps({"id": request["id"], **what}), flush=True)
    do, text = request["do"], request.get("completion", "")
    if do == "open":
        if request["environment"] == "bad":
            say(error="ModuleNotFoundError: No module named 'bad'")
        else:
            endless = request["environment"] == "endless"
            say(ok={"version": "0.4.0", "size": None if endless else 40,
                    "hashes": [] if endless else [str(n) for n in range(40)]})
    elif do == "row":
        n = request["index"]
        needs = "a container" if n == 38 else ""
        say(ok={"instruction": f"{n} + 2?", "answer": str(n + 2) if n % 7 else None, "needs": needs})
    elif text == "die":
        print("bye", file=sys.stderr)
        os._exit(3)
    elif text == "hang":
        time.sleep(60)
    elif text == "nonsense":
        print("nonsense", flush=True)
    elif text == "raise":
        say(error="ValueError: odd")
    elif text == "huge":
        say(ok={"reward": 7, "metrics": {}})
    else:
        right = text == str(request["index"] + 2)
        say(ok={"reward": float(right), "metrics": {"length": len(text), "none": None}})
"""


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of the same protocol in place of the real one, in this interpreter."""
    path = tmp_path / "child.py"
    path.write_text(CHILD)
    monkeypatch.setattr(etude.tasks.verifiers, "_PROGRAM", path)


@pytest.fixture
def source(recorded: None) -> Any:
    source = VerifiersSource("sums", sys.executable)
    yield source
    source.close()


def _first(source: VerifiersSource, wanted: bool = True) -> tuple[int, Any]:
    """A train task whose row has an answer, or has none."""
    for index in range(source.size(Split.TRAIN) or 0):
        number = source.number(Split.TRAIN, index)
        if number != 38 and bool(number % 7) == wanted:
            return number, source.task(Split.TRAIN, index)
    raise AssertionError


def _graded(source: VerifiersSource, task: Any, text: str) -> Graded | Invalid:
    return asyncio.run(source.grader().grade(task, Answer(reference={}), {"answer.txt": text.encode()}))


def test_rows_are_tasks_whose_answer_is_judged_by_the_environment(source: VerifiersSource) -> None:
    number, task = _first(source)
    assert task.instruction.startswith(f"{number} + 2?\n\nWrite your answer")
    assert task.exports == ("answer.txt",)
    assert source.answer(task).reference == {"answer.txt": str(number + 2)}
    right, wrong = _graded(source, task, f" {number + 2}\n"), _graded(source, task, "x")
    assert isinstance(right, Graded)
    assert isinstance(wrong, Graded)
    assert (right.grade, wrong.grade) == (1.0, 0.0)
    assert right.values["verifiers.length"] == len(str(number + 2))
    left = asyncio.run(source.grader().grade(task, Answer(reference={}), {}))
    assert isinstance(left, Graded)
    assert left.grade == 0


def test_every_row_is_in_one_split_and_past_the_end_is_an_error(source: VerifiersSource) -> None:
    numbers = [source.number(split, n) for split in Split for n in range(source.size(split) or 0)]
    assert sorted(numbers) == list(range(40))
    with pytest.raises(TaskError, match="no task"):
        source.task(Split.TRAIN, source.size(Split.TRAIN) or 0)


def test_rows_that_cannot_be_judged_or_proven_are_named(source: VerifiersSource) -> None:
    _, task = _first(source, wanted=False)
    assert source.answer(task).reference == {}
    proof = asyncio.run(check(source, source.grader(), Split.TRAIN))
    reasons = {failure.reason for failure in proof.failures}
    assert reasons == {
        "reference solution scores 0: there is no answer.txt",
        "cannot be loaded: row 38 of sums cannot be graded: it needs a container",
    }
    places = {source.number(split, n): (split, n) for split in Split for n in range(source.size(split) or 0)}
    with pytest.raises(TaskError, match="needs a container"):
        source.task(*places[38])


@pytest.mark.parametrize("text", ["die", "nonsense", "raise"])
def test_an_error_on_one_answer_affects_that_answer_only_and_the_child_continues(
    source: VerifiersSource, text: str
) -> None:
    number, task = _first(source)
    outcome = _graded(source, task, text)
    assert isinstance(outcome, Graded)
    assert outcome.grade == 0
    assert "only with this answer" in outcome.reason
    assert isinstance(_graded(source, task, str(number + 2)), Graded)


def test_a_child_that_fails_on_every_answer_is_invalid_never_zero(source: VerifiersSource, tmp_path: Path) -> None:
    _, task = _first(source)
    (tmp_path / "child.py").write_text(
        CHILD.replace('do == "row"', 'do == "row" or text == ""').replace("n = request", "1/0")
    )
    source.close()
    outcome = _graded(source, task, "die")
    assert isinstance(outcome, Invalid)
    assert outcome.boundary is Boundary.GRADER
    assert "bye" in outcome.evidence


def test_a_reward_out_of_range_is_the_tasks_fault(source: VerifiersSource) -> None:
    _, task = _first(source)
    outcome = _graded(source, task, "huge")
    assert isinstance(outcome, Invalid)
    assert outcome.boundary is Boundary.TASK


def test_a_hang_ends_at_its_deadline_by_name(source: VerifiersSource) -> None:
    with pytest.raises(TaskError, match=r"did not answer 'score': no response before the deadline"):
        source.score(1, "hang", deadline_s=0.2)
    assert source.score(1, "3") == (1.0, {"length": 1.0})


def test_an_environment_without_end_has_as_many_tasks_as_are_asked_for(recorded: None) -> None:
    source = VerifiersSource("endless", sys.executable)
    assert source.size(Split.HELDOUT) is None
    endless = [split for split in Split if source.size(split) is None]
    numbers = {source.number(split, n) for split in endless for n in range(5)}
    assert len(numbers) == 15
    assert source.size(Split.TRANSFER) == 0
    with pytest.raises(TaskError, match="no task 0 in transfer"):
        source.number(Split.TRANSFER, 0)
    assert source.number(Split.HELDOUT, 3) == VerifiersSource("endless", sys.executable).number(Split.HELDOUT, 3)
    source.close()


def test_an_environment_or_interpreter_that_is_not_there_is_named(
    recorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoSource, match="No module named 'bad'"):
        VerifiersSource("bad", sys.executable)
    with pytest.raises(NoSource, match="cannot be started"):
        VerifiersSource("sums", "/nowhere/python")
    monkeypatch.delenv(PYTHON, raising=False)
    with pytest.raises(NoSource, match=f"{PYTHON} is not set"):
        open_source("verifiers:sums", 0)


def test_a_child_that_ends_without_a_word_says_how_it_ended() -> None:
    child = Child([sys.executable, "-c", "import sys; sys.exit('no luck')"], {"do": "open"})
    with pytest.raises(TaskError, match="no luck"):
        child.open()
    child.close()


ENVIRONMENT = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)


class Sums(vf.Taskset[Sum]):
    def load(self):
        print("noise on standard output")
        for n in range(30):
            yield Sum(Data(prompt=f"What is {n} + 2?", answer=str(n + 2)), self.config.task)
"""


@pytest.mark.slow
def test_an_environment_of_the_real_package_proves_itself(tmp_path: Path) -> None:
    python = os.environ.get(PYTHON)
    if not python:
        pytest.skip(f"{PYTHON} names no interpreter that has verifiers 0.4")
    (tmp_path / "own_sums.py").write_text(textwrap.dedent(ENVIRONMENT))
    source = VerifiersSource("own_sums", python, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        for split in Split:
            asyncio.run(check(source, source.grader(), split)).require()
        assert sum(source.size(split) or 0 for split in Split) == 30
    finally:
        source.close()
