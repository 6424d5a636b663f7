"""Tasks from history: a commit whose tests fail on its parent and pass with it (as SWE-bench, Jimenez et al. 2024).

The agent finds the parent's tree as plain files, without history. Hidden are the commit's own test files and the exact
names: all that fail before and pass after, and tests of the same files that pass both times. What passes in one of two
runs of the solved tree is left out: it would be noise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from etude.errors import TaskError
from etude.records.image import Image
from etude.records.task import Answer, HiddenTests, Runner, Task, Trust
from etude.seams import Runtime
from etude.tasks.mining.git import Commit, Repository
from etude.tasks.mining.messages import MIN_WORDS, instruction_from
from etude.tasks.mining.testing import holds_tests, is_test, passing, runner_for
from etude.tasks.splits import split_of
from etude.tasks.trees import MAX_FILES

MAX_SOURCE_FILES = 20
MAX_TREE_BYTES = 12 << 20  # exports are bounded, and every file outside tests is one
MAX_FAILING, MAX_PASSING = 100, 20
TEST_DEADLINE_S = 60.0
HIDDEN_DEADLINE_S = 20.0  # of one test at most: a wrong solution that loops costs as much for each


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
    tests: tuple[str, ...]  # changed or new test files
    sources: tuple[str, ...]  # changed or new other files


def trees_of(repository: Repository, commit: Commit) -> Trees | str:
    """What a commit changed, or why it can be no task: decided before any text is read."""
    if len(commit.parents) != 1:
        return "has no single parent"
    old, new = repository.tree(commit.parents[0]), repository.tree(commit.id)
    changed = [path for path, blob in new.items() if old.get(path) != blob]
    tests = tuple(path for path in changed if is_test(path))
    sources = tuple(path for path in changed if not is_test(path))
    if not any(holds_tests(path) for path in tests):
        return "changes no test"
    if not any(path.endswith(".py") for path in sources):
        return "changes no Python outside tests"
    if len(sources) > MAX_SOURCE_FILES:
        return f"changes {len(sources)} files, more than {MAX_SOURCE_FILES}"
    if len(new) > MAX_FILES:
        return f"has {len(new)} files, more than {MAX_FILES}"
    before, after = repository.texts(old), repository.texts(new)
    if sum(map(len, after.values())) > MAX_TREE_BYTES:
        return f"has more than {MAX_TREE_BYTES >> 20} MiB of text"
    lost = [path for path in (*tests, *sources) if path not in after]
    return f"changes {lost[0]}, which is no text" if lost else Trees(before, after, tests, sources)


async def task_of_commit(
    repository: Repository,
    commit: Commit,
    runtime: Runtime,
    *,
    source: str,
    image: Image | None = None,
    deadline_s: float = TEST_DEADLINE_S,
) -> Found | str:
    """The task of a commit, or why there is none. `deadline_s` bounds each of three runs of the commit's tests."""
    instruction = instruction_from(commit.message)
    if instruction is None:
        return f"its message says too little: {MIN_WORDS} words are needed"
    trees = trees_of(repository, commit)
    if isinstance(trees, str):
        return trees
    files = [path for path in trees.tests if holds_tests(path)]
    runner = runner_for(trees.after[path] for path in files)
    hidden = {path: trees.after[path] for path in trees.tests}
    try:
        after = await passing(runtime, trees.after, files, runner, deadline_s=deadline_s, image=image)
        if not after:
            return "none of its tests pass"
        before = await passing(runtime, trees.before | hidden, files, runner, deadline_s=deadline_s, image=image)
        if not after - before:
            return "its tests pass before it"
        after &= await passing(runtime, trees.after, files, runner, deadline_s=deadline_s, image=image)
    except TaskError as error:
        return f"{error.what}: {error.facts}"
    failing, both = sorted(after - before), sorted(after & before)
    if not failing:
        return "its tests do not pass twice"
    answer = Answer(
        reference={path: trees.after[path] for path in trees.sources},
        tests=HiddenTests(
            runner=runner,
            files=hidden,
            names=(*failing[:MAX_FAILING], *both[:MAX_PASSING]),
            deadline_s=min(deadline_s, HIDDEN_DEADLINE_S),
        ),
    )
    task = whole_tree_task(
        trees.before, answer, source=source, family="commit", instruction=_told(instruction, failing), image=image
    )
    return Found(task, answer, len(failing), len(both[:MAX_PASSING]))


def _told(instruction: str, failing: list[str]) -> str:
    named = ", ".join(name.replace("::", ".").rpartition(".")[2] for name in failing[:5])
    more = f" and {len(failing) - 5} more" if len(failing) > 5 else ""
    return f"{instruction}\n\nHidden tests decide: {named}{more}."


def whole_tree_task(
    files: Mapping[str, str], answer: Answer, *, source: str, family: str, instruction: str, image: Image | None
) -> Task:
    """A task over a whole repository: every file outside its tests may be changed, and those the reference adds."""
    exports = exports_outside_tests({*files, *answer.reference})
    tests = answer.tests
    module = "pytest" if tests is not None and tests.runner is Runner.PYTEST else "unittest"
    key = "\0".join([instruction, *(answer.reference.get(path, "") for path in sorted(answer.reference))])
    return Task(
        source=source,
        split=split_of(key),
        index=0,
        family=family,
        instruction=instruction,
        files=dict(files),
        exports=exports,
        test_command=("python3", "-m", module, "-q"),
        trust=Trust.CODE,
        image=image,
    )


def exports_outside_tests(paths: Collection[str]) -> tuple[str, ...]:
    """Folders without a test as folders, other files outside tests by name: what an agent may change and add to.

    >>> exports_outside_tests(["setup.py", "pkg/a.py", "pkg/sub/b.py", "lib/c.py", "lib/test_c.py"])
    ('lib/c.py', 'pkg/', 'setup.py')
    """
    tested = {str(folder) for path in paths if is_test(path) for folder in PurePosixPath(path).parents}
    found = set()
    for path in paths:
        if not is_test(path):
            free = [str(folder) for folder in PurePosixPath(path).parents if str(folder) not in {*tested, "."}]
            found.add(f"{free[-1]}/" if free else path)
    return tuple(sorted(found))
