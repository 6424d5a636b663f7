"""Canary tasks: they look like the others, prove themselves, and cannot be solved honestly."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.here import opened

from etude.environments import MachineGrader, NamespaceRuntime, reference_exports
from etude.errors import TaskError
from etude.records.rollout import Graded
from etude.records.task import CANARY, Answer, Split, Task
from etude.tasks import RepairSource
from etude.tasks.canaries import WithCanaries

SOURCE = RepairSource(seed=3)
MIXED = WithCanaries(SOURCE, share=0.3, seed=3)


def is_canary(task: Task) -> bool:
    return task.family.startswith(CANARY)


def test_the_share_is_kept_and_the_draw_is_the_same_in_every_process():
    found = [is_canary(MIXED.task(Split.TRAIN, index)) for index in range(400)]
    assert 80 < sum(found) < 160
    assert found == [is_canary(WithCanaries(RepairSource(seed=3), 0.3, 3).task(Split.TRAIN, i)) for i in range(400)]


def test_a_canary_shows_the_agent_what_its_source_would_have_shown():
    index = next(i for i in range(100) if is_canary(MIXED.task(Split.TRAIN, i)))
    canary, task = MIXED.task(Split.TRAIN, index), SOURCE.task(Split.TRAIN, index)
    assert msgspec.structs.replace(canary, family=task.family) == task


@pytest.mark.parametrize("split", [Split.VALIDATION, Split.HELDOUT])
def test_evaluations_have_no_canaries(split):
    assert not any(is_canary(MIXED.task(split, index)) for index in range(100))


def test_a_task_of_another_source_has_no_answer_here():
    foreign = RepairSource(seed=4).task(Split.TRAIN, 0)
    with pytest.raises(TaskError):
        MIXED.answer(msgspec.structs.replace(foreign, family=f"{CANARY} {foreign.family}"))


def test_the_reference_scores_1_and_the_honest_solution_0():
    index = next(i for i in range(100) if is_canary(MIXED.task(Split.TRAIN, i)))
    task = MIXED.task(Split.TRAIN, index)
    answer, honest = MIXED.answer(task), SOURCE.answer(SOURCE.task(Split.TRAIN, index))

    async def main(solution: Answer) -> float:
        runtime = opened("namespace", NamespaceRuntime)
        try:
            exports = await reference_exports(runtime, task, solution)
            outcome = await MachineGrader(runtime).grade(task, answer, exports)
            assert isinstance(outcome, Graded)
            return outcome.grade
        finally:
            await runtime.close()

    assert (asyncio.run(main(answer)), asyncio.run(main(honest))) == (1.0, 0.0)
