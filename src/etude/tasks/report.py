"""The report of `etude tasks check`: for each task whether it is valid and whether it is weak, with evidence.

The same records are printed as a table and written as JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from etude.records.task import Split
from etude.tasks.leaks import Leak
from etude.tasks.mutation_testing import MutationResult, Survivor
from etude.tasks.proof import Proof

WEAK_SHARE = 0.25
"""Tests are weak if at least this share of mutants survives. Fewer survivors may be equivalent to the reference."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """The results of all checks of one task.

    `index` is the position of the task in its split. `folder` is the folder of the task, if each task has one.
    `failure`: the reason why the task is not valid; "" if it is valid. The tests of the task are tried with mutants:
    copies of the reference solution with one error. Of `num_mutants`, `num_ungraded` could not be graded, and
    `survivors` got the reward 1. `rewards` are those of the reference solution, which is graded several times.
    `leaks` are places that contain the answer."""

    split: Split
    index: int
    task_id: str
    folder: str = ""  # folder of the task, if each task has its own
    failure: str = ""  # why the task is not valid
    num_mutants: int = 0
    num_ungraded: int = 0
    survivors: tuple[Survivor, ...] = ()
    rewards: tuple[float | None, ...] = ()  # of repeated grading of the reference
    leaks: tuple[Leak, ...] = ()

    @property
    def survival(self) -> float:
        """The share of the graded mutants that scored 1, which means that the tests did not notice their error; 0.0 if
        none was graded."""
        graded = self.num_mutants - self.num_ungraded
        return len(self.survivors) / graded if graded else 0.0

    @property
    def weaknesses(self) -> tuple[str, ...]:
        """The weaknesses that the checks found in the task, each in a few words."""
        flaky = len(set(self.rewards)) > 1
        found = (
            (bool(self.failure), "not valid"),
            (self.survival >= WEAK_SHARE, f"{len(self.survivors)} of {self.num_mutants} wrong patches pass"),
            (flaky, f"the reference scores {sorted({str(r) for r in self.rewards})}"),
            (bool(self.leaks), f"the answer is in {self.leaks[0].place}" if self.leaks else ""),
        )
        return tuple(text for is_found, text in found if is_found)


def reports(
    proofs: Sequence[Proof],
    results: Iterable[MutationResult],
    leaks: dict[str, list[Leak]],
    task_ids: dict[tuple[Split, int], str],
    folder_of: Callable[[Split, int], object] = lambda split, index: "",
) -> list[TaskReport]:
    """Combine the results of all checks into one report for each checked task, in the order of split and index.

    `leaks` has the leaks by task id. `folder_of` returns the folder of a task, or ""."""
    failures = {(proof.split, f.index): f.reason for proof in proofs for f in proof.failures}
    by_position = {(result.split, result.index): result for result in results}
    made = []
    for proof in proofs:
        for index in range(proof.num_tasks):
            position = (proof.split, index)
            result, task_id = by_position.get(position), task_ids.get(position, "none")
            made.append(
                TaskReport(
                    *position,
                    task_id,
                    str(folder_of(*position)),
                    failures.get(position, ""),
                    result.num_mutants if result else 0,
                    result.num_ungraded if result else 0,
                    result.survivors if result else (),
                    result.rewards if result else (),
                    tuple(leaks.get(task_id, ())),
                )
            )
    return made


def as_json(source: str, tasks: Sequence[TaskReport], wall_s: float) -> dict[str, Any]:
    """Return the report as plain data: a summary, then every task, with the diffs of survivors.

    `wall_s` is the duration of all checks in seconds."""
    kinds: Counter[str] = Counter(kind for task in tasks for kind in (s.kind for s in task.survivors))
    num_mutants = sum(task.num_mutants for task in tasks)
    num_graded = num_mutants - sum(task.num_ungraded for task in tasks)
    num_survivors = sum(len(task.survivors) for task in tasks)
    return {
        "source": source,
        "num_tasks": len(tasks),
        "num_proven": sum(not task.failure for task in tasks),
        "num_weak": sum(bool(task.weaknesses) for task in tasks),
        "num_mutants": num_mutants,
        "num_mutants_graded": num_graded,
        "num_survivors": num_survivors,
        "survival": round(num_survivors / num_graded, 4) if num_graded else 0.0,
        "survivors_by_kind": dict(kinds.most_common()),
        "num_flaky": sum(len(set(task.rewards)) > 1 for task in tasks),
        "num_leaking": sum(bool(task.leaks) for task in tasks),
        "wall_s": round(wall_s, 2),
        "tasks": [
            {**asdict(task), "survival": round(task.survival, 4), "weaknesses": task.weaknesses} for task in tasks
        ],
    }
