"""The grader process remembers verdicts, and only those that it may."""

from __future__ import annotations

import asyncio

import pytest

from etude import progress
from etude.errors import MachineError
from etude.loop.grading import Turns, Verdicts
from etude.records import Answer, Graded, Invalid, Task
from etude.records.rollout import Boundary
from etude.records.task import Split, Trust

TASK = Task(source="s", split=Split.TRAIN, index=0, family="f", instruction="i", files={"a.py": ""}, exports=("a.py",))
CODE = Task(
    source="s", split=Split.TRAIN, index=0, family="f", instruction="i", files={}, exports=("a.py",), trust=Trust.CODE
)
ANSWER = Answer(reference={})


class Counting:
    def __init__(self, *outcomes):
        self.outcomes, self.calls = list(outcomes), 0

    async def grade(self, task, answer, exports):
        self.calls += 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        await asyncio.sleep(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def graded(reward: float) -> Graded:
    return Graded.of(reward, trust=Trust.DATA, reason="r")


def run(work):
    return asyncio.run(work)


def test_the_same_files_of_a_task_are_judged_once_even_when_asked_at_once():
    inner = Counting(graded(1.0))
    verdicts = Verdicts(inner)

    async def work():
        return await asyncio.gather(*(verdicts.grade(TASK, ANSWER, {"a.py": b"x"}) for _ in range(8)))

    assert [o.grade for o in run(work())] == [1.0] * 8
    assert inner.calls == 1


@pytest.mark.parametrize(("task", "exports"), [(TASK, {"a.py": b"y"}), (TASK, {}), (CODE, {"a.py": b"x"})])
def test_other_files_or_code_grading_are_judged_again(task, exports):
    inner = Counting(graded(0.0))
    verdicts = Verdicts(inner)

    async def work():
        await verdicts.grade(task, ANSWER, {"a.py": b"x"})
        await verdicts.grade(task, ANSWER, exports)

    run(work())
    assert inner.calls == 2


def test_invalid_and_failures_are_never_remembered():
    invalid = Invalid(boundary=Boundary.MACHINE, reason="r", evidence="e")
    inner = Counting(invalid, MachineError("gone", hint="h"), graded(1.0))
    verdicts = Verdicts(inner)

    async def work():
        first = await verdicts.grade(TASK, ANSWER, {"a.py": b"x"})
        with pytest.raises(MachineError):
            await verdicts.grade(TASK, ANSWER, {"a.py": b"x"})
        return first, await verdicts.grade(TASK, ANSWER, {"a.py": b"x"})

    first, last = run(work())
    assert first is invalid
    assert last.grade == 1.0


def test_each_grade_that_ends_is_a_sign_of_life_to_those_that_wait_for_a_turn():
    turns, seen = Turns(2), list[int]()

    async def grade(fails: bool) -> None:
        async with turns.turn():
            seen.append(progress.count())
            await asyncio.sleep(0)
            if fails:
                raise MachineError("gone", hint="h")

    async def work():
        return await asyncio.gather(*(grade(i == 0) for i in range(6)), return_exceptions=True)

    ended = run(work())
    assert [isinstance(one, MachineError) for one in ended] == [True] + [False] * 5
    first, second, *others = seen
    assert first == second, "two at once"
    assert first < others[0] <= others[-1] < progress.count()
