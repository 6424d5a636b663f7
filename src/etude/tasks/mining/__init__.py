"""Make tasks from the history and tests of a repository, and validate them with the grader before they are written.

Code of the repository runs only in machines. A search can be interrupted and resumed: attempts are recorded in a
journal next to the tasks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from etude.records.image import Image
from etude.seams import Grader, Runtime
from etude.tasks.files import write_task
from etude.tasks.journal import Journal
from etude.tasks.mining.commits import TEST_DEADLINE_S, Candidate, task_of_commit
from etude.tasks.mining.deletions import DeletionMiner, Function, covering_tests, functions_in
from etude.tasks.mining.git import Commit, Repository
from etude.tasks.mining.testing import is_test
from etude.tasks.proof import fault
from etude.tasks.verdicts import in_parallel

__all__ = ["Attempt", "MiningResult", "Repository", "functions_to_delete", "mine_commits", "mine_deletions"]

FILE = ".mined.jsonl"
"""The journal of attempts, in the folder of the tasks."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of trying to make a task from one commit or function.

    `key` identifies it, and `outcome` is "task" or the reason why there is none. `name` is the task's folder.
    `num_failing` counts tests that fail before the change and pass after it; `num_passing` those that pass both times
    and are required as well."""

    key: str  # "commit 3fa9...", "function pkg/a.py:Stack.push <digest>"
    outcome: str  # "task", or the reason why it is no task
    name: str = ""  # the task's folder
    num_failing: int = 0  # tests that fail before and pass after
    num_passing: int = 0  # tests that pass before and after, and are also required
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MiningResult:
    """All attempts of a search, including those of earlier, interrupted searches."""

    attempts: tuple[Attempt, ...]

    @property
    def tasks(self) -> list[Attempt]:
        """The attempts that gave a task."""
        return [attempt for attempt in self.attempts if attempt.outcome == "task"]

    def reasons(self) -> dict[str, int]:
        """Return the number of attempts for each reason why there is no task, most frequent first."""
        counts: dict[str, int] = {}
        for attempt in self.attempts:
            if attempt.outcome != "task":
                counts[attempt.outcome] = counts.get(attempt.outcome, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


async def mine_commits(
    repository: Repository,
    runtime: Runtime,
    grader: Grader,
    out: Path,
    *,
    limit: int,
    image: Image | None = None,
    deadline_s: float = TEST_DEADLINE_S,
    concurrency: int = 2,
    on_attempt: Callable[[Attempt], None] = lambda _: None,
) -> MiningResult:
    """Try to make a task from each of the newest `limit` commits, and write a folder below `out` for each valid task.

    Tests run in machines with `image` (None: the runtime's default). `deadline_s` limits each run of a commit's tests,
    and each hidden test. At most `concurrency` commits are tried at once, and `on_attempt` is called after each. Raises
    `TaskError` if the repository cannot be read, `StoreError` if `out` cannot be written."""
    commits = repository.commits(limit)
    search = _Search(out, grader, deadline_s, on_attempt)

    async def one(commit: Commit) -> None:
        async def find() -> Candidate | str:
            return await task_of_commit(
                repository, commit, runtime, source=out.name, image=image, deadline_s=deadline_s
            )

        await search.attempt(f"commit {commit.id}", f"commit-{commit.id[:12]}", find)

    await in_parallel(commits, one, concurrency)
    return MiningResult(tuple(search.journal.entries.values()))


async def mine_deletions(
    files: Mapping[str, str],
    functions: Iterable[Function],
    runtime: Runtime,
    grader: Grader,
    out: Path,
    *,
    image: Image | None = None,
    deadline_s: float = TEST_DEADLINE_S,
    concurrency: int = 2,
    on_attempt: Callable[[Attempt], None] = lambda _: None,
) -> MiningResult:
    """Try to make a task from each function by deleting its body, and write a folder below `out` for each valid task.

    `files` is the complete tree, path -> text. The other arguments are those of `mine_commits`. Raises `StoreError`."""
    search = _Search(out, grader, deadline_s, on_attempt)
    miner = DeletionMiner(files, runtime, source=out.name, image=image, deadline_s=deadline_s)

    async def one(function: Function) -> None:
        async def find() -> Candidate | str:
            return await miner.task_of(function)

        digest = hashlib.sha256(f"{function.path}\0{function.name}\0{function.without}".encode()).hexdigest()[:12]
        await search.attempt(f"function {function.path}:{function.name} {digest}", f"deletion-{digest}", find)

    await in_parallel(functions, one, concurrency)
    return MiningResult(tuple(search.journal.entries.values()))


def functions_to_delete(files: Mapping[str, str], only: Iterable[str] = ()) -> list[Function]:
    """Return every function of a tree whose module has tests, in the order of paths.

    `files` maps paths to texts. `only` restricts the search to these modules, given by path (empty: all)."""
    wanted = set(only)
    paths = [p for p in sorted(files) if p.endswith(".py") and not is_test(p) and (not wanted or p in wanted)]
    return [function for path in paths if covering_tests(path, files) for function in functions_in(path, files[path])]


class _Search:
    def __init__(self, out: Path, grader: Grader, deadline_s: float, on_attempt: Callable[[Attempt], None]) -> None:
        self.journal = Journal(out / FILE, Attempt)
        self._out, self._grader, self._deadline_s, self._on_attempt = out, grader, deadline_s, on_attempt

    async def attempt(self, key: str, name: str, find: Callable[[], Awaitable[Candidate | str]]) -> None:
        earlier = self.journal.entries.get(key)
        if earlier is not None:
            self._on_attempt(earlier)
            return
        started = time.perf_counter()
        found = await find()
        attempt = Attempt(key, found) if isinstance(found, str) else await self._validate(key, name, found)
        attempt = replace(attempt, wall_s=round(time.perf_counter() - started, 2))
        self.journal.add(attempt)
        self._on_attempt(attempt)

    async def _validate(self, key: str, name: str, found: Candidate) -> Attempt:
        tests = found.answer.tests
        num_names = len(tests.names) if tests is not None else 1
        reason = await fault(self._grader, found.task, found.answer, 60 + self._deadline_s * num_names)
        if reason:
            return Attempt(key, f"not valid: {reason}")
        shared = {p: t for p, t in found.task.files.items() if p not in found.answer.reference}
        write_task(self._out, name, found.task, found.answer, base=shared)
        return Attempt(key, "task", name, found.num_failing, found.num_passing)
