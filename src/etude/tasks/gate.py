"""The mutation gate: wrong patches that pass. A task whose tests cannot tell a wrong solution rewards wrong work.

The reference solution is made wrong in small ways, where it differs from what the agent finds, and graded like any
submission. One survivor may mean the same as the original; a share of survivors is a weak test. The reference itself
is graded several times: a verdict that changes is noise in every baseline.

Wrong versions loop and hang. The reference is judged first, and a hidden test of a wrong version has `PATIENCE` times
what all of the reference's took together, so that a loop costs seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from etude.errors import TaskError
from etude.records.task import Answer, Split, Task
from etude.seams import Grader, TaskSource
from etude.tasks.journal import Journal
from etude.tasks.mutation import Mutant, changed_lines, mutants
from etude.tasks.proof import Export, exported
from etude.tasks.verdicts import Verdict, in_parallel, num_tasks, untouched, verdict

PATIENCE, LEAST_S = 3.0, 5.0


@dataclass(frozen=True, slots=True)
class Survivor:
    """A wrong patch that scores 1."""

    path: str
    kind: str
    diff: str


@dataclass(frozen=True, slots=True)
class Gated:
    """What the gate found on one task."""

    split: Split
    index: int
    task_id: str
    num_mutants: int
    survivors: tuple[Survivor, ...]
    num_ungraded: int  # mutants without a verdict
    rewards: tuple[float | None, ...]  # of the reference, repeated; None: not graded
    key: str = ""  # the task, its answer, and what was asked of it
    wall_s: float = 0.0

    @property
    def survival(self) -> float:
        """Share of the graded mutants that passed; 0 where there was none."""
        graded = self.num_mutants - self.num_ungraded
        return len(self.survivors) / graded if graded else 0.0

    @property
    def flaky(self) -> bool:
        return len(set(self.rewards)) > 1


async def gate(
    source: TaskSource,
    grader: Grader,
    split: Split,
    n: int | None = None,
    *,
    num_mutants: int,
    repeats: int = 1,
    concurrency: int = 8,
    deadline_s: float = 60.0,
    until: float | None = None,
    journal: Journal[Gated] | None = None,
    export: Export | None = None,
    told: Callable[[Gated], None] = lambda _: None,
) -> list[Gated]:
    """Grade `num_mutants` wrong versions of each reference, and the reference `repeats` times, at most `concurrency`
    verdicts at once; `export` as in `check`. A wrong version whose command fails has failed. Deterministic in which
    mutants are made. Raises `TaskError` as `check` does.

    A task that `journal` knows is not gated again, and one that was gated is kept there. After `until`, by
    `time.monotonic`, no further task is begun: those are not among the results."""
    count = num_tasks(source, source.size(split), n, split)
    one = _Gate(grader, num_mutants, repeats, asyncio.Semaphore(concurrency), deadline_s, export)

    async def gated(index: int) -> Gated | None:
        if until is not None and time.monotonic() >= until:
            return None
        try:
            task = source.task(split, index)
            answer = source.answer(task)
        except TaskError:  # `check` says so
            found = Gated(split, index, "none", 0, (), 0, ())
        else:
            known = journal.entries.get(one.key(task, answer)) if journal is not None else None
            found = known or await one.gated(task, answer, split, index)
            if journal is not None and known is None:
                journal.add(found)
        told(found)
        return found

    return [found for found in await in_parallel(range(count), gated, min(concurrency, count)) if found is not None]


@dataclass(frozen=True)
class _Gate:
    grader: Grader
    num_mutants: int
    repeats: int
    room: asyncio.Semaphore
    deadline_s: float
    export: Export | None

    def key(self, task: Task, answer: Answer) -> str:
        asked = msgspec.json.encode((task, answer, self.num_mutants, self.repeats))
        return hashlib.sha256(asked).hexdigest()

    async def gated(self, task: Task, answer: Answer, split: Split, index: int) -> Gated:
        began = time.perf_counter()
        wrong, right = wrong_versions(task, answer, self.num_mutants), answer.reference
        num_right = self.repeats if answer.reference or answer.reference_argv else 0
        rights = [await self._judged(task, answer, right) for _ in range(min(1, num_right))]
        hurried = _hurried(answer, time.perf_counter() - began) if rights and wrong else answer
        found = await asyncio.gather(
            *(self._judged(task, hurried, right | {m.path: m.text}) for m in wrong),
            *(self._judged(task, answer, right) for _ in range(num_right - len(rights))),
        )
        verdicts = list(zip(wrong, found, strict=False))
        return Gated(
            split=split,
            index=index,
            task_id=task.task_id,
            num_mutants=len(wrong),
            survivors=tuple(
                Survivor(m.path, m.kind, m.diff()) for m, v in verdicts if v.reward is not None and v.reward >= 1
            ),
            num_ungraded=sum(v.reward is None for _, v in verdicts),
            rewards=tuple(v.reward for v in (*rights, *found[len(wrong) :])),
            key=self.key(task, answer),
            wall_s=round(time.perf_counter() - began, 2),
        )

    async def _judged(self, task: Task, answer: Answer, files: dict[str, str]) -> Verdict:
        async with self.room:
            try:
                exports = await exported(task, files, answer.reference_argv, self.export)
            except TaskError as error:
                return Verdict(0.0, error.what)
            return await verdict(self.grader, task, answer, exports, self.deadline_s)


def _hurried(answer: Answer, took_s: float) -> Answer:
    """The same, each hidden test with no longer than a wrong version needs to be told from a right one."""
    tests = answer.tests
    if tests is None:
        return answer
    deadline_s = min(tests.deadline_s, max(LEAST_S, PATIENCE * took_s))
    return msgspec.structs.replace(answer, tests=msgspec.structs.replace(tests, deadline_s=deadline_s))


def wrong_versions(task: Task, answer: Answer, num: int) -> list[Mutant]:
    """At most `num` mutants of the reference's files, the files in turn, where they differ from the task's own."""
    before = untouched(task)
    rows = []
    for path, text in sorted(answer.reference.items()):
        within = changed_lines(before[path], text) if path in before else None
        rows.append(mutants(path, text, num=num, seed=task.task_id, within=within)[::-1])
    chosen: list[Mutant] = []
    while any(rows) and len(chosen) < num:
        chosen += [row.pop() for row in rows if row][: num - len(chosen)]
    return chosen
