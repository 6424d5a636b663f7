"""Tasks from history: a commit whose tests fail on its parent and pass with it (as SWE-bench, Jimenez et al. 2024). A
merge is one change: from its first parent to its tree.

The agent finds the parent's tree as plain files, without history. Hidden are the commit's own test files, what they
read, what configures them, and the exact names: all that fail before and pass after, and tests of the same files that
pass both times. The solution is the commit's code alone. It is run a second time with the commit's other files spoilt:
what needs those would be decided by files that an agent may write as it likes; what passes in one run of two is noise.
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
    Ran,
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
from etude.tasks.trees import MAX_FILES

MAX_SOURCE_FILES = 20
MAX_TREE_BYTES = 12 << 20  # exports are bounded, and every file outside tests is one
SPOILT = "what was here is gone\n"
"""In the place of a commit's files that are neither code nor its tests'."""
MAX_FAILING, MAX_PASSING = 100, 20
TEST_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Found:
    """A task with its answer, before proof. `base` is what several tasks of a repository share of their files."""

    task: Task
    answer: Answer
    num_failing: int
    num_passing: int


@dataclass(frozen=True, slots=True)
class Trees:
    """A commit's texts and its parent's; what changed between them."""

    before: dict[str, str]
    after: dict[str, str]
    tests: tuple[str, ...]  # changed or new: test files, and what configures them
    code: tuple[str, ...]  # changed or new Python outside tests
    rest: tuple[str, ...]  # other texts that are changed or new


def trees_of(repository: Repository, commit: Commit) -> Trees | str:
    """What a commit changed, or why it can be no task: decided before any text is read."""
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
        return f"changes {lost[0]}, which is no text"
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
) -> Found | str:
    """The task of a commit, or why there is none. `deadline_s` bounds each of the three runs of the commit's tests."""
    is_merge = len(commit.parents) > 1
    instruction = instruction_from(of_merge(commit.message) if is_merge else commit.message)
    if instruction is None and is_merge:
        instruction = instruction_from(repository.merged(commit))
    if instruction is None:
        return f"its message says too little: {MIN_WORDS} words are needed"
    trees = trees_of(repository, commit)
    if isinstance(trees, str):
        return trees
    files = [path for path in trees.tests if holds_tests(path)]
    runner = runner_for(trees.after[path] for path in files)

    async def run(tree: Mapping[str, str]) -> Ran:
        return await run_tests(runtime, tree, files, runner, deadline_s=deadline_s, image=image)

    try:
        solved = await run(trees.after)
        if not solved.passed:
            return _nothing_passes(solved.trouble)
        data, helpers = data_of_tests(solved.reads), helpers_of_tests(imports_in(trees.after))
        hidden = {path: trees.after[path] for path in (*trees.tests, *sorted(data)) if path in trees.after}
        loading = {path: trees.after[path] for path in trees.code if path in helpers}
        before = await run(trees.before | hidden | loading)
        if loading and not solved.passed - before.passed:  # then they are what the commit is about
            helpers, loading = helpers - set(loading), {}
            before = await run(trees.before | hidden)
        if not solved.passed - before.passed:
            return "its tests pass before it"
        hidden |= loading
        code = {path: trees.after[path] for path in trees.code if path not in loading}
        spoilt = {path: SPOILT for path in trees.rest if path not in data}
        after = solved.passed & (await run(trees.before | hidden | code | spoilt)).passed
    except TaskError as error:
        return f"{error.what}: {error.facts}"
    failing, both = sorted(after - before.passed), sorted(after & before.passed)
    if not failing:
        needed = f", or need other files than code: {next(iter(spoilt))}" if spoilt else ""
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
        family="commit",
        instruction=_told(instruction, failing),
        image=image,
        kept=data | helpers,
    )
    return Found(task, answer, len(failing), len(both[:MAX_PASSING]))


def _nothing_passes(trouble: str) -> str:
    """Why, as far as tests said so: a module that the machine does not have is the usual reason."""
    module = re.search(r"No module named '([\w.]+)'", trouble)
    if module:
        return f"its tests need {module[1].partition('.')[0]}, which is not found in the machine"
    return f"none of its tests pass: {trouble}" if trouble else "none of its tests pass"


def _told(instruction: str, failing: list[str]) -> str:
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
    """Make a task of a whole repository. Its exports are all files outside of its tests and those that the reference
    adds, except the files in `kept`, which tests read or load their cases with."""
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
    """Folders without a test as folders, other files outside tests by name: what an agent may change and add to.
    Neither what is `kept` nor what configures tests is among them, and to folders with such files nothing is added.

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
