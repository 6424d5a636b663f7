"""`RepairSource`: small generated repositories with one bug each, without end.

Split by content: one tenth of all (template, phrasing, variables, constant) is for validation, one tenth is held
out, whatever the seed; the seed decides which of them are met in which order. A third set, `Split.TRANSFER`, has
templates of its own that nothing else shows. A task's `problem` is its broken function: the same function in another
repository is a variant of the problem, not another one.
"""

from __future__ import annotations

import random

from etude.errors import TaskError
from etude.records.task import Answer, Split, Task
from etude.tasks.repair.functions import FUNCTION_NAMES, MODULE_NAMES
from etude.tasks.repair.problem import Problem, make_problem
from etude.tasks.visible import TEST_COMMAND, TEST_FILE, call_text, visible_tests

INSTRUCTION = "fix the failing test"


class RepairSource:
    """A `TaskSource` of generated repositories: `files` modules of `functions_per_file` functions, and ``tests.py``.

    >>> source = RepairSource(seed=0)
    >>> task = source.task(Split.TRAIN, 7)
    >>> task.instruction, len(task.exports), task == source.task(Split.TRAIN, 7)
    ('fix the failing test', 3, True)
    """

    name = "repair"

    def __init__(self, seed: int, *, files: int = 3, functions_per_file: int = 1) -> None:
        most = len(FUNCTION_NAMES) // max(files, 1)
        if not 1 <= files <= len(MODULE_NAMES) or not 1 <= functions_per_file <= most:
            raise TaskError(
                f"no repository of {files} files with {functions_per_file} functions each",
                f"there are names for {len(MODULE_NAMES)} files and {len(FUNCTION_NAMES)} functions",
                hint="ask for fewer",
            )
        self.seed, self.files, self.functions_per_file = seed, files, functions_per_file

    def size(self, split: Split) -> int | None:
        """Always None: tasks are generated without end."""
        return None

    def problem(self, split: Split, index: int) -> Problem:
        """The problem behind `task(split, index)`, with its answer. For demonstrations, probes and graders."""
        if index < 0:
            raise TaskError(f"no task {index} in {split}", hint="indices start at 0")
        rng = random.Random(f"repair {self.seed} {split} {index}")
        return make_problem(rng, split, files=self.files, functions_per_file=self.functions_per_file)

    def task(self, split: Split, index: int) -> Task:
        return task_of(self.problem(split, index), split, index)

    def answer(self, task: Task) -> Answer:
        """Regenerated from the task's position. Raises `TaskError` for a task that this source did not make."""
        problem = self.problem(task.split, task.index)
        if task_of(problem, task.split, task.index) != task:
            raise TaskError(
                f"{task.split} task {task.index} ({task.task_id}) is not of this source",
                f"its seed is {self.seed}",
                hint="open the source with the seed and the sizes that made the task",
            )
        return Answer(reference=problem.reference(), cases=problem.hidden)


def task_of(problem: Problem, split: Split, index: int) -> Task:
    """The public side of a problem."""
    files = problem.files()
    tests = visible_tests((c.module, call_text(c.function, c.args), c.expected) for c in problem.visible)
    return Task(
        source=RepairSource.name,
        split=split,
        index=index,
        family=problem.family,
        problem=problem.function.key,
        instruction=INSTRUCTION,
        files={**files, TEST_FILE: tests},
        exports=tuple(files),
        test_command=TEST_COMMAND,
    )
