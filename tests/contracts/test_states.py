"""Tasks that are judged by a machine's state, over runtimes that stand before others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.contracts.test_machine import RUNTIMES, one
from tests.here import opened
from tests.remote_server import PlainRuntime, ServedRuntime

from etude.environments import MachineGrader, exports_of, reference_exports, take_exports
from etude.environments.burst import WarmRuntime
from etude.errors import MachineError
from etude.records.exports import STATE
from etude.records.rollout import Boundary, Graded, Invalid
from etude.records.task import Answer, Split, Task, Trust, Verifier
from etude.seams import Runtime
from etude.testing import MemoryRuntime

TASK = Task(
    source="s",
    split=Split.TRAIN,
    index=0,
    family="f",
    instruction="migrate it",
    files={"seed.txt": "0\n"},
    exports=(),
    state=True,
    trust=Trust.DATA,
)
ANSWER = Answer(
    reference={},
    reference_argv=("sh", "-c", "mkdir db && echo 42 > db/value && ln -s db/value link"),
    verifier=Verifier(
        files={"verify.sh": 'test "$(cat db/value)" = 42 && test "$(readlink link)" = db/value\n'},
        argv=("sh", "verify.sh"),
    ),
)


class Keeping(MemoryRuntime):
    """A runtime whose snapshots stay where they are."""

    pack = unpack = None  # type: ignore[assignment]


def running(test: Callable[..., Awaitable[Any]], *makers: Callable[[], Runtime]) -> Any:
    async def main() -> Any:
        made = [opened("namespace", make) for make in makers]
        try:
            return await test(*made)
        finally:
            for runtime in made:
                await runtime.close()

    return asyncio.run(main())


@pytest.mark.parametrize("name", ["warm", "fleet", "remote"])
def test_a_machines_state_is_judged_in_a_fork_of_the_frozen_one(name):
    async def test(runtime: Runtime) -> Any:
        solved = await reference_exports(runtime, TASK, ANSWER)
        untouched = await exports_of(runtime, TASK)
        grader = MachineGrader(runtime)
        return [*solved], [(await grader.grade(TASK, ANSWER, each)).reward for each in (solved, untouched)]

    assert running(test, RUNTIMES[name]) == ([STATE], [1.0, 0.0])


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("mkdir db; echo 42 > db/value; ln -s db/value link; sleep 1000 &", 1.0),
        ("truncate -s 1000000000 sparse", 0.0),
        ("kill -9 -1", 0.0),
    ],
)
@pytest.mark.parametrize("name", ["fleet", "remote"])
def test_whatever_an_agent_leaves_elsewhere_is_judged(name, script, reward):
    async def test(runtime: Runtime) -> Any:
        machine = await one(runtime, {"seed.txt": b"0\n"})
        await machine.exec(["sh", "-c", script], key="1", deadline_s=5.0)
        exports = await take_exports(machine, TASK, runtime)
        return await MachineGrader(runtime).grade(TASK, ANSWER, exports)

    outcome = running(test, RUNTIMES[name])
    assert isinstance(outcome, Graded), outcome
    assert outcome.reward == reward


def test_a_state_that_no_server_of_these_keys_has_packed_is_nobodys_reward():
    async def test(here: ServedRuntime, other: ServedRuntime) -> Any:
        return await MachineGrader(other).grade(TASK, ANSWER, await reference_exports(here, TASK, ANSWER))

    outcome = running(test, ServedRuntime, lambda: ServedRuntime(key="e2b_another_key_of_another"))
    assert isinstance(outcome, Invalid)
    assert (outcome.boundary, "another server" in outcome.evidence) == (Boundary.MACHINE, True)


@pytest.mark.parametrize(
    "make",
    [PlainRuntime, lambda: WarmRuntime(Keeping()), lambda: ServedRuntime(Keeping())],
    ids=["plain", "warm", "ours"],
)
def test_where_states_stay_it_is_said(make):
    async def test(runtime: Runtime) -> None:
        machine = await one(runtime, {"seed.txt": b"0\n"})
        with pytest.raises(MachineError, match=r"away|cannot leave"):
            await take_exports(machine, TASK, runtime)

    running(test, make)
