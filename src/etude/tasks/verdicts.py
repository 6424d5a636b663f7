"""One verdict on some files of a task, bounded in time: what proof, mutation gate and mining ask for.

Knows nothing of how grading works: it is handed a `Grader`.
"""

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
"""How many tasks of an endless source are looked at when nobody says."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward with its reason, or why there is none."""

    reward: float | None  # None: not graded
    reason: str


def untouched(task: Task) -> dict[str, str]:
    """What would be exported of a machine in which nothing was done."""
    is_declared = covering(task.exports)
    return {path: text for path, text in task.files.items() if is_declared(path)}


async def verdict(
    grader: Grader, task: Task, answer: Answer, files: Mapping[str, str | bytes], deadline_s: float
) -> Verdict:
    """The grader's verdict on these exports; none where it does not come in time or is `Invalid`."""
    exports = {path: _bytes(content) for path, content in files.items()}
    try:
        async with asyncio.timeout(deadline_s):
            outcome = await grader.grade(task, answer, exports)
    except TimeoutError:
        return Verdict(None, f"got no verdict within {deadline_s:g} s")
    match outcome:
        case Invalid(boundary=Boundary.MACHINE, reason=reason, evidence=evidence) if evidence:
            why = " ".join(
                evidence.replace("\n  hint:", "; hint:").split()
            )  # what the host refused, with its hint: nothing else says it
            return Verdict(None, f"could not be graded ({Boundary.MACHINE}): {reason}: {why}")
        case Invalid(boundary=boundary, reason=reason):
            return Verdict(None, f"could not be graded ({boundary}): {reason}")
        case Graded(grade=grade, reason=reason):
            return Verdict(grade, reason)


def _bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")


def num_tasks(source: TaskSource, size: int | None, n: int | None, what: Split) -> int:
    """How many tasks of a split are looked at: n of them, or all, or 100 of an endless source. `TaskError` where
    there is none."""
    count = min(x for x in (n, size) if x is not None) if (n, size) != (None, None) else DEFAULT_TASKS
    if count < 1:
        sizes = {split: source.size(split) for split in Split}
        said = ", ".join(f"{split} {'endless' if its is None else its}" for split, its in sizes.items())
        raise TaskError(
            f"{source.name} has no {what} task to check",
            f"the sizes of its splits: {said}",
            hint=f'`split = "{what}"` in a task.toml puts a task there; or name another --split or --num',
        )
    return count


async def in_parallel(items: Iterable[T], work: Callable[[T], Awaitable[R]], concurrency: int) -> list[R]:
    """The results of `work` for each item, in the order of the items, at most `concurrency` at once. The first error
    ends the rest and is raised."""
    numbered, results = enumerate(items), dict[int, R]()

    async def worker() -> None:
        for number, item in numbered:
            results[number] = await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, concurrency)):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # one error with its hint says more than the group
    return [results[number] for number in sorted(results)]
