"""Make tasks from history: commits whose tests fail on the parent and pass with the commit.

A merge counts as one change from its first parent. The agent gets the files of the parent, without history. The test
files of the commit, the data that they read and their configuration are hidden. So are the names of the tests to pass:
all tests that fail before the commit and pass after it, and those of the same files that pass both times. The solution
is the code of the commit only. The tests run a second time with the other files of the commit replaced by a
placeholder: a test must not depend on files that an agent can write as it likes, and a test that passes only once is
flaky.

As in SWE-bench (Jimenez et al. 2024).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from etude.errors import TaskError
from etude.records.exports import CONFIGURATION
from etude.records.image import Image
from etude.records.task import Answer, HiddenTests, Runner, Task, Trust
from etude.seams import Runtime
from etude.tasks.mining.git import Commit, Repository
from etude.tasks.mining.messages import MIN_WORDS, instruction_from, of_merge
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
from etude.tasks.splits import split_of
from etude.tasks.text_files import MAX_FILES

MAX_SOURCE_FILES = 20
MAX_TREE_BYTES = 12 << 20  # exports are limited, and every file outside tests is exported
PLACEHOLDER = "this file was replaced\n"
"""Content of files of a commit that are neither code nor belong to its tests."""
MAX_FAILING, MAX_PASSING = 100, 20
TEST_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A task with its answer, before validation.

    `num_failing` counts tests that fail before the change and pass after it, `num_passing` those that pass both times.
    """

    task: Task
    answer: Answer
    num_failing: int
    num_passing: int


@dataclass(frozen=True, slots=True)
class Trees:
    """The text files of a commit (`after`) and of its parent (`before`), path -> text, and the paths that changed.

    Changed or new files are in `tests` (with their configuration), `code` (other Python) or `rest`."""

    before: dict[str, str]
    after: dict[str, str]
    tests: tuple[str, ...]  # changed or new test files and their configuration
    code: tuple[str, ...]  # changed or new Python files outside tests
    rest: tuple[str, ...]  # other changed or new text files


def trees_of(repository: Repository, commit: Commit) -> Trees | str:
    """Return the files of a commit and of its parent, or the reason why it cannot become a task."""
    if not commit.parents:
        return "is the first commit"
    old, new = repository.tree(commit.parents[0]), repository.tree(commit.id)
    changed = [path for path, blob in new.items() if old.get(path) != blob]
    tests = tuple(path for path in changed if is_test(path) or PurePosixPath(path).name in CONFIGURATION)
    code = tuple(path for path in changed if path.endswith(".py") and path not in tests)
    if not any(holds_tests(path) for path in tests):
        return "changes no test"
    if not code:
        return "changes no Python outside tests"
    if len(code) > MAX_SOURCE_FILES:
        return f"changes {len(code)} modules, more than {MAX_SOURCE_FILES}"
    if len(new) > MAX_FILES:
        return f"has {len(new)} files, more than {MAX_FILES}"
    before, after = repository.texts(old), repository.texts(new)
    if sum(map(len, after.values())) > MAX_TREE_BYTES:
        return f"has more than {MAX_TREE_BYTES >> 20} MiB of text"
    lost = [path for path in (*tests, *code) if path.endswith(".py") and path not in after]
    if lost:
        return f"changes {lost[0]}, which is not a text file"
    kept = [path for path in changed if path in after]
    rest = tuple(path for path in kept if path not in tests and path not in code)
    return Trees(before, after, tuple(path for path in kept if path in tests), code, rest)


async def task_of_commit(
    repository: Repository,
    commit: Commit,
    runtime: Runtime,
    *,
    source: str,
    image: Image | None = None,
    deadline_s: float = TEST_DEADLINE_S,
) -> Candidate | str:
    """Make a task from a commit of a repository, or return the reason why that is not possible.

    `source` is the name of the task's source. The commit's tests run three times in machines with `image`, each time
    for at most `deadline_s` seconds."""
    is_merge = len(commit.parents) > 1
    instruction = instruction_from(of_merge(commit.message) if is_merge else commit.message)
    if instruction is None and is_merge:
        instruction = instruction_from(repository.merged(commit))
    if instruction is None:
        return f"its message is too short: {MIN_WORDS} words are needed"
    trees = trees_of(repository, commit)
    if isinstance(trees, str):
        return trees
    return await task_of_trees(
        trees, instruction, runtime, source=source, family="commit", image=image, deadline_s=deadline_s
    )


