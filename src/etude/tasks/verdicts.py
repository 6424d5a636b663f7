"""Grade files of a task with a deadline, for validation, mutation testing and mining. The `Grader` is an argument."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from etude.errors import TaskError
from etude.records.exports import covering
from etude.records.rollout import Boundary, Graded, Invalid
from etude.records.task import Answer, Split, Task
from etude.seams import Grader, TaskSource

T = TypeVar("T")
R = TypeVar("R")
DEFAULT_TASKS = 100
"""Default number of tasks to check in an infinite source."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reward of graded files and the reason for it; the reward is None if grading failed."""

    reward: float | None  # None: not graded
    reason: str


def unmodified(task: Task) -> dict[str, str]:
    """Return the files that a machine would hand in if nothing was changed: path -> text."""
    is_declared = covering(task.exports)
    return {path: text for path, text in task.files.items() if is_declared(path)}


async def verdict(
    grader: Grader, task: Task, answer: Answer, files: Mapping[str, str | bytes], deadline_s: float
) -> Verdict:
    """Grade files as if a rollout had handed them in.

    The reward is None if the grader takes longer than `deadline_s` seconds or returns `Invalid`."""
    exports = {path: _bytes(content) for path, content in files.items()}
    try:
        async with asyncio.timeout(deadline_s):
            outcome = await grader.grade(task, answer, exports)
    except TimeoutError:
        return Verdict(None, f"was not graded within {deadline_s:g} s")
    match outcome:
        case Invalid(boundary=Boundary.MACHINE, reason=reason, evidence=evidence) if evidence:
            cause = " ".join(evidence.replace("\n  hint:", "; hint:").split())  # the error of the host, with its hint
            return Verdict(None, f"could not be graded ({Boundary.MACHINE}): {reason}: {cause}")
        case Invalid(boundary=boundary, reason=reason):
            return Verdict(None, f"could not be graded ({boundary}): {reason}")
        case Graded(grade=grade, reason=reason):
            return Verdict(grade, reason)


def _bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")


def num_tasks(source: TaskSource, size: int | None, n: int | None, what: Split) -> int:
    """Return how many tasks of a split to check: at most `n`, or all, or 100 of an infinite source.

    `size` is the size of the split `what` (None: infinite). Raises `TaskError` if there is no task."""
    count = min(x for x in (n, size) if x is not None) if (n, size) != (None, None) else DEFAULT_TASKS
    if count < 1:
        sizes = {split: source.size(split) for split in Split}
        listed = ", ".join(f"{split} {'infinite' if number is None else number}" for split, number in sizes.items())
        raise TaskError(
            f"{source.name} has no {what} task to check",
            f"the sizes of its splits: {listed}",
            hint=f'write split = "{what}" in a task.toml to put the task there, or give another --split or --num',
        )
    return count


async def in_parallel(items: Iterable[T], work: Callable[[T], Awaitable[R]], concurrency: int) -> list[R]:
    """Await `work` for each item, at most `concurrency` at once, and return the results in the order of the items.

    The first error cancels the rest and is raised."""
    numbered, results = enumerate(items), dict[int, R]()

    async def worker() -> None:
        for number, item in numbered:
            results[number] = await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, concurrency)):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # a single error with its hint is clearer than the group
    return [results[number] for number in sorted(results)]
