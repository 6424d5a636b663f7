"""Which tests of a tree pass, found out in machines. Nothing of a repository runs anywhere else.

For finding tasks, not for judging work: the verdict of a found task is the grader's. Knows nothing of Git.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from etude.errors import TaskError
from etude.records.image import Image
from etude.records.task import Runner
from etude.seams import Machine, Runtime
from etude.syntax import parse
from etude.tasks.guest import program

_TEST_FILE = re.compile(r"(^|/)(test_[^/]*|[^/]*_test|conftest|tests)\.py$")
_TEST_FOLDERS = {"test", "tests", "testing"}
_OUTPUT_BYTES = 4 << 20


def is_test(path: str) -> bool:
    """Whether a file belongs to a repository's tests: by its name, or by a folder it is in.

    >>> is_test("tests/data/a.json"), is_test("pkg/test_a.py"), is_test("pkg/attest.py")
    (True, True, False)
    """
    return bool(_TEST_FILE.search(path)) or bool(_TEST_FOLDERS & set(PurePosixPath(path).parts[:-1]))


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


async def passing(
    runtime: Runtime,
    files: Mapping[str, str],
    paths: Iterable[str],
    runner: Runner,
    *,
    deadline_s: float,
    image: Image | None = None,
) -> set[str]:
    """Names of the tests in these files that pass on a tree, each file in a machine of its own, all by the deadline.

    Skipped and expected to fail is not passed, nor is what did not end. `TaskError` where the machine lacks the
    runner; `MachineError` where there is no machine.
    """
    raw = {path: text.encode("utf-8", "surrogatepass") for path, text in files.items()}
    snapshot = await (runtime.prepare(raw) if image is None else runtime.prepare(raw, image=image))
    found: set[str] = set()
    try:
        async with asyncio.timeout(deadline_s):
            for path in paths:
                [machine] = await runtime.fork(snapshot, 1)
                try:
                    found |= await _of_file(machine, path, runner, deadline_s)
                finally:
                    await machine.close()
    except TimeoutError:
        pass  # tests that did not end are not among those that pass
    return found


async def _of_file(machine: Machine, path: str, runner: Runner, deadline_s: float) -> set[str]:
    nonce = secrets.token_hex(16)
    result = await machine.exec(
        ["python3", "-c", program("run_tests")],
        key="tests",
        deadline_s=deadline_s,
        stdin=json.dumps({"nonce": nonce, "runner": runner, "path": path}).encode(),
        output_bytes=_OUTPUT_BYTES,
    )
    rows = [
        json.loads(line.partition(b" ")[2]) for line in result.output.split(b"\n") if line.startswith(nonce.encode())
    ]
    ends: dict[str, set[str]] = {}
    for row in rows:
        if row is not None:
            ends.setdefault(row[0], set()).add(row[1])
    if "missing" in ends.get("pytest", ()):
        raise TaskError("the machine has no pytest", f"{path} needs it", hint="give an image that has it")
    return {name for name, outcomes in ends.items() if outcomes == {"passed"}}
