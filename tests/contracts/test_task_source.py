"""What every task source promises. A new one joins with one line in SOURCES."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.tasks.test_harbor import hello
from tests.unit.tasks.test_swe import row

from etude.errors import TaskError
from etude.records.exports import covers
from etude.records.task import Answer, Case, Split, Task, Trust
from etude.records.wire import pack, unpack
from etude.seams import TaskSource
from etude.tasks import DirectorySource, HumanEvalSource, RepairSource, check
from etude.tasks.harbor import HarborSource
from etude.tasks.swe import SweSource
from etude.testing import FakeGrader, ListSource

STUB = 'def double(n):\n    """twice n"""\n'


def _humaneval(folder: Path) -> TaskSource:
    rows = [
        {
            "task_id": f"own/{i}",
            "prompt": f'def add{i}(n):\n    """n plus {i}\n    >>> add{i}(1)\n    {i + 1}\n    """\n',
            "entry_point": f"add{i}",
            "canonical_solution": f"    return n + {i}\n",
            "test": f"def check(candidate):\n    assert candidate(5) == {5 + i}\n",
        }
        for i in range(40)
    ]
    path = folder / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return HumanEvalSource(path)


def _directory(folder: Path) -> TaskSource:
    for split in Split:
        task = folder / "own" / f"{split}-double"
        (task / "files").mkdir(parents=True)
        (task / "answer" / "reference").mkdir(parents=True)
        (task / "task.toml").write_text(f'instruction = "write double"\nexports = ["own.py"]\nsplit = "{split}"\n')
        (task / "files" / "own.py").write_text(f"# {split}\n{STUB}")
        (task / "answer" / "reference" / "own.py").write_text(f"{STUB}    return 2 * n\n")
        cases = [{"module": "own", "function": "double", "args": [n], "expected": 2 * n} for n in range(3)]
        (task / "answer" / "cases.json").write_text(json.dumps(cases))
    return DirectorySource(folder / "own")


def _list(folder: Path) -> TaskSource:
    answer = Answer(reference={"own.py": f"{STUB}    return 2 * n\n"}, cases=(Case("own", "double", [4], 8),))
    return ListSource(
        (
            Task(
                source="",
                split=split,
                index=0,
                family="own",
                instruction=f"write double {split} {i}",
                files={"own.py": STUB},
                exports=("own.py",),
            ),
            answer,
        )
        for split in Split
        for i in range(2)
    )


def _swe(folder: Path) -> TaskSource:
    """Rows about one repository, as many as every split has some of."""
    first = row(folder)
    rows = [{**first, "instance_id": f"own-{n}", "problem_statement": f"Reduce prices, {n}."} for n in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return SweSource(folder / "rows.jsonl")


def _harbor(folder: Path) -> TaskSource:
    for n in range(60):
        (hello(folder / "tasks" / f"hello-{n}") / "instruction.md").write_text(f"Greet in /app/out/hello.txt, {n}.\n")
    return HarborSource(folder / "tasks")


SOURCES: dict[str, Callable[[Path], TaskSource]] = {
    "repair": lambda folder: RepairSource(seed=3),
    "humaneval": _humaneval,
    "directory": _directory,
    "list": _list,
    "swe": _swe,
    "harbor": _harbor,
}
IN_MACHINES = ("swe", "harbor")


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> TaskSource:
    return SOURCES[request.param](tmp_path)


def _some(source: TaskSource, split: Split) -> list[Task]:
    size = source.size(split)
    return [source.task(split, index) for index in range(8 if size is None else min(size, 8))]


def test_it_is_a_task_source(source: TaskSource) -> None:
    assert isinstance(source, TaskSource)


@pytest.mark.parametrize("split", Split)
def test_every_split_has_tasks_that_know_their_place(source: TaskSource, split: Split) -> None:
    tasks = _some(source, split)
    assert tasks or split is Split.TRANSFER, "only a source that knows kinds of problems has transfer tasks"
    for index, task in enumerate(tasks):
        assert (task.source, task.split, task.index) == (source.name, split, index)
        assert task.instruction
        assert task.family


def test_access_is_random_and_repeats(source: TaskSource) -> None:
    tasks = _some(source, Split.TRAIN)
    assert [source.task(Split.TRAIN, i) for i in reversed(range(len(tasks)))] == tasks[::-1]


def test_the_same_content_is_never_in_two_splits(source: TaskSource) -> None:
    ids = [{task.task_id for task in _some(source, split)} for split in Split]
    assert len(set.union(*ids)) == sum(map(len, ids))


def test_past_the_end_and_before_the_start_is_an_error(source: TaskSource) -> None:
    with pytest.raises(TaskError, match="no task"):
        source.task(Split.TRAIN, -1)
    size = source.size(Split.TRAIN)
    if size is not None:
        with pytest.raises(TaskError, match="no task"):
            source.task(Split.TRAIN, size)


def test_an_answer_is_one_kind_and_nothing_of_it_is_in_the_task(source: TaskSource) -> None:
    for task in _some(source, Split.HELDOUT):
        answer = source.answer(task)
        kinds = [bool(answer.cases), bool(answer.test_code), answer.tests is not None, answer.verifier is not None]
        assert sum(kinds) == 1
        assert bool(answer.cases) == (task.trust is Trust.DATA)
        assert bool(answer.test_code) == bool(answer.entry_point)
        assert answer.reference_argv or all(covers(task.exports, path) for path in answer.reference)
        assert any(text not in task.files.values() for text in answer.reference.values())


def test_an_answer_is_refused_for_a_task_that_was_changed(source: TaskSource) -> None:
    task = source.task(Split.TRAIN, 0)
    fields = {name: getattr(task, name) for name in task.__struct_fields__}
    other = Task(**{**fields, "files": {path: text + "\n# changed\n" for path, text in task.files.items()}})
    with pytest.raises(TaskError, match="is not of"):
        source.answer(other)


def test_tasks_and_answers_travel_between_processes(source: TaskSource) -> None:
    task = source.task(Split.VALIDATION, 0)
    assert unpack(pack(task), Task) == task
    assert source.answer(unpack(pack(task), Task)) == unpack(pack(source.answer(task)), Answer)


@pytest.mark.parametrize("split", Split)
def test_its_tasks_prove_themselves(source: TaskSource, split: Split) -> None:
    if source.name in IN_MACHINES:
        pytest.skip("proven in machines, by its own tests")
    if source.size(split) == 0:
        assert split is Split.TRANSFER
        return
    proof = asyncio.run(check(source, FakeGrader(), split, 8))
    proof.require()
    assert proof.num_proven == proof.num_tasks > 0
