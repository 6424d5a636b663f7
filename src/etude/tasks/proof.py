"""Proving tasks before use: the reference solution scores 1, the untouched state scores 0.

A task that fails either teaches noise. Knows nothing of how grading works: it is handed a `Grader`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from etude.errors import TaskError
from etude.records.rollout import Graded, Invalid
from etude.records.task import Answer, Split, Task
from etude.seams import Grader, TaskSource

DEFAULT_TASKS = 100
"""How many tasks of an endless source are proven when nobody says."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A task that did not prove itself."""

    index: int
    task_id: str
    reason: str  # "reference solution scores 0.0: calc.py does not import: SyntaxError"


@dataclass(frozen=True, slots=True)
class Proof:
    """What `check` found."""

    source: str
    split: Split
    num_tasks: int
    failures: tuple[Failure, ...]
    wall_s: float

    @property
    def num_proven(self) -> int:
        return self.num_tasks - len(self.failures)

    def require(self, place: str = "", *, listed: bool = False) -> None:
        """Raises `TaskError` unless every task proved itself, naming the first failure if they were not `listed`
        before. `place`: what was read."""
        if self.failures:
            first, place = self.failures[0], place or self.source
            raise TaskError(
                f"{len(self.failures)} of {self.num_tasks} {self.split} tasks of {place} do not prove themselves",
                "" if listed else f"task {first.index} ({first.task_id}): {first.reason}",
                hint=f"look at it with `etude tasks show {place} --split {self.split} --index {first.index}`",
            )


async def check(
    source: TaskSource,
    grader: Grader,
    split: Split,
    n: int | None = None,
    *,
    concurrency: int = 8,
    deadline_s: float = 60.0,
) -> Proof:
    """Grade the reference and the untouched state of the split's first n tasks (all, or 100 of an endless source).

    `deadline_s` bounds each verdict; one that does not come is that task's failure, by name. Raises `TaskError` when
    the split holds no task, and whatever the source or the grader raises.
    """
    size = source.size(split)
    count = min(x for x in (n, size) if x is not None) if (n, size) != (None, None) else DEFAULT_TASKS
    if count < 1:
        raise TaskError(
            f"{source.name} has no {split} task to check",
            f"its size is {'endless' if size is None else size}",
            hint="name another split or a source with tasks",
        )
    started, failures = time.perf_counter(), []
    indices = iter(range(count))

    async def worker() -> None:
        for index in indices:
            failure = await _check_one(source, grader, split, index, deadline_s)
            if failure is not None:
                failures.append(failure)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, count)):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # one error with its hint says more than the group
    return Proof(
        source=source.name,
        split=split,
        num_tasks=count,
        failures=tuple(sorted(failures, key=lambda f: f.index)),
        wall_s=time.perf_counter() - started,
    )


async def _check_one(source: TaskSource, grader: Grader, split: Split, index: int, deadline_s: float) -> Failure | None:
    task = source.task(split, index)
    try:
        answer = source.answer(task)
    except TaskError as error:
        return Failure(index, task.task_id, f"has no answer: {str(error).splitlines()[0]}")
    strangers = sorted(set(answer.reference) - set(task.exports))
    if strangers:
        return Failure(index, task.task_id, f"the reference changes {strangers[0]}, which is not exported")
    untouched = {path: task.files[path] for path in task.exports if path in task.files}
    for label, files, wanted in (
        ("reference solution", untouched | answer.reference, 1.0),
        ("untouched state", untouched, 0.0),
    ):
        reason = await _fault(grader, task, answer, files, wanted, deadline_s)
        if reason:
            return Failure(index, task.task_id, f"{label} {reason}")
    return None


async def _fault(
    grader: Grader, task: Task, answer: Answer, files: dict[str, str], wanted: float, deadline_s: float
) -> str:
    """What is wrong with the verdict on these files; empty when it is the wanted one."""
    try:
        async with asyncio.timeout(deadline_s):
            outcome = await grader.grade(task, answer, {path: text.encode() for path, text in files.items()})
    except TimeoutError:
        return f"got no verdict within {deadline_s:g} s"
    match outcome:
        case Invalid(boundary=boundary, reason=reason):
            return f"could not be graded ({boundary}): {reason}"
        case Graded(reward=reward, reason=reason) if reward != wanted:
            return f"scores {reward:g}: {reason}"
    return ""


def show(task: Task) -> str:
    """A task as text for a terminal: what the agent is told and finds. The hidden side is not in it."""
    head = (
        ("task", f"{task.task_id} ({task.source}, {task.split} {task.index})"),
        ("family", task.family),
        ("instruction", task.instruction),
        ("test", " ".join(task.test_command) or "none"),
        ("exports", ", ".join(task.exports)),
        ("trust", str(task.trust)),
    )
    return "\n".join([*(f"{name:<12}{value}" for name, value in head), *_file_lines(task.files.items())]) + "\n"


def _file_lines(files: Iterable[tuple[str, str]]) -> Iterable[str]:
    for path, text in files:
        yield f"\n── {path} " + "─" * max(0, 72 - len(path))
        yield text.rstrip("\n")
