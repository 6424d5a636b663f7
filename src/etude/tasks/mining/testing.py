"""Run the tests of a repository in machines, to learn which tests pass and which files they read.

Also tell which files are tests, helpers of tests and data of tests. All this only finds tasks; solutions are graded by
the grader.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from etude.errors import TaskError
from etude.records.image import Image
from etude.records.task import Runner
from etude.seams import Machine, Runtime
from etude.syntax import parse
from etude.tasks.guest import program

_TEST_FILE = re.compile(r"(^|/)(test_[^/]*|[^/]*_test|conftest|tests)\.py$")
_TEST_FOLDER = re.compile(
    r"(^|[-_.])((unit)?tests?|testing|test[-_]?(cases?|data|suites?|files))($|[-_.])", re.IGNORECASE
)
_IMPORTS = re.compile(r"^[ \t]*(?:import|from)\b([^#\n(]*(?:\([^)]*\))?)", re.MULTILINE)
MIN_DEADLINE_S, DEADLINE_FACTOR = 20.0, 3.0
_OUTPUT_BYTES = 4 << 20
_LENGTHS = {"test": 3, "read": 3, "error": 2, "missing": 2}  # items of a row, by its first item
_NAME_CHARS = 256


def is_test(path: str) -> bool:
    """Return whether a file belongs to the tests of a repository, by its name or that of a folder.

    >>> is_test("json_testcases/a.json"), is_test("pkg/test_a.py"), is_test("pkg/attest.py"), is_test("contests/a.py")
    (True, True, False, False)
    """
    folders = PurePosixPath(path).parts[:-1]
    return bool(_TEST_FILE.search(path)) or any(_TEST_FOLDER.search(folder) for folder in folders)


def holds_tests(path: str) -> bool:
    """Return whether a test runner collects tests from a file, by its name."""
    name = PurePosixPath(path).name
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py") or name == "tests.py")


def runner_for(texts: Iterable[str]) -> Runner:
    """Choose the test runner for test files, given by their texts.

    It is pytest if a file imports pytest or has tests that unittest does not find (functions, classes without a base
    class), else unittest.

    >>> runner_for(["import unittest\\nclass T(unittest.TestCase):\\n    def test_a(self): pass\\n"])
    <Runner.UNITTEST: 'unittest'>
    >>> runner_for(["def test_a(): assert True\\n"])
    <Runner.PYTEST: 'pytest'>
    """
    return Runner.PYTEST if any(_needs_pytest(text) for text in texts) else Runner.UNITTEST


def _needs_pytest(text: str) -> bool:
    try:
        tree = parse(text)
    except SyntaxError:
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(a.name.split(".")[0] == "pytest" for a in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pytest":
            return True
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    plain = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.startswith("Test") and not n.bases)
    return any(isinstance(n, functions) and n.name.startswith("test") for n in tree.body) or any(plain)


@dataclass(frozen=True)
class TestResults:
    """The results of `run_tests`.

    `passed` are names of tests. `reads` are pairs (reading Python file, data file that it read), with paths relative to
    the working directory; reads of Python files (.py, .pyc) are left out. `problem` says why the tests of a file could
    not be collected or did not finish. `file_s` are the seconds that the slowest file took."""

    __test__ = False  # for pytest: not a test class

    passed: frozenset[str]  # names of tests
    reads: frozenset[tuple[str, str]] = frozenset()  # (reading Python file, data file that it read)
    problem: str = ""  # why the tests of a file could not be collected
    file_s: float = 0.0  # duration of the slowest file

    def deadline_s(self, max_s: float) -> float:
        """Return the deadline in seconds, at most `max_s`, for grading one of these tests in its own process.

        It must be long enough for slow machines. It should also be short, because a solution with an endless loop
        reaches it in every test.

        >>> [TestResults(frozenset(), file_s=file_s).deadline_s(60.0) for file_s in (1.0, 15.0)]
        [20.0, 45.0]
        """
        return min(max_s, max(MIN_DEADLINE_S, DEADLINE_FACTOR * self.file_s))


async def run_tests(
    runtime: Runtime,
    files: Mapping[str, str],
    paths: Iterable[str],
    runner: Runner,
    *,
    deadline_s: float,
    image: Image | None = None,
) -> TestResults:
    """Run the test files `paths`, each in its own machine that contains all `files` of a repository (path -> text).

    All test files together may take `deadline_s` seconds. A skipped test, an expected failure and a test that did not
    finish do not count as passed. Raises `TaskError` if the machine does not have the runner, and `MachineError`."""
    raw = {path: text.encode("utf-8", "surrogatepass") for path, text in files.items()}
    snapshot = await (runtime.prepare(raw) if image is None else runtime.prepare(raw, image=image))
    roots = source_roots(files)
    passed: set[str] = set()
    reads: set[tuple[str, str]] = set()
    problem, file_s = "", 0.0
    try:
        async with asyncio.timeout(deadline_s):
            for path in paths:
                [machine] = await runtime.fork(snapshot, 1)
                began = time.monotonic()
                try:
                    results = await _run_file(machine, path, runner, roots, deadline_s)
                finally:
                    await machine.close()
                file_s = max(file_s, time.monotonic() - began)
                passed |= results.passed
                reads |= results.reads
                problem = problem or results.problem
    except TimeoutError:  # tests that did not finish do not count as passed
        problem = problem or f"they do not finish within {deadline_s:g} s"
    return TestResults(frozenset(passed), frozenset(reads), problem, file_s)


async def _run_file(
    machine: Machine, path: str, runner: Runner, roots: Sequence[str], deadline_s: float
) -> TestResults:
    nonce = secrets.token_hex(16)
    result = await machine.exec(
        ["python3", "-c", program("run_tests")],
        key="tests",
        deadline_s=deadline_s,
        stdin=json.dumps({"nonce": nonce, "runner": runner, "path": path, "roots": roots}).encode(),
        output_bytes=_OUTPUT_BYTES,
    )
    marked = [line for line in result.output.split(b"\n") if line.startswith(nonce.encode())]
    rows = [row for line in marked if (row := _row(line.partition(b" ")[2]))]
    ends: dict[str, set[str]] = {}
    for row in rows:
        if row[0] == "test":
            ends.setdefault(row[1], set()).add(row[2])
        elif row == ["missing", "pytest"]:
            raise TaskError("the machine has no pytest", f"{path} needs it", hint="give an image with pytest")
    if result.truncated:  # a lost result may have been a failure
        return TestResults(frozenset(), problem=f"its tests report more than {_OUTPUT_BYTES >> 20} MiB")
    return TestResults(
        frozenset(name for name, outcomes in ends.items() if outcomes == {"passed"}),
        frozenset((row[1], row[2]) for row in rows if row[0] == "read"),
        next((row[1] for row in rows if row[0] in ("error", "missing")), ""),
    )


def _row(line: bytes) -> list[str]:
    """Parse a row of the report; [] if it is invalid. The tests run in the reporting process, so the report is
    untrusted."""
    try:
        row = json.loads(line)
        if isinstance(row, list) and all(isinstance(item, str) for item in row):
            "".join(row).encode()  # JSON allows lone surrogates
            return row if row and len(row) == _LENGTHS.get(row[0]) else []
    except (ValueError, RecursionError):
        pass
    return []


def source_roots(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the folders of a tree to add to the module search path.

    This is ``src`` if it contains packages or modules and is not a package itself.

    >>> source_roots(["src/pkg/__init__.py", "tests/test_a.py"]), source_roots(["src/__init__.py", "src/a.py"])
    (('src',), ())
    """
    inside = {PurePosixPath(path).parts[1:] for path in paths if path.startswith("src/") and path.endswith(".py")}
    is_root = any(len(parts) == 1 or parts[-1:] == ("__init__.py",) for parts in inside)
    return ("src",) if is_root and ("__init__.py",) not in inside else ()


