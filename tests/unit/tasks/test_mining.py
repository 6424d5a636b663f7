"""Tasks from a repository: found in machines, proven, written, read again; what was tried is not tried twice."""

from __future__ import annotations

import asyncio
import json
import subprocess
import textwrap
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from tests.here import opened
from tests.unit.tasks.repositories import CALC, DISCOUNT, TEST_BOTH, bomb, commit, git, shop

from etude.environments import MachineGrader, NamespaceRuntime
from etude.errors import NoSource, TaskError
from etude.records.task import Runner, Split
from etude.seams import Grader, Runtime
from etude.tasks import DirectorySource, check
from etude.tasks.journal import Journal
from etude.tasks.leaks import leaks_in_machines
from etude.tasks.mining import FILE, Attempt, Repository, functions_to_delete, mine_commits, mine_deletions
from etude.tasks.mining.deletions import covering_tests, functions_in
from etude.tasks.mining.messages import instruction_from
from etude.tasks.mining.testing import run_tests
from etude.tasks.mutation_testing import run_mutants

T = TypeVar("T")


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


def test_a_folder_of_another_repository_is_not_mined_as_one(tmp_path) -> None:
    shop(tmp_path / "repo")
    (tmp_path / "repo" / "empty" / "inner").mkdir(parents=True)
    with pytest.raises(NoSource, match=f"hint: give {tmp_path}/repo"):
        Repository(tmp_path / "repo" / "empty" / "inner")


def test_a_tree_of_any_number_of_files_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    bomb(tmp_path / "repo")
    with pytest.raises(TaskError, match="too large to be read") as caught:
        Repository(tmp_path / "repo").tree("HEAD")
    assert "git ls-tree prints more than" in caught.value.facts
    assert caught.value.hint


def test_a_blob_that_is_no_text_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    git(tmp_path / "repo", "init", "-q")
    (tmp_path / "repo" / "zeros.bin").write_bytes(bytes(64 << 20))
    commit(tmp_path / "repo", "zeros", {"a.py": "A = 1\n"})
    repository = Repository(tmp_path / "repo")
    tracemalloc.start()
    try:
        assert repository.texts(repository.tree("HEAD")) == {"a.py": "A = 1\n"}
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_more_text_than_a_tree_may_have_is_refused_and_less_is_read_in_batches(tmp_path: Path, monkeypatch) -> None:
    files = {f"{name}.txt": name * 1000 for name in "abcde"}
    (tmp_path / "repo").mkdir()
    git(tmp_path / "repo", "init", "-q")
    commit(tmp_path / "repo", "texts", files)
    monkeypatch.setattr("etude.tasks.mining.git.MAX_BATCH_BYTES", 2500)
    repository = Repository(tmp_path / "repo")
    assert repository.texts(repository.tree("HEAD")) == files
    monkeypatch.setattr("etude.tasks.mining.git.MAX_TEXT_BYTES", 2000)
    monkeypatch.setattr("etude.tasks.mining.git.MAX_CACHED_BYTES", 2000)
    repository = Repository(tmp_path / "repo")
    with pytest.raises(TaskError, match="too much text"):
        repository.texts(repository.tree("HEAD"))