async def task_of_trees(
    trees: Trees,
    instruction: str,
    runtime: Runtime,
    *,
    source: str,
    family: str,
    image: Image | None = None,
    deadline_s: float = TEST_DEADLINE_S,
) -> Candidate | str:
    """Make a task from two trees, whose hidden tests fail before the change and pass after it, or return the reason why
    that is not possible.

    The tests run three times in machines with `image`, each time for at most `deadline_s` seconds."""
    files = [path for path in trees.tests if holds_tests(path)]
    runner = runner_for(trees.after[path] for path in files)

    async def run(tree: Mapping[str, str]) -> TestResults:
        return await run_tests(runtime, tree, files, runner, deadline_s=deadline_s, image=image)

    try:
        solved = await run(trees.after)
        if not solved.passed:
            return _nothing_passes(solved.problem)
        data, helpers = data_of_tests(solved.reads), helpers_of_tests(imports_in(trees.after))
        hidden = {path: trees.after[path] for path in (*trees.tests, *sorted(data)) if path in trees.after}
        loading = {path: trees.after[path] for path in trees.code if path in helpers}
        before = await run(trees.before | hidden | loading)
        if loading and not solved.passed - before.passed:  # then the commit is about these helpers
            helpers, loading = helpers - set(loading), {}
            before = await run(trees.before | hidden)
        if not solved.passed - before.passed:
            return "its tests pass without it"
        hidden |= loading
        code = {path: trees.after[path] for path in trees.code if path not in loading}
        replaced = {path: PLACEHOLDER for path in trees.rest if path not in data}
        after = solved.passed & (await run(trees.before | hidden | code | replaced)).passed
    except TaskError as error:
        return f"{error.what}: {error.facts}"
    failing, both = sorted(after - before.passed), sorted(after & before.passed)
    if not failing:
        needed = f", or need files that are not code: {next(iter(replaced))}" if replaced else ""
        return f"its tests do not pass twice{needed}"
    answer = Answer(
        reference=code,
        tests=HiddenTests(
            runner=runner,
            files=hidden,
            names=(*failing[:MAX_FAILING], *both[:MAX_PASSING]),
            roots=source_roots(trees.after),
            deadline_s=solved.deadline_s(deadline_s),
        ),
    )
    task = whole_tree_task(
        trees.before,
        answer,
        source=source,
        family=family,
        instruction=_with_test_names(instruction, failing),
        image=image,
        kept=data | helpers,
    )
    return Candidate(task, answer, len(failing), len(both[:MAX_PASSING]))


def _nothing_passes(problem: str) -> str:
    """The reason why no test passes, from the error of the tests. Usually a module is not installed in the machine."""
    module = re.search(r"No module named '([\w.]+)'", problem)
    if module:
        return f"its tests need {module[1].partition('.')[0]}, which is not installed in the machine"
    return f"none of its tests pass: {problem}" if problem else "none of its tests pass"


def _with_test_names(instruction: str, failing: list[str]) -> str:
    named = ", ".join(name.replace("::", ".").rpartition(".")[2] for name in failing[:5])
    more = f" and {len(failing) - 5} more" if len(failing) > 5 else ""
    return f"{instruction}\n\nHidden tests decide: {named}{more}."


def whole_tree_task(
    files: Mapping[str, str],
    answer: Answer,
    *,
    source: str,
    family: str,
    instruction: str,
    image: Image | None,
    kept: Collection[str] = (),
) -> Task:
    """Make a task from all files of a repository.

    The agent can change all files outside of tests and all files that the reference changes, except `kept`, on which
    tests depend."""
    exports = exports_outside_tests({*files, *answer.reference}, set(kept) - set(answer.reference))
    tests = answer.tests
    module = "pytest" if tests is not None and tests.runner is Runner.PYTEST else "unittest"
    roots = ":".join(tests.roots) if tests is not None else ""
    key = "\0".join([instruction, *(answer.reference.get(path, "") for path in sorted(answer.reference))])
    return Task(
        source=source,
        split=split_of(key),
        index=0,
        family=family,
        instruction=instruction,
        files=dict(files),
        exports=exports,
        test_command=(*(("env", f"PYTHONPATH={roots}") if roots else ()), "python3", "-m", module, "-q"),
        trust=Trust.CODE,
        image=image,
    )


def exports_outside_tests(paths: Collection[str], kept: Collection[str] = ()) -> tuple[str, ...]:
    """Return the files and folders of a repository that an agent can change, in the format of `Task.exports`.

    They are folders without tests ("pkg/", to which the agent can also add files), and single files in other folders.
    Files in `kept` and the configuration of tests are excluded.

    >>> exports_outside_tests(["setup.py", "pkg/a.py", "pkg/sub/b.py", "lib/c.py", "lib/test_c.py", "tox.ini"])
    ('lib/c.py', 'pkg/', 'setup.py')
    >>> exports_outside_tests(["pkg/a.py", "cases/a.json", "cases/b.json"], ["cases/a.json"])
    ('cases/b.json', 'pkg/')
    """

    def is_kept(path: str) -> bool:
        return is_test(path) or path in kept or PurePosixPath(path).name in CONFIGURATION

    tested = {str(folder) for path in {*paths, *kept} if is_kept(path) for folder in PurePosixPath(path).parents}
    found = set()
    for path in paths:
        if not is_kept(path):
            free = [str(folder) for folder in PurePosixPath(path).parents if str(folder) not in {*tested, "."}]
            found.add(f"{free[-1]}/" if free else path)
    return tuple(sorted(found))