def data_of_tests(reads: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Return the files that are data of tests, from `reads` of `TestResults`.

    They are the files that tests read, and those that code reads outside of its own package.

    >>> sorted(data_of_tests([("test_a.py", "cases/a.json"), ("pkg/a.py", "pkg/a.csv"), ("pkg/a.py", "cases/b.json")]))
    ['cases/a.json', 'cases/b.json']
    """
    return frozenset(path for by, path in reads if is_test(by) or not path.startswith(_package(by)))


def data_named_by_tests(sources: Iterable[str], paths: Iterable[str]) -> frozenset[str]:
    """Return the files of `paths` that are probably data of tests, for trees whose tests were not run.

    Their name or folder occurs in a string of `sources`, the texts of tests and their helpers. If the tests were run,
    use `data_of_tests`.

    >>> sorted(data_named_by_tests(["open(f'cases/{name}.json')"], ["cases/a.json", "pkg/b.json", "README.md"]))
    ['cases/a.json']
    """
    names = {part for source in sources for text in _texts_in(source) for part in _tails(text)}
    return frozenset(path for path in paths if not path.endswith(".py") and _tails(path, inner=True) & names)


def _texts_in(source: str) -> Iterator[str]:
    try:
        tree = parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < _NAME_CHARS:
            yield node.value


def _tails(path: str, *, inner: bool = False) -> set[str]:
    """The names by which a path can be recognised in a string: file name and folders. `inner`: for a file of the
    tree."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    folder, name = "/".join(parts[:-1]), parts[-1] if parts else ""
    if inner:
        return {name, *(f"{one}/" for one in (folder, parts[-2] if folder else "") if one)}
    return {name, f"{'/'.join(parts)}/", *([f"{folder}/"] if folder else [])}


def helpers_of_tests(imports: Mapping[str, set[str]]) -> frozenset[str]:
    """Return the modules that are probably helpers of tests, such as loaders of test cases.

    They are in folders with tests, and only tests import them, directly or through another such module. Code that
    nothing else uses can be among them. `imports` is the result of `imports_in`.

    >>> files = {"a/test_a.py": "import load, calc", "a/load.py": "", "a/calc.py": "", "b.py": "import calc"}
    >>> sorted(helpers_of_tests(imports_in(files)))
    ['a/load.py']
    """

    tested = {PurePosixPath(path).parent for path in imports if is_test(path)} - {PurePosixPath(".")}
    found = {
        p for p in imports if PurePosixPath(p).parent in tested and not is_test(p) and not p.endswith("__init__.py")
    }
    by_tests = set().union(*(names for path, names in imports.items() if is_test(path)), set())
    while True:
        outside = (names for path, names in imports.items() if path not in found and not is_test(path))
        used = set().union(*outside, set())
        kept = {path for path in found if PurePosixPath(path).stem not in used}
        if kept == found:
            within = by_tests.union(*(imports[path] for path in kept))
            return frozenset(path for path in kept if PurePosixPath(path).stem in within)
        found = kept


def imports_in(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Return all words in the import statements of each Python file, by path. `files` maps paths to texts."""
    lines = ((path, _IMPORTS.findall(text)) for path, text in files.items() if path.endswith(".py"))
    return {path: {word for line in found for word in re.findall(r"\w+", line)} for path, found in lines}


def _package(path: str) -> str:
    """The top-level package folder of a module, such as "pkg/" or "src/pkg/"; "" for a top-level module."""
    parts = PurePosixPath(path).parts[:-1]
    return "".join(f"{part}/" for part in parts[: 2 if parts[:1] == ("src",) else 1])