def test_a_message_may_have_any_character_and_any_length(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    git(tmp_path / "repo", "init", "-q")
    commit(tmp_path / "repo", "one\x01\x02 two\n\nthree", {"a.py": "A = 1\n"})
    commit(tmp_path / "repo", "\x01", {"a.py": "A = 2\n"})
    assert [one.message for one in Repository(tmp_path / "repo").commits(5)] == ["\x01", "one\x01\x02 two\n\nthree"]
    long = "Mend the rounding of halves\n\n" + "".join(f"Key-{at}: value\n" for at in range(400_000))
    assert instruction_from(long.replace("-", "")) is not None


FORGING = """import sys, unittest

class T(unittest.TestCase):
    def test_a(self):
        frame = sys._getframe()
        while "request" not in frame.f_locals:
            frame = frame.f_back
        for row in ROWS:
            frame.f_locals["out"].write(frame.f_locals["request"]["nonce"] + " " + row + chr(10))
"""


@pytest.mark.parametrize(
    "row", ['["test", [], 1]', '["test"]', '[["test"], "b", "c"]', "{", "[" * 5000, '["read", "\\ud800", "b"]', "7"]
)
def test_a_row_that_no_runner_reports_is_none(using, row: str) -> None:
    files = {"test_a.py": FORGING.replace("ROWS", repr([row]))}

    async def work(runtime: Runtime, _: Grader) -> None:
        ran = await run_tests(runtime, files, ["test_a.py"], Runner.UNITTEST, deadline_s=60.0)
        assert ran.passed == {"test_a.T.test_a"}
        assert all(isinstance(word, str) and word.encode() for read in ran.reads for word in read)

    using(work)


def test_a_report_that_was_cut_says_so_and_passes_nothing(using) -> None:
    rows = """['["read", "%s", "%d"]' % ('a' * 1000, at) for at in range(6000)]"""
    files = {"test_a.py": FORGING.replace("ROWS", rows)}

    async def work(runtime: Runtime, _: Grader) -> None:
        ran = await run_tests(runtime, files, ["test_a.py"], Runner.UNITTEST, deadline_s=60.0)
        assert (ran.passed, ran.problem) == (frozenset(), "its tests report more than 4 MiB")

    using(work)


def _all_tasks(source: DirectorySource) -> list[tuple[Split, int]]:
    return [(split, index) for split in Split for index in range(source.size(split) or 0)]


def test_a_commit_whose_tests_fail_before_and_pass_after_becomes_a_task_without_history(tmp_path, using) -> None:
    ids = shop(tmp_path / "repo")
    told: list[Attempt] = []

    async def work(runtime: Runtime, grader: Grader) -> None:
        repository = Repository(tmp_path / "repo")
        mined = await mine_commits(repository, runtime, grader, tmp_path / "out", limit=10, on_attempt=told.append)
        assert [one.name for one in mined.tasks] == [f"commit-{ids[2][:12]}"]
        assert mined.tasks[0].num_failing == 3
        assert mined.tasks[0].num_passing == 1
        reasons = {one.key.split()[1]: one.outcome for one in mined.attempts}
        assert reasons[ids[0]].startswith("its message is too short")
        assert reasons[ids[1]] == "changes no test"
        assert reasons[ids[3]] == "its tests pass without it"
        source = DirectorySource(tmp_path / "out")
        [(split, index)] = _all_tasks(source)
        task = source.task(split, index)
        answer = source.answer(task)
        assert task.files["shop/calc.py"] == CALC
        assert not [path for path in task.files if ".git" in path or path == "tests/test_rate.py"]
        assert task.instruction.startswith("Prices can be reduced by percent\n\nNever below zero, see.")
        assert "shop/" in task.exports
        assert not [path for path in task.exports if "test" in path]
        assert answer.reference == {"shop/calc.py": CALC + DISCOUNT}
        assert answer.tests is not None
        assert answer.tests.runner is Runner.UNITTEST
        assert len(answer.tests.names) == 4
        assert "tests.test_calc.Discount.test_percent" in answer.tests.names
        assert answer.tests.files["tests/test_calc.py"] == TEST_BOTH
        (await check(source, grader, split, deadline_s=600)).require()
        [gated] = await run_mutants(source, grader, split, num_mutants=4, concurrency=4)
        assert gated.num_mutants == 4
        assert gated.survival < 1

    using(work)
    before = len(told)
    assert before == 4


def test_an_interrupted_mining_search_resumes_without_repeating_commits(tmp_path, using) -> None:
    shop(tmp_path / "repo")
    told: list[Attempt] = []

    class Interrupted(Exception):
        pass

    def stop(tried: Attempt) -> None:
        told.append(tried)
        if len(told) == 2:
            raise Interrupted

    async def work(runtime: Runtime, grader: Grader) -> None:
        repository = Repository(tmp_path / "repo")
        with pytest.raises(Interrupted):
            await mine_commits(repository, runtime, grader, tmp_path / "out", limit=10, concurrency=1, on_attempt=stop)
        kept = (tmp_path / "out" / FILE).read_text()
        assert len(kept.splitlines()) == 2
        (tmp_path / "out" / FILE).write_text(kept + '{"key": "torn')
        mined = await mine_commits(repository, runtime, grader, tmp_path / "out", limit=10)
        assert len(mined.attempts) == 4
        assert len(mined.tasks) == 1
        again = (tmp_path / "out" / FILE).read_text()
        await mine_commits(repository, runtime, grader, tmp_path / "out", limit=10)
        assert (tmp_path / "out" / FILE).read_text() == again

    using(work)


def test_a_tested_function_without_its_body_is_a_task_whose_solution_is_the_original(tmp_path, using) -> None:
    files = {
        "shop/__init__.py": "",
        "shop/calc.py": CALC + DISCOUNT,
        "tests/__init__.py": "",
        "tests/test_calc.py": TEST_BOTH,
    }
    [function] = functions_to_delete(files)
    assert (function.path, function.name) == ("shop/calc.py", "discount")
    assert '"""The price with some percent off, never below 0."""\n    raise NotImplementedError\n' in function.without

    async def work(runtime: Runtime, grader: Grader) -> None:
        mined = await mine_deletions(files, [function], runtime, grader, tmp_path / "out")
        [tried] = mined.tasks
        assert (tried.num_failing, tried.num_passing) == (3, 1)
        source = DirectorySource(tmp_path / "out")
        [(split, index)] = _all_tasks(source)
        task = source.task(split, index)
        assert task.files["shop/calc.py"] == function.without
        assert "discount in shop/calc.py" in task.instruction
        assert source.answer(task).reference == {"shop/calc.py": CALC + DISCOUNT}
        bases = [path.name for path in (tmp_path / "out" / ".bases").rglob("calc.py")]
        assert bases == []  # what is hidden is in no shared tree

    using(work)


@pytest.mark.slow
def test_real_code_of_the_standard_library_gives_deletion_tasks(tmp_path, using) -> None:
    library = Path(textwrap.__file__).parent
    if not (library / "test" / "test_textwrap.py").is_file():
        pytest.skip("this interpreter comes without its tests")
    files = {
        "wrapping.py": (library / "textwrap.py").read_text(),
        "test_wrapping.py": (library / "test" / "test_textwrap.py").read_text().replace("textwrap", "wrapping"),
    }
    functions = [one for one in functions_to_delete(files) if one.name in ("dedent", "indent", "shorten")]

    async def work(runtime: Runtime, grader: Grader) -> None:
        mined = await mine_deletions(files, functions, runtime, grader, tmp_path / "out")
        assert len(mined.tasks) >= 2, mined.attempts
        source = DirectorySource(tmp_path / "out")
        pairs = [(task, source.answer(task)) for task in (source.task(*place) for place in _all_tasks(source))]
        leaks = await leaks_in_machines(runtime, pairs)
        assert any(leak.place.endswith("textwrap.py") for found in leaks.values() for leak in found)

    using(work)


def test_a_repository_is_read_and_nothing_of_it_runs(tmp_path) -> None:
    ids = shop(tmp_path / "repo")
    hook = tmp_path / "repo" / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    config = tmp_path / "repo" / ".git" / "config"
    config.write_text(config.read_text() + f"[core]\n\tfsmonitor = touch {tmp_path}/ran\n")
    (tmp_path / "repo" / "link").symlink_to("/etc/passwd")
    (tmp_path / "repo" / "data.bin").write_bytes(b"\0\1")
    git(tmp_path / "repo", "-c", "core.fsmonitor=false", "add", "-A")
    git(tmp_path / "repo", "-c", "core.fsmonitor=false", "commit", "-qm", "odd")
    signature = "\ngpgsig -----BEGIN PGP SIGNATURE-----\n \n x\n -----END PGP SIGNATURE-----\n\n"
    signed = git(tmp_path / "repo", "cat-file", "commit", "HEAD").replace("\n\n", signature, 1)
    (tmp_path / "signed").write_text(signed)
    commit = git(tmp_path / "repo", "hash-object", "-t", "commit", "-w", str(tmp_path / "signed")).strip()
    git(tmp_path / "repo", "-c", "core.fsmonitor=false", "update-ref", "HEAD", commit)
    verifier = tmp_path / "verifier"
    verifier.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    verifier.chmod(0o755)
    config.write_text(config.read_text() + f"[log]\n\tshowSignature = true\n[gpg]\n\tprogram = {verifier}\n")
    (tmp_path / "ran").unlink(missing_ok=True)
    repository = Repository(tmp_path / "repo")
    tree = repository.tree("HEAD")
    assert "link" not in tree
    assert "data.bin" in tree
    texts = repository.texts(tree)
    assert "data.bin" not in texts
    assert texts["shop/calc.py"].startswith(CALC)
    assert [commit.id for commit in repository.commits(2)][1] == ids[3]
    assert not (tmp_path / "ran").exists()


def test_an_invalid_repository_or_commit_is_named(tmp_path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(NoSource, match="no repository"):
            Repository(path)
    shop(tmp_path / "repo")
    with pytest.raises(TaskError, match=r"cannot be read(.|\n)*hint"):
        Repository(tmp_path / "repo").tree("--output=x")


MESSAGES = {
    "Fix #12: rounding of halves\n": "Fix: rounding of halves",
    "Mend the parser (fixes GH-3)\n\nCo-authored-by: X <x@y.z>\nReviewed-by: Q": "Mend the parser",
    "Faster sums\n\nSee https://x.y/z/1 and deadbeef01 there.": "Faster sums\n\nSee and there.",
    "Note: this stays\n\nTrailing-Thing: gone": "Note: this stays",
    "fix": None,
    "#44": None,
}


@pytest.mark.parametrize("message", MESSAGES)
def test_an_instruction_says_what_to_do_and_not_where_to_look_it_up(message: str) -> None:
    assert instruction_from(message) == MESSAGES[message]


def test_bodies_are_found_with_their_decorators_nested_parts_and_docstrings() -> None:
    text = (
        "class A:\n    @property\n    def a(self):\n        '''doc'''\n        @cache\n        def inner():\n"
        "            return 1\n        x = 2\n        return inner() + x\n\n"
        "    def short(self): return 1\n\n    b = 3\n"
    )
    [function] = functions_in("a.py", text)
    assert function.name == "A.a"
    assert function.without == (
        "class A:\n    @property\n    def a(self):\n        '''doc'''\n        raise NotImplementedError\n\n"
        "    def short(self): return 1\n\n    b = 3\n"
    )
    assert functions_in("a.py", "def f(:\n") == []


def test_tests_of_a_module_are_those_named_after_it_else_those_that_import_it() -> None:
    files = {"pkg/a.py": "", "pkg/b.py": "", "tests/test_a.py": "", "tests/test_x.py": "from pkg import a, b\n"}
    assert covering_tests("pkg/a.py", files) == ["tests/test_a.py"]
    assert covering_tests("pkg/b.py", files) == ["tests/test_x.py"]
    assert covering_tests("pkg/c.py", files) == []


def test_a_damaged_journal_forgets_only_what_is_damaged(tmp_path) -> None:
    journal = Journal(tmp_path / FILE, Attempt)
    journal.add(Attempt("commit a", "task", "n"))
    journal.path.write_text(
        journal.path.read_text() + "{}\n[]\nnonsense\n" + json.dumps({"key": "b", "outcome": "no"}) + "\n"
    )
    assert set(Journal(tmp_path / FILE, Attempt).entries) == {"commit a", "b"}


def test_a_bundle_cannot_be_written_into(tmp_path) -> None:
    shop(tmp_path / "repo")
    git(tmp_path / "repo", "bundle", "create", "-q", str(tmp_path / "b.bundle"), "HEAD", "main")
    before = (tmp_path / "b.bundle").read_bytes()
    with pytest.raises(NoSource):
        Repository(tmp_path / "b.bundle")
    assert (tmp_path / "b.bundle").read_bytes() == before
    assert subprocess.run(
        ["git", "bundle", "verify", "-q", str(tmp_path / "b.bundle")], cwd=tmp_path / "repo", check=False
    )
