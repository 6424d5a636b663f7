"""`RepairSource`: an infinite source of small generated repositories with one bug each.

The content decides the split. For every seed, the same tenth of all functions (template, phrase, variables, constant)
is for validation, and another tenth is held out. The seed only decides the order. `Split.TRANSFER` has its own
templates, which no other split uses. The field `problem` of a task is its broken function: the same function in another
repository is a variant of the same problem.
"""

from __future__ import annotations

import random

from etude.errors import TaskError
from etude.records.task import Answer, Split, Task
from etude.tasks.repair.demonstrations import imperfect, oracle, random_agent
from etude.tasks.repair.functions import FUNCTION_NAMES, MODULE_NAMES
from etude.tasks.repair.problem import SOURCE, Problem, line_of, make_problem, task_of
from etude.tasks.scripts import Demonstration, Script


class RepairSource:
    """A `TaskSource` of generated repositories, each with `files` modules of `functions_per_file` functions.

    >>> source = RepairSource(seed=0)
    >>> task = source.task(Split.TRAIN, 7)
    >>> task.instruction, len(task.exports), task == source.task(Split.TRAIN, 7)
    ('fix the failing test', 3, True)
    """

    name = SOURCE

    def __init__(self, seed: int, *, files: int = 3, functions_per_file: int = 1) -> None:
        most = len(FUNCTION_NAMES) // max(files, 1)
        if not 1 <= files <= len(MODULE_NAMES) or not 1 <= functions_per_file <= most:
            raise TaskError(
                f"a repository of {files} files with {functions_per_file} functions each is too large",
                f"there are names for {len(MODULE_NAMES)} files and {len(FUNCTION_NAMES)} functions",
                hint="use fewer files, or fewer functions per file",
            )
        self.seed, self.files, self.functions_per_file = seed, files, functions_per_file

    def size(self, split: Split) -> int | None:
        """Return None, since the source is infinite."""
        return None

    def problem(self, split: Split, index: int) -> Problem:
        """Return the problem that `task(split, index)` is made from, including its answer."""
        if index < 0:
            raise TaskError(f"no task {index} in {split}", hint="indices start at 0")
        rng = random.Random(f"repair {self.seed} {split} {index}")
        return make_problem(rng, split, files=self.files, functions_per_file=self.functions_per_file)

    def task(self, split: Split, index: int) -> Task:
        return task_of(self.problem(split, index), split, index)

    def answer(self, task: Task) -> Answer:
        """Generate the hidden answer of a task again, from its split and index. Raises `TaskError` for a task of
        another source."""
        problem = self.problem(task.split, task.index)
        if task_of(problem, task.split, task.index) != task:
            raise TaskError(
                f"{task.split} task {task.index} ({task.task_id}) is not from this source",
                f"the source has seed {self.seed}",
                hint="use a source with the seed and the sizes with which the task was made",
            )
        return Answer(reference=problem.reference(), cases=problem.hidden)

    def demonstration(self, split: Split, index: int, *, seed: int, right: float) -> Demonstration:
        """Return a task with a script of valid edits, of which only the share `right` is correct."""
        problem = self.problem(split, index)
        script = imperfect(problem, random.Random(f"demonstration {seed} {index}"), right_body=right)
        return Demonstration(task_of(problem, split, index), script)

    def baseline(self, task: Task, kind: str, *, seed: int) -> Script:
        """Return the oracle's script if `kind` is "oracle", else one that makes a random valid edit."""
        problem = self.problem(task.split, task.index)
        return oracle(problem) if kind == "oracle" else random_agent(problem, random.Random(seed))

    def copy_probe(self, index: int) -> tuple[Task, Script, str]:
        """Return a training task, a script that ends with the correct edit, and the last words of that edit.

        A model can predict these words only by copying them from its context: a metric of mid-training."""
        problem = self.problem(Split.TRAIN, index)
        return task_of(problem, Split.TRAIN, index), _to_the_edit(problem), f" return {problem.function.body.text}"


def _to_the_edit(problem: Problem) -> Script:
    yield "test", {}
    yield "cat", {"path": f"{problem.module}.py"}
    text = f"return {problem.function.body.text}"
    yield "edit", {"path": f"{problem.module}.py", "line": line_of(problem.place), "text": text}
