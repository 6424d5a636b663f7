"""What every task source promises. A new one joins with one line in SOURCES."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.tasks.test_harbor import hello
from tests.unit.tasks.test_swe import row

from etude.records.task import Answer, Case, Split, Task
from etude.seams import TaskSource
from etude.tasks import DirectorySource, HumanEvalSource, RepairSource, check, open_source
from etude.tasks.harbor import HarborSource
from etude.tasks.swe import SweSource
from etude.testing import FakeGrader, ListSource
from etude.testing.contracts import TaskSourceContract

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
    "plug-in": lambda folder: open_source("examples.plugins.sources:Multiply", 0),
    "swe": _swe,
    "harbor": _harbor,
}
IN_MACHINES = ("swe", "harbor")


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> TaskSource:
    return SOURCES[request.param](tmp_path)


@pytest.mark.parametrize("promise", [name for name in dir(TaskSourceContract) if name.startswith("test_")])
@pytest.mark.parametrize("name", SOURCES)
def test_a_source_keeps_the_contract(name: str, promise: str, tmp_path: Path) -> None:
    contract, source = TaskSourceContract(), SOURCES[name](tmp_path)
    contract.make = lambda: source  # type: ignore[method-assign]
    getattr(contract, promise)()


def test_it_is_a_task_source(source: TaskSource) -> None:
    assert isinstance(source, TaskSource)


@pytest.mark.parametrize("split", Split)
def test_the_tasks_of_a_source_pass_their_own_proof(source: TaskSource, split: Split) -> None:
    if source.name in IN_MACHINES:
        pytest.skip("proven in machines, by its own tests")
    if source.size(split) == 0:
        assert split is Split.TRANSFER
        return
    proof = asyncio.run(check(source, FakeGrader(), split, 8))
    proof.require()
    assert proof.num_proven == proof.num_tasks > 0
