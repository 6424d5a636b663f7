"""Tasks whose tests read files: those are the tests', the code alone is the solution, and no agent's data decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from tests.here import opened
from tests.unit.tasks.repositories import commit, git

from etude.environments import MachineGrader, NamespaceRuntime
from etude.environments.grading.exports import reference_exports, validate_exports
from etude.records.rollout import Graded
from etude.records.task import Answer, Split, Task
from etude.seams import Grader, Runtime
from etude.tasks import DirectorySource
from etude.tasks.mining import Repository, functions_to_delete, mine_commits, mine_deletions
from etude.tasks.mining.commits import Trees, trees_of
from etude.tasks.mining.testing import data_of_tests, source_roots

T = TypeVar("T")
RIGHT = "def bitcount(n):\n    count = 0\n    while n:\n        n &= n - 1\n        count += 1\n    return count\n"
WRONG = RIGHT.replace("n &= n - 1", "n ^= n - 1").replace("while n:", "for _ in range(n):")
LOADER = """import json
from pathlib import Path

def load(name):
    return [json.loads(line) for line in (Path(__file__).parent.parent / f"{FOLDER}/{name}.json").open()]
"""
PYTEST = """import pytest
from checks.loader import load
from programs.bitcount import bitcount

@pytest.mark.parametrize("given,expected", load("bitcount"))
def test_bitcount(given, expected):
    assert bitcount(*given) == expected
"""
UNITTEST = """import unittest
from checks.loader import load
from programs.bitcount import bitcount

class Bitcount(unittest.TestCase):
    def test_all(self):
        for given, expected in load("bitcount"):
            self.assertEqual(bitcount(*given), expected)
"""
CASES = "[[127], 7]\n[[128], 1]\n"
MESSAGE = "Count the bits of a number right"


def repository(folder: Path, *, data: str, test: str, extra: dict[str, str] | None = None) -> str:
    """Of QuixBugs' shape: a program, a test that reads its cases by path, and the commit that mends it; its id."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    loader = LOADER.replace("{FOLDER}", data)
    old = {f"{data}/gcd.json": "[[1, 1], 1]\n", "checks/__init__.py": "", "programs/__init__.py": ""}
    before = {**old, "checks/test_loader.py": "", "checks/conftest.py": "", "checks/loader.py": loader}
    commit(folder, "start", {**before, "programs/bitcount.py": WRONG})
    after = {"programs/bitcount.py": RIGHT, "checks/test_bitcount.py": test, f"{data}/bitcount.json": CASES}
    return commit(folder, MESSAGE, {**after, **(extra or {})})


@pytest.fixture
def using() -> Callable[[Callable[[Runtime, Grader], Awaitable[T]]], T]:
    """Runs a test with machines of namespaces; skipped where there are none."""

    def run(work: Callable[[Runtime, Grader], Awaitable[T]]) -> T:
        async def main() -> T:
            runtime = opened("namespace", lambda: NamespaceRuntime(spare=0))
            try:
                return await work(runtime, MachineGrader(runtime, repeats=1, canaries=1))
            finally:
                await runtime.close()

        return asyncio.run(main())

    return run


def only_task(folder: Path) -> tuple[Task, Answer]:
    source = DirectorySource(folder)
    [(split, index)] = [(split, index) for split in Split for index in range(source.size(split) or 0)]
    task = source.task(split, index)
    return task, source.answer(task)


@pytest.mark.parametrize(
    ("data", "test"),
    [
        ("json_testcases", UNITTEST),
        ("examples", UNITTEST),
        pytest.param("examples", PYTEST, marks=pytest.mark.slow, id="by pytest"),
    ],
)
def test_files_that_tests_read_are_hidden_and_replace_the_agents(tmp_path: Path, using, data: str, test: str) -> None:
    repository(tmp_path / "repo", data=data, test=test)

    async def work(runtime: Runtime, grader: Grader) -> None:
        mined = await mine_commits(Repository(tmp_path / "repo"), runtime, grader, tmp_path / "out", limit=1)
        assert len(mined.tasks) == 1, mined.reasons()
        task, answer = only_task(tmp_path / "out")
        assert answer.reference == {"programs/bitcount.py": RIGHT}
        assert answer.tests is not None
        assert answer.tests.files == {f"{data}/bitcount.json": CASES, "checks/test_bitcount.py": test}
        assert not [path for path in task.exports if path.startswith(f"{data}/") and path != f"{data}/gcd.json"]
        assert f"{data}/bitcount.json" not in task.files
        assert "checks/loader.py" not in task.exports, "it says what the cases are"
        for code, reward in ((RIGHT, 1.0), (WRONG, 0.0)):
            done = await grader.grade(task, answer, await exported(runtime, task, code))
            assert isinstance(done, Graded)
            assert done.grade == reward
        forged = json.dumps([[1], 1]).encode() + b"\n"
        exports = {"programs/bitcount.py": WRONG.encode(), f"{data}/bitcount.json": forged}
        with pytest.raises(ValueError, match="is not a declared export"):
            validate_exports(exports, task.exports)

    async def exported(runtime: Runtime, task: Task, code: str) -> dict[str, bytes]:
        return await reference_exports(runtime, task, Answer(reference={"programs/bitcount.py": code}))

    using(work)


