"""Which tests of a tree pass and what they read, found out in machines; which files are the tests' own. Nothing of a
repository runs anywhere else.

For finding tasks, not for judging work: the verdict of a found task is the grader's. Knows nothing of Git.
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
LEAST_DEADLINE_S, PATIENCE = 20.0, 3.0
_OUTPUT_BYTES = 4 << 20
_WORDS = {"test": 3, "read": 3, "error": 2, "missing": 2}  # of a row, by its first
_NAME_CHARS = 256


def is_test(path: str) -> bool:
    """Whether a file belongs to a repository's tests: by its name, or by a folder it is in.

    >>> is_test("json_testcases/a.json"), is_test("pkg/test_a.py"), is_test("pkg/attest.py"), is_test("contests/a.py")
    (True, True, False, False)
    """
    folders = PurePosixPath(path).parts[:-1]
    return bool(_TEST_FILE.search(path)) or any(_TEST_FOLDER.search(folder) for folder in folders)


def holds_tests(path: str) -> bool:
    """Whether a file is one that a runner collects tests from."""
    name = PurePosixPath(path).name
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py") or name == "tests.py")


def runner_for(texts: Iterable[str]) -> Runner:
    """unittest where the files need nothing else: no pytest imported, no test outside a class.

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
class Ran:
    """The results of the tests of some files on a tree."""

    passed: frozenset[str]  # their names
    reads: frozenset[tuple[str, str]] = frozenset()  # (by which file, which file), of the tree; no modules
    trouble: str = ""  # what kept a file's tests from being found, if anything did
    file_s: float = 0.0  # what the slowest file took

    def deadline_s(self, most_s: float) -> float:
        """For one of these tests as it is graded, in a process of its own: long enough where machines are as slow as
        they were, and short, since a wrong solution that loops costs as much for each; `most_s` at most.

        >>> Ran(frozenset(), file_s=1.0).deadline_s(60.0), Ran(frozenset(), file_s=15.0).deadline_s(60.0)
        (20.0, 45.0)
        """
        return min(most_s, max(LEAST_DEADLINE_S, PATIENCE * self.file_s))


async def run_tests(
    runtime: Runtime,
    files: Mapping[str, str],
    paths: Iterable[str],
    runner: Runner,
    *,
    deadline_s: float,
    image: Image | None = None,
) -> Ran:
    """Run the tests of these files on a tree, each file in a machine of its own, all by the deadline.

    Skipped and expected to fail is not passed, nor is what did not end. `TaskError` where the machine lacks the
    runner; `MachineError` where there is no machine.
    """
    raw = {path: text.encode("utf-8", "surrogatepass") for path, text in files.items()}
    snapshot = await (runtime.prepare(raw) if image is None else runtime.prepare(raw, image=image))
    roots = source_roots(files)
    passed: set[str] = set()
    reads: set[tuple[str, str]] = set()
    trouble, file_s = "", 0.0
    try:
        async with asyncio.timeout(deadline_s):
            for path in paths:
                [machine] = await runtime.fork(snapshot, 1)
                began = time.monotonic()
                try:
                    ran = await _of_file(machine, path, runner, roots, deadline_s)
                finally:
                    await machine.close()
                file_s = max(file_s, time.monotonic() - began)
                passed |= ran.passed
                reads |= ran.reads
                trouble = trouble or ran.trouble
    except TimeoutError:  # tests that did not end are not among those that pass
        trouble = trouble or f"they do not end within {deadline_s:g} s"
    return Ran(frozenset(passed), frozenset(reads), trouble, file_s)


async def _of_file(machine: Machine, path: str, runner: Runner, roots: Sequence[str], deadline_s: float) -> Ran:
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
            raise TaskError("the machine has no pytest", f"{path} needs it", hint="give an image that has it")
    if result.truncated:  # an end that is lost may have been a failure
        return Ran(frozenset(), trouble=f"its tests report more than {_OUTPUT_BYTES >> 20} MiB")
    return Ran(
        frozenset(name for name, outcomes in ends.items() if outcomes == {"passed"}),
        frozenset((row[1], row[2]) for row in rows if row[0] == "read"),
        next((row[1] for row in rows if row[0] in ("error", "missing")), ""),
    )


def _row(said: bytes) -> list[str]:
    """What a runner reported; nothing where it is no row: the tests run where the report is made, and can write into
    it."""
    try:
        row = json.loads(said)
        if isinstance(row, list) and all(isinstance(word, str) for word in row):
            "".join(row).encode()  # JSON can name half of a character
            return row if row and len(row) == _WORDS.get(row[0]) else []
    except (ValueError, RecursionError):
        pass
    return []


def source_roots(paths: Iterable[str]) -> tuple[str, ...]:
    """Folders below a tree's own that its modules are found in once it is installed: ``src``, where packages or modules
    lie there and ``src`` itself is no package.

    >>> source_roots(["src/pkg/__init__.py", "tests/test_a.py"]), source_roots(["src/__init__.py", "src/a.py"])
    (('src',), ())
    """
    inside = {PurePosixPath(path).parts[1:] for path in paths if path.startswith("src/") and path.endswith(".py")}
    is_root = any(len(parts) == 1 or parts[-1:] == ("__init__.py",) for parts in inside)
    return ("src",) if is_root and ("__init__.py",) not in inside else ()


def data_of_tests(reads: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Files that belong to tests since these read them. What code reads of the package that it is in is its own; what
    it reads elsewhere it was told of by a test.

    >>> sorted(data_of_tests([("test_a.py", "cases/a.json"), ("pkg/a.py", "pkg/a.csv"), ("pkg/a.py", "cases/b.json")]))
    ['cases/a.json', 'cases/b.json']
    """
    return frozenset(path for by, path in reads if is_test(by) or not path.startswith(_package(by)))


def data_named_by_tests(sources: Iterable[str], paths: Iterable[str]) -> frozenset[str]:
    """Files of a tree that tests, or what loads their cases, seem to read: those whose name or folder stands in a text
    of these sources. For trees that nobody has run; `data_of_tests` knows.

    >>> sorted(data_named_by_tests(["open(f'cases/{name}.json')"], ["cases/a.json", "pkg/b.json", "README.md"]))
    ['cases/a.json']
    """
    names = {part for source in sources for said in _texts_in(source) for part in _tails(said)}
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
    """A path's folder and name, each with what is before them; of a file of a tree, not what is before them alone."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    folder, name = "/".join(parts[:-1]), parts[-1] if parts else ""
    if inner:
        return {name, *(f"{one}/" for one in (folder, parts[-2] if folder else "") if one)}
    return {name, f"{'/'.join(parts)}/", *([f"{folder}/"] if folder else [])}


def helpers_of_tests(imports: Mapping[str, set[str]]) -> frozenset[str]:
    """Modules that lie beside tests and that nothing but tests imports, directly or by another such module: most likely
    what tests load their cases with. Code may lie so, too, where nothing else uses it.

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
    """Every word of the lines of each module that import something."""
    lines = ((path, _IMPORTS.findall(text)) for path, text in files.items() if path.endswith(".py"))
    return {path: {word for line in found for word in re.findall(r"\w+", line)} for path, found in lines}


def _package(path: str) -> str:
    """The outermost folder of a module, below ``src``; nothing for one beside all else."""
    parts = PurePosixPath(path).parts[:-1]
    return "".join(f"{part}/" for part in parts[: 2 if parts[:1] == ("src",) else 1])
