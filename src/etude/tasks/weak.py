"""The report on a source's tasks: which are proven, and which are weak, with the evidence.

One record for each task, plain data, so that it is written as JSON and shown as a table from the same thing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from etude.records.task import Split
from etude.tasks.gate import Gated, Survivor
from etude.tasks.leaks import Leak
from etude.tasks.proof import Proof

WEAK_SHARE = 0.25
"""From this share of survivors on a task's tests count as weak: below it, mutants that mean the same explain them."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What is known of one task."""

    split: Split
    index: int
    task_id: str
    folder: str = ""  # that it was read from, where each task has its own
    failure: str = ""  # why it does not prove itself
    num_mutants: int = 0
    num_ungraded: int = 0
    survivors: tuple[Survivor, ...] = ()
    rewards: tuple[float | None, ...] = ()  # of the reference, repeated
    leaks: tuple[Leak, ...] = ()

    @property
    def survival(self) -> float:
        graded = self.num_mutants - self.num_ungraded
        return len(self.survivors) / graded if graded else 0.0

    @property
    def weaknesses(self) -> tuple[str, ...]:
        """What is weak about it, in few words."""
        flaky = len(set(self.rewards)) > 1
        found = (
            (bool(self.failure), "not proven"),
            (self.survival >= WEAK_SHARE, f"{len(self.survivors)} of {self.num_mutants} wrong patches pass"),
            (flaky, f"the reference scores {sorted({str(r) for r in self.rewards})}"),
            (bool(self.leaks), f"the answer is in {self.leaks[0].place}" if self.leaks else ""),
        )
        return tuple(text for there, text in found if there)


def reports(
    proofs: Sequence[Proof],
    gated: Iterable[Gated],
    leaks: dict[str, list[Leak]],
    task_ids: dict[tuple[Split, int], str],
    folder_of: Callable[[Split, int], object] = lambda split, index: "",
) -> list[TaskReport]:
    """One report for each task that was checked, in the order of split and index."""
    failures = {(proof.split, f.index): f.reason for proof in proofs for f in proof.failures}
    by_place = {(one.split, one.index): one for one in gated}
    made = []
    for proof in proofs:
        for index in range(proof.num_tasks):
            place = (proof.split, index)
            one, task_id = by_place.get(place), task_ids.get(place, "none")
            made.append(
                TaskReport(
                    *place,
                    task_id,
                    str(folder_of(*place)),
                    failures.get(place, ""),
                    one.num_mutants if one else 0,
                    one.num_ungraded if one else 0,
                    one.survivors if one else (),
                    one.rewards if one else (),
                    tuple(leaks.get(task_id, ())),
                )
            )
    return made


def as_json(source: str, tasks: Sequence[TaskReport], wall_s: float) -> dict[str, Any]:
    """The report as plain data: a summary, then every task. Survivors carry their diffs."""
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
