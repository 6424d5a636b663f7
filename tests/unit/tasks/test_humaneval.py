"""HumanEval-style files: what is read, what is refused by line."""

from __future__ import annotations

import asyncio
import gzip
import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.errors import TaskError
from etude.records.task import Split, Task, Trust
from etude.tasks import HumanEvalSource
from etude.testing import FakeGrader, run_python

ROW = {
    "task_id": "own/0",
    "prompt": (
        "import math\n\n\ndef half(n):\n    return n / 2\n\n\n"
        'def area(r, scale):\n    """ the area, scaled\n'
        "    >>> area(0, 2)\n    0.0\n    >>> area(half(2), 1)\n    3.14\n"
        '    >>> x = area(1, 1)\n    >>> area(1, *[1])\n    nothing literal\n    """\n'
    ),
    "entry_point": "area",
    "canonical_solution": "    return math.pi * r * r * scale\n",
    "test": "def check(candidate):\n    assert candidate(half(2), 1) == math.pi\n    assert area(0, 0) == 0\n",
}


def _source(folder: Path, *rows: object, name: str = "own.jsonl") -> HumanEvalSource:
    data = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode()
    path = folder / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return HumanEvalSource(path)


def _only(source: HumanEvalSource) -> Task:
    (split,) = [s for s in Split if source.size(s)]
    return source.task(split, 0)


@pytest.mark.parametrize("name", ["own.jsonl", "own.jsonl.gz"])
def test_a_line_becomes_a_stub_a_reference_and_hidden_tests(tmp_path: Path, name: str) -> None:
    source = _source(tmp_path, ROW, "", name=name)
    task = _only(source)
    answer = source.answer(task)
    assert task.files["solution.py"] == ROW["prompt"]
    assert task.exports == ("solution.py",)
    assert task.trust is Trust.CODE
    assert answer.reference == {"solution.py": ROW["prompt"] + ROW["canonical_solution"]}
    assert answer.entry_point == "solution:area"
    assert ROW["test"] not in "".join(task.files.values())


def test_examples_that_are_one_literal_call_become_visible_tests(tmp_path: Path) -> None:
    source = _source(tmp_path, ROW)
    task = _only(source)
    assert task.test_command == ("python", "tests.py")
    assert "('solution', 'area(0, 2)', 0.0)" in task.files["tests.py"]
    files = {path: text.encode() for path, text in task.files.items()}
    assert run_python(files, "tests.py") == (1, "FAIL solution.py area(0, 2) got None want 0.0\n0 of 1 passed\n")
    solved = {path: text.encode() for path, text in source.answer(task).reference.items()}
    assert run_python({**files, **solved}, "tests.py") == (0, "1 of 1 passed\n")


def test_without_examples_the_test_command_is_to_run_the_file(tmp_path: Path) -> None:
    prompt = "def one():\n    # the number\n    pass\n"
    task = _only(_source(tmp_path, ROW | {"prompt": prompt, "entry_point": "one", "canonical_solution": ""}))
    assert task.test_command == ("python", "solution.py")
    assert set(task.files) == {"solution.py"}


def test_hidden_tests_use_the_prompts_helpers_and_not_the_agents(tmp_path: Path) -> None:
    source = _source(tmp_path, ROW)
    task = _only(source)
    bent = "def half(n):\n    return 0\n\n\ndef area(r, scale):\n    return 3.141592653589793 if r == 0 else 0\n"
    for text, reward in ((source.answer(task).reference["solution.py"], 1.0), (bent, 0.0)):
        outcome = asyncio.run(FakeGrader().grade(task, source.answer(task), {"solution.py": text.encode()}))
        assert outcome.grade == reward


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        ({k: v for k, v in ROW.items() if k != "test"}, "line 2: .*test"),
        (ROW | {"prompt": 3}, "line 2: .*str"),
        (ROW, "line 2: another line has the same prompt"),
        (ROW | {"prompt": "def (:\n"}, "line 2: prompt is not Python"),
        (ROW | {"prompt": "\0"}, "line 2: prompt is not Python"),
        (ROW | {"prompt": "(" * 5_000}, "line 2: prompt is not Python"),
        (ROW | {"prompt": "def other(): pass\n"}, "line 2: prompt defines no 'area'"),
        (ROW | {"prompt": "def area(): pass\n", "canonical_solution": "]"}, r"line 2: prompt \+ canonical_solution is"),
        (ROW | {"prompt": "def area():\n    ''\n", "test": "x = 1"}, "line 2: test defines no 'check'"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, row: object, said: str) -> None:
    with pytest.raises(TaskError, match=said) as caught:
        _source(tmp_path, ROW, row)
    assert caught.value.hint


def test_a_file_without_tasks_missing_or_half_packed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="has no task"):
        _source(tmp_path, "", "")
    with pytest.raises(TaskError, match="cannot read"):
        HumanEvalSource(tmp_path / "none.jsonl")
    packed = gzip.compress(json.dumps(ROW).encode())
    for damaged in (packed[: len(packed) // 2], packed[:20] + b"\xff\xff" + packed[22:], b"no gzip"):
        (tmp_path / "bad.jsonl.gz").write_bytes(damaged)
        with pytest.raises(TaskError, match="bad"):
            HumanEvalSource(tmp_path / "bad.jsonl.gz")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 900), put=st.binary(min_size=1, max_size=4), cut=st.integers(0, 6))
def test_a_mutated_file_is_read_or_refused_and_nothing_else(tmp_path: Path, place: int, put: bytes, cut: int) -> None:
    data = json.dumps(ROW).encode()
    path = tmp_path / "mutated.jsonl"
    path.write_bytes(data[:place] + put + data[place + cut :])
    with suppress(TaskError):
        source = HumanEvalSource(path)
        for split in Split:
            for index in range(source.size(split) or 0):
                assert source.answer(source.task(split, index)).entry_point
