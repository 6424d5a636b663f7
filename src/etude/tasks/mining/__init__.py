"""Tasks from a repository's own history and tests, proven by the grader before they are written.

Whatever a repository holds runs in machines only. A search can be interrupted: what was tried is kept beside the tasks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.records.image import Image
from etude.seams import Grader, Runtime
from etude.tasks.files import write_task
from etude.tasks.journal import Journal
from etude.tasks.mining.commits import TEST_DEADLINE_S, Found, task_of_commit
from etude.tasks.mining.deletions import DeletionMiner, Function, covering_tests, functions_in
from etude.tasks.mining.git import Commit, Repository
from etude.tasks.mining.testing import is_test
from etude.tasks.proof import fault
from etude.tasks.verdicts import in_parallel

__all__ = ["Mined", "Repository", "Tried", "functions_to_delete", "mine_commits", "mine_deletions"]

FILE = ".mined.jsonl"
"""What was tried, beside the tasks that came of it."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One commit or function, and what came of it."""

    key: str  # "commit 3fa9...", "function pkg/a.py:Stack.push", with what it was tried with
    outcome: str  # "task", or why there is none
    name: str = ""  # the task's folder
    num_failing: int = 0  # tests that fail before and pass after
    num_passing: int = 0  # tests that pass in both and are demanded, too
    wall_s: float = 0.0


Told = Callable[[Tried], None]


@dataclass(frozen=True, slots=True)
class Mined:
    """What a search came to: everything that was tried, now and before."""

    tried: tuple[Tried, ...]

    @property
    def tasks(self) -> list[Tried]:
        return [one for one in self.tried if one.outcome == "task"]

    def reasons(self) -> dict[str, int]:
        """How often each reason for no task was given."""
        counts: dict[str, int] = {}
        for one in self.tried:
            if one.outcome != "task":
                counts[one.outcome] = counts.get(one.outcome, 0) + 1
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
    told: Told = lambda _: None,
) -> Mined:
    """Try the newest `limit` commits and write a task folder below `out` for each that proves itself.

    `deadline_s` bounds each run of a commit's tests, and each hidden test. Raises `TaskError` for a repository that
    cannot be read, `StoreError` for a folder that cannot be written.
    """
    commits = repository.commits(limit)
    search = _Search(out, grader, deadline_s, told)

    async def one(commit: Commit) -> None:
        async def find() -> Found | str:
            return await task_of_commit(
                repository, commit, runtime, source=out.name, image=image, deadline_s=deadline_s
            )

        await search.attempt(f"commit {commit.id}", f"commit-{commit.id[:12]}", find)

    await in_parallel(commits, one, concurrency)
    return Mined(tuple(search.journal.entries.values()))


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
    told: Told = lambda _: None,
) -> Mined:
    """Try to delete each function from a tree; see `mine_commits`."""
    search = _Search(out, grader, deadline_s, told)
    miner = DeletionMiner(files, runtime, source=out.name, image=image, deadline_s=deadline_s)

    async def one(function: Function) -> None:
        async def find() -> Found | str:
            return await miner.task_of(function)

        digest = hashlib.sha256(f"{function.path}\0{function.name}\0{function.without}".encode()).hexdigest()[:12]
        await search.attempt(f"function {function.path}:{function.name} {digest}", f"deletion-{digest}", find)

    await in_parallel(functions, one, concurrency)
    return Mined(tuple(search.journal.entries.values()))


def functions_to_delete(files: Mapping[str, str], only: Iterable[str] = ()) -> list[Function]:
    """Every function of a tree that tests are about, in the order of paths; `only` names modules, all where empty."""
    wanted = set(only)
    paths = [p for p in sorted(files) if p.endswith(".py") and not is_test(p) and (not wanted or p in wanted)]
    return [function for path in paths if covering_tests(path, files) for function in functions_in(path, files[path])]


class _Search:
    """Tries what was not tried, proves what was found, writes what is proven."""

    def __init__(self, out: Path, grader: Grader, deadline_s: float, told: Told) -> None:
        self.journal = Journal(out / FILE, Tried)
        self._out, self._grader, self._deadline_s, self._told = out, grader, deadline_s, told

    async def attempt(self, key: str, name: str, find: Callable[[], Awaitable[Found | str]]) -> None:
        before = self.journal.entries.get(key)
        if before is not None:
            self._told(before)
            return
        started = time.perf_counter()
        found = await find()
        tried = Tried(key, found) if isinstance(found, str) else await self._prove(key, name, found)
        tried = Tried(key, tried.outcome, tried.name, tried.num_failing, tried.num_passing, _rounded(started))
        self.journal.add(tried)
        self._told(tried)

    async def _prove(self, key: str, name: str, found: Found) -> Tried:
        tests = found.answer.tests
        num_names = len(tests.names) if tests is not None else 1
        reason = await fault(self._grader, found.task, found.answer, 60 + self._deadline_s * num_names)
        if reason:
            return Tried(key, f"does not prove itself: {reason}")
        shared = {p: t for p, t in found.task.files.items() if p not in found.answer.reference}
        write_task(self._out, name, found.task, found.answer, base=shared)
        return Tried(key, "task", name, found.num_failing, found.num_passing)


def _rounded(started: float) -> float:
    return round(time.perf_counter() - started, 2)