def test_data_that_was_there_before_is_taken_from_no_agent_either(tmp_path: Path, using) -> None:
    folder = tmp_path / "repo"
    repository(folder, data="examples", test=UNITTEST)
    git(folder, "checkout", "-q", "HEAD~1")
    commit(folder, "cases are there already", {"examples/bitcount.json": CASES})
    commit(folder, MESSAGE, {"programs/bitcount.py": RIGHT, "checks/test_bitcount.py": UNITTEST})

    async def work(runtime: Runtime, grader: Grader) -> None:
        mined = await mine_commits(Repository(folder), runtime, grader, tmp_path / "out", limit=1)
        assert len(mined.tasks) == 1, mined.reasons()
        task, _ = only_task(tmp_path / "out")
        assert task.files["examples/bitcount.json"] == CASES, "as the tests that were there, it may be seen"
        assert "examples/" not in task.exports
        assert "examples/bitcount.json" not in task.exports

    using(work)


def test_a_deleted_functions_tests_read_what_no_agent_can_change(tmp_path: Path, using) -> None:
    files = {
        "programs/__init__.py": "",
        "programs/bitcount.py": RIGHT,
        "checks/__init__.py": "",
        "checks/loader.py": LOADER.replace("{FOLDER}", "examples"),
        "checks/test_bitcount.py": UNITTEST,
        "examples/bitcount.json": CASES,
        "examples/other.json": "1\n",
    }

    async def work(runtime: Runtime, grader: Grader) -> None:
        mined = await mine_deletions(files, functions_to_delete(files)[:1], runtime, grader, tmp_path / "out")
        assert len(mined.tasks) == 1, mined.reasons()
        task, _ = only_task(tmp_path / "out")
        assert [path for path in task.exports if path.startswith("examples")] == ["examples/other.json"]

    using(work)


def test_what_loads_cases_is_hidden_where_the_commit_brings_it(tmp_path: Path, using) -> None:
    newer = LOADER.replace("{FOLDER}", "examples") + "\n\nload_all = load\n"
    extra = {"checks/loader.py": newer, "checks/test_bitcount.py": UNITTEST.replace("load(", "load_all(")}
    extra["checks/test_bitcount.py"] = extra["checks/test_bitcount.py"].replace("import load", "import load_all")
    repository(tmp_path / "repo", data="examples", test="", extra=extra)

    async def work(runtime: Runtime, grader: Grader) -> None:
        mined = await mine_commits(Repository(tmp_path / "repo"), runtime, grader, tmp_path / "out", limit=1)
        assert len(mined.tasks) == 1, mined.reasons()
        task, answer = only_task(tmp_path / "out")
        assert list(answer.reference) == ["programs/bitcount.py"]
        assert answer.tests is not None
        assert answer.tests.files["checks/loader.py"] == newer
        assert "checks/loader.py" not in task.exports

    using(work)


def test_code_that_only_tests_import_is_still_the_solution(tmp_path: Path, using) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q")
    test = "import unittest\nfrom lib.bits import bitcount\n\nclass T(unittest.TestCase):\n    def test_a(self):\n"
    test += "        self.assertEqual(bitcount(127), 7)\n"
    commit(folder, "start", {"lib/__init__.py": "", "lib/bits.py": WRONG, "lib/test_other.py": "", "lib/more.py": ""})
    commit(folder, MESSAGE, {"lib/bits.py": RIGHT, "lib/test_bits.py": test})

    async def work(runtime: Runtime, grader: Grader) -> None:
        mined = await mine_commits(Repository(folder), runtime, grader, tmp_path / "out", limit=1)
        assert len(mined.tasks) == 1, mined.reasons()
        task, answer = only_task(tmp_path / "out")
        assert answer.reference == {"lib/bits.py": RIGHT}
        assert {"lib/bits.py", "lib/more.py"} <= set(task.exports)

    using(work)


def test_a_commit_whose_code_needs_its_other_files_is_no_task(tmp_path: Path, using) -> None:
    reads = 'from pathlib import Path\n\nSTEP = int((Path(__file__).parent / "step.txt").read_text())\n\n'
    extra = {"programs/bitcount.py": reads + RIGHT.replace("+= 1", "+= STEP"), "programs/step.txt": "1\n"}
    repository(tmp_path / "repo", data="examples", test=UNITTEST, extra=extra)

    async def work(runtime: Runtime, grader: Grader) -> None:
        mined = await mine_commits(Repository(tmp_path / "repo"), runtime, grader, tmp_path / "out", limit=1)
        assert list(mined.reasons()) == [
            "its tests do not pass twice, or need files that are not code: programs/step.txt"
        ]

    using(work)


