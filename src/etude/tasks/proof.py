"""Validate tasks before use: the reference solution must score 1, and the unmodified task must score 0.

A task that fails either check gives a wrong training signal. The `Grader` is an argument.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from etude.errors import TaskError
from etude.records.exports import covering
from etude.records.task import Answer, Split, Task
from etude.seams import Grader, TaskSource
from etude.tasks.verdicts import in_parallel, num_tasks, unmodified, verdict

Export = Callable[[Task, Mapping[str, bytes], Sequence[str]], Awaitable[Mapping[str, bytes]]]
"""Write files into a machine, run a command, and return the exported files (`environments.simulate_exports`)."""
Tests = Callable[[Task, Answer], Awaitable[str]]
"""Why the test command of a task cannot start; "" if it can (`environments.find_test_command_problem`)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A task that failed validation: its index in the split, and the reason."""

    index: int
    task_id: str
    reason: str  # "reference solution scores 0.0: calc.py does not import: SyntaxError"


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of `check` for one split of a source.

    `num_tasks`: the number of checked tasks. `failures`: the tasks that are not valid. `wall_s`: the duration in
    seconds."""

    source: str
    split: Split
    num_tasks: int
    failures: tuple[Failure, ...]
    wall_s: float

    @property
    def num_proven(self) -> int:
        """Number of valid tasks."""
        return self.num_tasks - len(self.failures)

    def require(self, place: str = "", *, listed: bool = False) -> None:
        """Raise `TaskError` unless every task is valid.

        The error describes the first failure, unless `listed` is True, which means that all failures were printed
        already. `place` names the source in the message; "" stands for `source`."""
        if self.failures:
            first, place = self.failures[0], place or self.source
            raise TaskError(
                f"{len(self.failures)} of {self.num_tasks} {self.split} tasks of {place} are not valid",
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
    export: Export | None = None,
    tests: Tests | None = None,
    on_task: Callable[[], None] = lambda: None,
) -> Proof:
    """Check that in the first `n` tasks of a split the reference solution scores 1 and the unmodified files score 0.

    Without `n`, all tasks are checked, or 100 of an infinite source. `deadline_s` limits each grading; a timeout is a
    failure of that task. `export` runs solutions that are commands, and tasks that grade the state of a machine.
    `tests`, if given, checks that the command of the `test` tool can start. `on_task` is called after each task. Raises
    `TaskError` if the split has no task, and any error of the source or the grader."""
    count = num_tasks(source, source.size(split), n, split)
    started = time.perf_counter()

    async def prove(index: int) -> Failure | None:
        try:
            task = source.task(split, index)
            task_id, reason = task.task_id, await _fault(source, grader, task, deadline_s, export, tests)
        except TaskError as error:  # the other tasks are still checked
            task_id, reason = "none", f"cannot be loaded: {str(error).splitlines()[0]}"
        on_task()
        return Failure(index, task_id, reason) if reason else None

    found = await in_parallel(range(count), prove, min(concurrency, count))
    return Proof(
        source=source.name,
        split=split,
        num_tasks=count,
        failures=tuple(failure for failure in found if failure is not None),
        wall_s=time.perf_counter() - started,
    )


async def fault(grader: Grader, task: Task, answer: Answer, deadline_s: float, export: Export | None = None) -> str:
    """Return the reason why a task is not valid; "" if it is valid.

    Grades the reference solution and the unmodified task, each for at most `deadline_s` seconds. `export` runs a
    solution that is a command; None: such a task cannot be validated."""
    is_declared = covering(task.exports)
    undeclared = sorted(path for path in answer.reference if not is_declared(path))
    if undeclared and not answer.reference_argv:
        return f"the reference changes {undeclared[0]}, which is not exported"
    if (answer.reference_argv or task.state) and export is None:
        return "it can only be checked in machines, and none are available"
    for label, files, argv, wanted in (
        ("reference solution", answer.reference, answer.reference_argv, 1.0),
        ("unmodified task", {}, (), 0.0),
    ):
        try:
            exports = await exported(task, files, argv, export)
        except TaskError as error:
            return f"{label} failed: {str(error).splitlines()[0]}"
        found = await verdict(grader, task, answer, exports, deadline_s)
        if found.reward is None:
            return f"{label} {found.reason}"
        if found.reward != wanted:
            return f"{label} scores {found.reward:g}: {found.reason}"
    return ""


async def exported(
    task: Task, files: Mapping[str, str], argv: Sequence[str], export: Export | None
) -> Mapping[str, str | bytes]:
    """Return the files that would be graded for a solution that writes `files` and runs the command `argv`.

    A machine is used, through `export`, only if the command or the state of the machine matters. Raises `TaskError` if
    it fails."""
    if export is None or not (argv or task.state):
        return unmodified(task) | dict(files)
    return await export(task, {path: text.encode() for path, text in files.items()}, argv)


async def _fault(
    source: TaskSource, grader: Grader, task: Task, deadline_s: float, export: Export | None, tests: Tests | None
) -> str:
    try:
        answer = source.answer(task)
    except TaskError as error:
        return f"has no answer: {str(error).splitlines()[0]}"
    found = await fault(grader, task, answer, deadline_s, export)
    if found or tests is None:
        return found
    try:
        return await tests(task, answer)
    except TaskError as error:
        return f"its test_command cannot be run: {str(error).splitlines()[0]}"


def show(task: Task) -> str:
    """Return a task as text for a terminal: instruction and files, without the hidden answer."""
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
