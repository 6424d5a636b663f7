"""`HumanEvalSource`: tasks from JSON lines in the format of HumanEval, plain or gzipped.

Each line has ``task_id``, ``prompt`` (a stub: signature and docstring), ``entry_point``, ``canonical_solution`` and
``test`` (source that defines ``check(candidate)``). The stub becomes ``solution.py``. Examples in the docstring that
are one call with literals become visible tests. Hidden tests can use the imports and helpers of the prompt by name, as
in the original; they get those of the prompt, never the agent's, so that an agent cannot change a helper to pass. No
code of the file is executed in this process.

Chen et al. 2021, "Evaluating Large Language Models Trained on Code".
"""

from __future__ import annotations

import ast
import doctest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from etude.errors import TaskError
from etude.records.task import Answer, Split, Task, Trust
from etude.syntax import literal, parse
from etude.tasks.splits import row_at, split_of
from etude.tasks.text_files import read_lines
from etude.tasks.visible import TEST_COMMAND, TEST_FILE, call_text, visible_tests

MODULE = "solution"
FILE = f"{MODULE}.py"
INSTRUCTION = f"write the function in {FILE}"
MAX_BYTES = 256 << 20
"""Largest uncompressed file."""


class _Line(msgspec.Struct, frozen=True):
    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str


class HumanEvalSource:
    """A `TaskSource` over a JSON-lines file in the format of HumanEval.

    A hash of the prompt decides the split; the order in a split is that of the file. Hidden tests import the agent's
    code. Raises `TaskError` with the number of an invalid line."""

    name = "humaneval"

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lines: dict[Split, list[_Line]] = {split: [] for split in Split}
        seen: set[str] = set()
        for place, raw in read_lines(self.path, "HumanEval-style lines", max_bytes=MAX_BYTES):
            line = _parse(raw, place)
            if line.prompt in seen:
                raise TaskError(place, "another line has the same prompt", hint="remove one of the two lines")
            seen.add(line.prompt)
            self._lines[split_of(line.prompt)].append(line)
        if not seen:
            raise TaskError(f"{self.path} has no task", hint="give a JSON-lines file with one task per line")

    def size(self, split: Split) -> int | None:
        return len(self._lines[split])

    def task(self, split: Split, index: int) -> Task:
        line = self._line(split, index)
        files = {FILE: line.prompt}
        examples = list(_examples(line))
        if examples:
            files[TEST_FILE] = visible_tests(examples)
        return Task(
            source=self.name,
            split=split,
            index=index,
            family="function",
            instruction=INSTRUCTION,
            files=files,
            exports=(FILE,),
            test_command=TEST_COMMAND if examples else ("python", FILE),
            trust=Trust.CODE,
        )

    def answer(self, task: Task) -> Answer:
        line = self._line(task.split, task.index)
        if task.files.get(FILE) != line.prompt:
            raise TaskError(
                f"task {task.task_id} is not from {self.path}",
                f"its prompt differs from that of {task.split} task {task.index} in this file",
                hint="use the file from which the task was made, unchanged",
            )
        return Answer(
            reference={FILE: line.prompt + line.canonical_solution},
            test_code=f"{line.prompt}\nfrom {MODULE} import {line.entry_point}\n\n{line.test}",
            entry_point=f"{MODULE}:{line.entry_point}",
        )

    def _line(self, split: Split, index: int) -> _Line:
        return row_at(self._lines[split], split, index, self.path)


def _parse(raw: bytes, place: str) -> _Line:
    try:
        line = msgspec.json.decode(raw, type=_Line)
    except ValueError as error:
        hint = "a line is a JSON object with task_id, prompt, entry_point, canonical_solution and test, all text"
        raise TaskError(place, str(error), hint=hint) from None
    for part, source, name in (
        ("prompt", line.prompt, line.entry_point),
        ("prompt + canonical_solution", line.prompt + line.canonical_solution, line.entry_point),
        ("test", line.test, "check"),
    ):
        defined = _defined(source, f"{place}: {part}")
        if name not in defined:
            raise TaskError(f"{place}: {part} defines no {name!r}", hint="its functions are " + ", ".join(defined))
    return line


def _defined(source: str, place: str) -> list[str]:
    try:
        tree = parse(source)
    except SyntaxError as error:
        raise TaskError(f"{place} is not Python", str(error), hint="fix the source in that line") from None
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def _examples(line: _Line) -> Iterator[tuple[str, str, Any]]:
    """Yield (module, call text, expected value) for the docstring's examples that are one call of the entry point with
    literal arguments and result."""
    try:
        examples = doctest.DocTestParser().get_examples(line.prompt)
    except ValueError:  # a malformed docstring has no examples
        return
    for example in examples:
        try:
            call = parse(example.source.strip()).body
            if not (len(call) == 1 and isinstance(call[0], ast.Expr) and isinstance(call[0].value, ast.Call)):
                continue
            node = call[0].value
            if not (isinstance(node.func, ast.Name) and node.func.id == line.entry_point) or node.keywords:
                continue
            args = [ast.literal_eval(a) for a in node.args]
            want = literal(example.want)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            continue
        yield MODULE, call_text(line.entry_point, args), want