def test_files_beside_the_code_do_not_count_and_configuration_is_the_tests(tmp_path: Path, using) -> None:
    settings = "[tool.pytest.ini_options]\nxfail_strict = true\n"
    extra = {"CHANGES.rst": "Bits are counted.\n", "pyproject.toml": settings, "programs/logo.svg": "<svg/>\n"}
    repository(tmp_path / "repo", data="examples", test=UNITTEST, extra=extra)

    async def work(runtime: Runtime, grader: Grader) -> None:
        mined = await mine_commits(Repository(tmp_path / "repo"), runtime, grader, tmp_path / "out", limit=1)
        assert len(mined.tasks) == 1, mined.reasons()
        task, answer = only_task(tmp_path / "out")
        assert list(answer.reference) == ["programs/bitcount.py"]
        assert answer.tests is not None
        assert answer.tests.files["pyproject.toml"] == settings
        assert "pyproject.toml" not in task.exports

    using(work)


def test_code_below_src_is_found_as_if_it_were_installed(tmp_path: Path, using) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q")
    test = "import unittest\nfrom bits import bitcount\n\nclass T(unittest.TestCase):\n    def test_a(self):\n"
    test += "        self.assertEqual(bitcount(127), 7)\n"
    commit(folder, "start", {"src/bits/__init__.py": WRONG, "tests/test_other.py": "", "CHANGES.rst": "\n"})
    commit(folder, MESSAGE, {"src/bits/__init__.py": RIGHT, "tests/test_bits.py": test, "CHANGES.rst": "bits\n"})

    async def work(runtime: Runtime, grader: Grader) -> None:
        mined = await mine_commits(Repository(folder), runtime, grader, tmp_path / "out", limit=1)
        assert len(mined.tasks) == 1, mined.reasons()
        task, answer = only_task(tmp_path / "out")
        assert answer.tests is not None
        assert answer.tests.roots == ("src",)
        [machine] = await runtime.fork(await runtime.prepare({p: t.encode() for p, t in task.files.items()}), 1)
        await machine.write("try.py", b"import bits; print(bits.__file__)")
        seen = await machine.exec([*task.test_command[:2], "python3", "try.py"], key="1", deadline_s=30)
        assert b"src/bits/__init__.py" in seen.output, "the agent's own test command finds it, too"

    using(work)


def test_a_merge_commit_is_one_change(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    repository(folder, data="examples", test=UNITTEST)
    git(folder, "checkout", "-q", "-b", "topic")
    commit(folder, "Only a test", {"checks/test_more.py": "def test_a(): assert 1\n"})
    commit(folder, "Mend what it tests", {"programs/more.py": "A = 1\n"})
    git(folder, "checkout", "-q", "main")
    git(folder, "merge", "-q", "--no-ff", "-m", "Merge pull request #3 from a/topic", "topic")
    found = Repository(folder)
    merge, *rest = found.commits(10)
    assert [one.message for one in rest] == [MESSAGE, "start"]
    changed = trees_of(found, merge)
    assert isinstance(changed, Trees)
    assert (changed.tests, changed.code) == (("checks/test_more.py",), ("programs/more.py",))
    assert "programs/bitcount.py" in changed.before, "the first parent's tree"
    assert found.merged(merge).split("\n") == ["Only a test", "", "Mend what it tests", "", ""]


def test_a_module_that_the_machine_lacks_is_named(tmp_path: Path, using) -> None:
    repository(tmp_path / "repo", data="examples", test="import absent_at_all\n" + UNITTEST)

    async def work(runtime: Runtime, grader: Grader) -> None:
        mined = await mine_commits(Repository(tmp_path / "repo"), runtime, grader, tmp_path / "out", limit=1)
        assert list(mined.reasons()) == ["its tests need absent_at_all, which is not installed in the machine"]

    using(work)


def test_a_data_file_belongs_to_the_tests_if_only_tests_read_it() -> None:
    reads = {
        ("tests/test_a.py", "samples/a.json"),
        ("checks/test_b.py", "pkg/shown.csv"),  # of the package, and a test looks into it
        ("pkg/io.py", "pkg/data/own.csv"),
        ("src/pkg/io.py", "src/pkg/own.csv"),
        ("src/pkg/io.py", "src/other/b.csv"),
        ("pkg/io.py", "samples/opened_for_a_test.json"),
        ("calc.py", "own.json"),
    }
    assert data_of_tests(reads) == {
        "samples/a.json", "pkg/shown.csv", "src/other/b.csv", "samples/opened_for_a_test.json"
    }  # fmt: skip
    assert source_roots(["src/a.py"]) == ("src",)
    assert source_roots(["src/main.c", "src/tools/gen.py", "a.py"]) == ()
