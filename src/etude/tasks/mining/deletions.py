"""Make tasks from tested code: delete the body of a function, so that its tests fail. The original is the solution.

The docstring is kept as the specification. A function is used if it has enough statements, and if tests that passed
fail without its body. As in SWE-smith (Yang et al. 2025).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from etude.records.image import Image
from etude.records.task import Answer, HiddenTests, Runner
from etude.seams import Runtime
from etude.syntax import parse
from etude.tasks.mining.commits import MAX_FAILING, MAX_PASSING, TEST_DEADLINE_S, Candidate, whole_tree_task
from etude.tasks.mining.testing import (
    TestResults,
    data_of_tests,
    helpers_of_tests,
    holds_tests,
    imports_in,
    is_test,
    run_tests,
    runner_for,
    source_roots,
)

MIN_STATEMENTS = 3
MAX_TEST_FILES = 5


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method whose body can be deleted.

    `name` is qualified ("Stack.push"), and `without` is the text of its module without the body."""

    path: str
    name: str  # "Stack.push"
    without: str  # the module's text without its body


def functions_in(path: str, text: str) -> list[Function]:
    """Return the functions and methods of a module that have at least three statements besides a docstring.

    Returns [] if the text is not valid Python.

    >>> [f.name for f in functions_in("a.py", "def f(n):\\n    a = n\\n    b = a\\n    return b\\n")]
    ['f']
    """
    try:
        tree = parse(text)
    except SyntaxError:
        return []
    if "\r" in text or "\f" in text:
        return []
    found = []
    for name, node in _definitions(tree):
        without = _without_body(text, node)
        if without is not None:
            found.append(Function(path, name, without))
    return found


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def _without_body(text: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    body = node.body
    has_docstring = isinstance(body[0], ast.Expr) and isinstance(getattr(body[0], "value", None), ast.Constant)
    rest = body[1:] if has_docstring else body
    if sum(isinstance(inner, ast.stmt) for part in rest for inner in ast.walk(part)) < MIN_STATEMENTS:
        return None
    first, last = rest[0], rest[-1]
    start = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))])
    if last.end_lineno is None or start == node.lineno:
        return None  # the body is on the line of the def
    lines = text.split("\n")
    stub = " " * first.col_offset + "raise NotImplementedError"
    return "\n".join([*lines[: start - 1], stub, *lines[last.end_lineno :]])


def covering_tests(path: str, files: Mapping[str, str]) -> list[str]:
    """Return at most five test files of a tree that probably test the module at `path`.

    They are the test files that are named after the module. If there are none, they are those that import it."""
    stem = PurePosixPath(path).stem
    dotted = path.removesuffix(".py").removesuffix("/__init__").removeprefix("src/").replace("/", ".")
    word = re.compile(rf"\b{re.escape(dotted)}\b|\bfrom\s+\S+\s+import\s[^#\n]*\b{re.escape(stem)}\b")
    tests = [p for p in sorted(files) if is_test(p) and holds_tests(p)]
    named = [p for p in tests if PurePosixPath(p).stem in (f"test_{stem.lstrip('_')}", f"{stem}_test")]
    return named[:MAX_TEST_FILES] or [p for p in tests if word.search(files[p])][:MAX_TEST_FILES]


class DeletionMiner:
    """Makes deletion tasks from one tree of `files` (path -> text).

    The tests of the original tree run once for each set of test files, and the results are reused. `source` is the name
    of the tasks' source. Tests run in machines with `image`, each time for at most `deadline_s` seconds."""

    def __init__(
        self,
        files: Mapping[str, str],
        runtime: Runtime,
        *,
        source: str,
        image: Image | None = None,
        deadline_s: float = TEST_DEADLINE_S,
    ) -> None:
        self._files, self._runtime, self._source = dict(files), runtime, source
        self._image, self._deadline_s = image, deadline_s
        self._intact: dict[tuple[str, ...], TestResults] = {}

    async def task_of(self, function: Function) -> Candidate | str:
        """Make the task to write the body of a function again, or return the reason why there is none."""
        tests = covering_tests(function.path, self._files)
        if not tests:
            return "its module has no tests"
        runner = runner_for(self._files[path] for path in tests)
        intact = await self._run_intact(tests, runner)
        if not intact.passed:
            return "no test of its module passes"
        files = self._files | {function.path: function.without}
        left = await self._run(files, tests, runner)
        failing, both = sorted(intact.passed - left.passed), sorted(intact.passed & left.passed)
        if not failing:
            return "no test fails without it"
        names = (*failing[:MAX_FAILING], *both[:MAX_PASSING])
        data = data_of_tests(intact.reads)
        hidden = {path: self._files[path] for path in (*tests, *sorted(data)) if path in self._files}
        limit = intact.deadline_s(self._deadline_s)
        answer = Answer(
            reference={function.path: self._files[function.path]},
            tests=HiddenTests(
                runner=runner, files=hidden, names=names, roots=source_roots(self._files), deadline_s=limit
            ),
        )
        task = whole_tree_task(
            files,
            answer,
            source=self._source,
            family="deletion",
            instruction=f"{function.name} in {function.path} lost its body. Write it again: its docstring, its callers"
            " and the tests say what it does.",
            image=self._image,
            kept=data | helpers_of_tests(imports_in(self._files)),
        )
        return Candidate(task, answer, len(failing), len(both[:MAX_PASSING]))

    async def _run_intact(self, tests: list[str], runner: Runner) -> TestResults:
        """Results on the original tree; only tests that pass twice count as passed."""
        key = tuple(tests)
        if key not in self._intact:
            first = await self._run(self._files, tests, runner)
            second = await self._run(self._files, tests, runner) if first.passed else first
            self._intact[key] = TestResults(
                first.passed & second.passed, first.reads | second.reads, file_s=max(first.file_s, second.file_s)
            )
        return self._intact[key]

    async def _run(self, files: Mapping[str, str], tests: list[str], runner: Runner) -> TestResults:
        return await run_tests(self._runtime, files, tests, runner, deadline_s=self._deadline_s, image=self._image)
