"""A task source: write a function, one task for each integer."""

from dataclasses import dataclass

from etude.errors import TaskError
from etude.records.task import Answer, Case, Split, Task

SPLITS = (Split.TRAIN, Split.VALIDATION, Split.HELDOUT)


@dataclass(frozen=True)
class Multiply:
    """Task `index`: write ``times(n)``, which multiplies by a number that occurs in no other split."""

    count: int = 1000  # tasks of each split
    name = "multiply"

    def size(self, split: Split) -> int:
        return self.count if split in SPLITS else 0

    def task(self, split: Split, index: int) -> Task:
        if not 0 <= index < self.size(split):
            raise TaskError(f"no task {index} in {split}", hint=f"there are {self.size(split)}")
        return Task(
            source=self.name,
            split=split,
            index=index,
            family="multiply",
            instruction=f"write times(n) in calc.py: n times {self.factor(split, index)}",
            files={"calc.py": "def times(n):\n    return n\n"},
            exports=("calc.py",),
        )

    def answer(self, task: Task) -> Answer:
        if task != self.task(task.split, task.index):
            raise TaskError(f"task {task.task_id} is not from this source", hint="use the same settings")
        factor = self.factor(task.split, task.index)
        return Answer(
            reference={"calc.py": f"def times(n):\n    return n * {factor}\n"},
            cases=tuple(Case("calc", "times", [n], n * factor) for n in (1, 2, 7, 100)),
        )

    def factor(self, split: Split, index: int) -> int:
        return 2 + index * len(SPLITS) + SPLITS.index(split)
