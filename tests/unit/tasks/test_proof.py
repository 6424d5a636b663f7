"""Proving tasks, showing them, opening sources by name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from etude.config import build
from etude.errors import MachineError, TaskError
from etude.records.rollout import Boundary, Graded, Invalid
from etude.records.task import Answer, Case, Split, Task, Trust
from etude.tasks import CorpusConfig, RepairSource, TasksConfig, check, open_source, show
from etude.testing import FakeGrader, ListSource

RIGHT, STUB = "def f():\n    return 1\n", "def f():\n    pass\n"


def _pair(reference: dict[str, str], expected: int = 1) -> tuple[Task, Answer]:
    task = Task(
        source="",
        split=Split.TRAIN,
        index=0,
        family="own",
        instruction="write f",
        files={"own.py": STUB},
        exports=("own.py",),
    )
    return task, Answer(reference=reference, cases=(Case("own", "f", [], expected),))


class _Silent:
    """A grader that never answers."""

    async def grade(self, task: Task, answer: Answer, exports: Mapping[str, bytes]) -> Graded | Invalid:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets the event")


def test_a_task_that_does_not_prove_itself_is_named_with_the_reason() -> None:
    source = ListSource(
        [
            _pair({"own.py": RIGHT}),
            _pair({"own.py": STUB}),
            _pair({"other.py": RIGHT}),
            _pair({"own.py": RIGHT}, expected=2),
        ]
    )
    proof = asyncio.run(check(source, FakeGrader(), Split.TRAIN))
    assert [(f.index, f.reason) for f in proof.failures] == [
        (1, "reference solution scores 0: 0 of 1 hidden tests pass"),
        (2, "the reference changes other.py, which is not exported"),
        (3, "reference solution scores 0: 0 of 1 hidden tests pass"),
    ]
    assert (proof.num_tasks, proof.num_proven) == (4, 1)
    with pytest.raises(TaskError, match="3 of 4 train tasks of list are not valid"):
        proof.require()


def test_a_task_that_is_solved_untouched_is_a_failure() -> None:
    def always(task: Task) -> Graded:
        return Graded.of(1.0, trust=Trust.DATA, reason="all pass")

    proof = asyncio.run(check(ListSource([_pair({"own.py": RIGHT})]), FakeGrader(always), Split.TRAIN))
    assert [f.reason for f in proof.failures] == ["unmodified task scores 1: all pass"]


def test_an_invalid_verdict_and_one_that_never_comes_are_failures_by_name() -> None:
    def broken(task: Task) -> Invalid:
        return Invalid(boundary=Boundary.GRADER, reason="it died", evidence="exit status 9")

    source = ListSource([_pair({"own.py": RIGHT})])
    died = asyncio.run(check(source, FakeGrader(broken), Split.TRAIN))
    hung = asyncio.run(check(source, _Silent(), Split.TRAIN, deadline_s=0.01))
    assert [f.reason for f in died.failures] == ["reference solution could not be graded (grader): it died"]
    assert [f.reason for f in hung.failures] == ["reference solution was not graded within 0.01 s"]


def test_why_there_was_no_machine_is_said_with_its_hint() -> None:
    def none(task: Task) -> Invalid:
        error = MachineError("this runtime has no images", hint="--images STORE")
        return Invalid(boundary=Boundary.MACHINE, reason="no machine to grade in", evidence=str(error))

    [failure] = asyncio.run(check(ListSource([_pair({"own.py": RIGHT})]), FakeGrader(none), Split.TRAIN)).failures
    assert failure.reason.endswith("no machine to grade in: this runtime has no images; hint: --images STORE")


def test_an_error_of_the_grader_is_raised_unchanged() -> None:
    def no_machines(task: Task) -> Graded:
        raise MachineError("no user namespaces here", hint="run in a container")

    with pytest.raises(MachineError, match="no user namespaces here"):
        asyncio.run(check(RepairSource(seed=0), FakeGrader(no_machines), Split.TRAIN, 20))


def test_nothing_to_check_is_an_error() -> None:
    with pytest.raises(TaskError, match=r"list has no heldout task to check: .* train 1, .* heldout 0") as caught:
        asyncio.run(check(ListSource([_pair({"own.py": RIGHT})]), FakeGrader(), Split.HELDOUT))
    assert 'split = "heldout"' in caught.value.hint
    with pytest.raises(TaskError, match="train infinite"):
        asyncio.run(check(RepairSource(seed=0), FakeGrader(), Split.TRAIN, 0))


def test_a_count_beyond_the_split_checks_what_is_there_and_an_endless_source_has_a_default() -> None:
    few = ListSource([_pair({"own.py": RIGHT})])
    assert asyncio.run(check(few, FakeGrader(), Split.TRAIN, 50)).num_tasks == 1
    assert asyncio.run(check(RepairSource(seed=0), FakeGrader(), Split.TRAIN)).num_tasks == 100


def test_show_prints_a_tasks_files_and_no_part_of_its_answer() -> None:
    source = RepairSource(seed=0)
    task = source.task(Split.TRAIN, 0)
    text = show(task)
    for path, content in task.files.items():
        assert f"── {path} " in text
        assert content.rstrip("\n") in text
    assert task.task_id in text
    assert source.problem(Split.TRAIN, 0).function.source() not in text


def test_sources_open_by_name_or_path_and_an_unknown_one_names_the_nearest(tmp_path: Path) -> None:
    made = open_source("repair", seed=3, files=2)
    assert isinstance(made, RepairSource)
    assert (made.seed, made.files) == (3, 2)
    with pytest.raises(TaskError, match="did you mean 'repair'"):
        open_source("repare", seed=0)
    with pytest.raises(TaskError, match="did you mean 'humaneval:PATH'"):
        open_source("humaneval", seed=0)
    with pytest.raises(TaskError, match="cannot read"):
        open_source(f"humaneval:{tmp_path / 'none.jsonl'}", seed=0)
    with pytest.raises(TaskError, match="has no task"):
        open_source(str(tmp_path), seed=0)


def test_configs_build_from_plain_data() -> None:
    assert build(TasksConfig, {"source": "own", "seed": 4}) == TasksConfig(source="own", seed=4)
    assert build(CorpusConfig, {"right_body": 1}).right_body == 1.0
