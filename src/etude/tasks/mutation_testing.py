"""Find tasks whose hidden tests accept wrong patches, by mutation testing.

Small errors are inserted into the reference solution, in the lines that it changes. Each such mutant is graded like a
submission; one that scores 1 is a survivor. A single survivor may behave like the reference, but a large share means
that the tests are weak. The reference itself is graded several times, since a grade that changes adds noise to every
baseline.

Mutants may loop. So the reference is graded first, and each hidden test of a mutant gets `TIMEOUT_FACTOR` times the
time that grading the reference took.
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
from etude.tasks.verdicts import Verdict, in_parallel, num_tasks, unmodified, verdict

TIMEOUT_FACTOR, MIN_TIMEOUT_S = 3.0, 5.0


@dataclass(frozen=True, slots=True)
class Survivor:
    """A mutant of a reference solution that scores 1: its file, the kind of its error, and the diff."""

    path: str
    kind: str
    diff: str


@dataclass(frozen=True, slots=True)
class MutationResult:
    """The result of mutation testing for one task.

    `num_ungraded` mutants could not be graded. `rewards` are the rewards of the reference, which is graded several
    times; None means not graded. `key` is a hash of the task, its answer and the settings. `wall_s` is the duration in
    seconds."""

    split: Split
    index: int
    task_id: str
    num_mutants: int
    survivors: tuple[Survivor, ...]
    num_ungraded: int  # mutants that could not be graded
    rewards: tuple[float | None, ...]  # of repeated grading of the reference; None: not graded
    key: str = ""  # hash of the task, its answer and the settings
    wall_s: float = 0.0

    @property
    def survival(self) -> float:
        """The share of the graded mutants that scored 1, which means that the tests did not notice their error; 0.0 if
        none was graded."""
        graded = self.num_mutants - self.num_ungraded
        return len(self.survivors) / graded if graded else 0.0

    @property
    def flaky(self) -> bool:
        """Whether repeated gradings of the reference had different outcomes."""
        return len(set(self.rewards)) > 1


async def run_mutants(
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
    journal: Journal[MutationResult] | None = None,
    export: Export | None = None,
    on_result: Callable[[MutationResult], None] = lambda _: None,
) -> list[MutationResult]:
    """Grade `num_mutants` mutants of each task's reference solution, and the reference itself `repeats` times.

    `n`, `deadline_s` and `export` are those of `check`. `concurrency` limits the gradings at once. After the time
    `until` (of `time.monotonic`) no further task is started; tasks that were not started have no result. Results in
    `journal` are reused, and new ones are added to it. `on_result` is called after each task. The choice of mutants is
    deterministic. A mutant whose command fails scores 0. Raises `TaskError` if the split has no task."""
    count = num_tasks(source, source.size(split), n, split)
    runner = _MutantRunner(grader, num_mutants, repeats, asyncio.Semaphore(concurrency), deadline_s, export)

    async def run(index: int) -> MutationResult | None:
        if until is not None and time.monotonic() >= until:
            return None
        try:
            task = source.task(split, index)
            answer = source.answer(task)
        except TaskError:  # `check` reports it
            result = MutationResult(split, index, "none", 0, (), 0, ())
        else:
            known = journal.entries.get(runner.key(task, answer)) if journal is not None else None
            result = known or await runner.run(task, answer, split, index)
            if journal is not None and known is None:
                journal.add(result)
        on_result(result)
        return result

    results = await in_parallel(range(count), run, min(concurrency, count))
    return [result for result in results if result is not None]


@dataclass(frozen=True)
class _MutantRunner:
    grader: Grader
    num_mutants: int
    repeats: int
    slots: asyncio.Semaphore
    deadline_s: float
    export: Export | None

    def key(self, task: Task, answer: Answer) -> str:
        return hashlib.sha256(msgspec.json.encode((task, answer, self.num_mutants, self.repeats))).hexdigest()

    async def run(self, task: Task, answer: Answer, split: Split, index: int) -> MutationResult:
        began = time.perf_counter()
        mutants, reference = mutants_of(task, answer, self.num_mutants), answer.reference
        repeats = self.repeats if answer.reference or answer.reference_argv else 0
        first = [await self._grade(task, answer, reference) for _ in range(min(1, repeats))]
        hurried = _with_short_timeout(answer, time.perf_counter() - began) if first and mutants else answer
        found = await asyncio.gather(
            *(self._grade(task, hurried, reference | {m.path: m.text}) for m in mutants),
            *(self._grade(task, answer, reference) for _ in range(repeats - len(first))),
        )
        verdicts = list(zip(mutants, found, strict=False))
        return MutationResult(
            split=split,
            index=index,
            task_id=task.task_id,
            num_mutants=len(mutants),
            survivors=tuple(
                Survivor(m.path, m.kind, m.diff()) for m, v in verdicts if v.reward is not None and v.reward >= 1
            ),
            num_ungraded=sum(v.reward is None for _, v in verdicts),
            rewards=tuple(v.reward for v in (*first, *found[len(mutants) :])),
            key=self.key(task, answer),
            wall_s=round(time.perf_counter() - began, 2),
        )

    async def _grade(self, task: Task, answer: Answer, files: dict[str, str]) -> Verdict:
        async with self.slots:
            try:
                exports = await exported(task, files, answer.reference_argv, self.export)
            except TaskError as error:
                return Verdict(0.0, error.what)
            return await verdict(self.grader, task, answer, exports, self.deadline_s)


def _with_short_timeout(answer: Answer, reference_s: float) -> Answer:
    """The answer with a shorter deadline for each hidden test. `reference_s`: duration of grading the reference."""
    tests = answer.tests
    if tests is None:
        return answer
    deadline_s = min(tests.deadline_s, max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * reference_s))
    return msgspec.structs.replace(answer, tests=msgspec.structs.replace(tests, deadline_s=deadline_s))


def mutants_of(task: Task, answer: Answer, num: int) -> list[Mutant]:
    """Create at most `num` mutants of the reference solution, one from each of its files in turn.

    Only lines in which a file differs from the task's version of it are mutated."""
    before = unmodified(task)
    rows = []
    for path, text in sorted(answer.reference.items()):
        within = changed_lines(before[path], text) if path in before else None
        rows.append(mutants(path, text, num=num, seed=task.task_id, within=within)[::-1])
    chosen: list[Mutant] = []
    while any(rows) and len(chosen) < num:
        chosen += [row.pop() for row in rows if row][: num - len(chosen)]
    return chosen
