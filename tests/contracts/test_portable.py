"""What runtimes promise whose snapshots go to another of their kind; tasks that are judged by a machine's state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.contracts.test_machine import RUNTIMES, one
from tests.remote_server import PlainRuntime, ServedRuntime

from etude.environments import MachineGrader, exports_of, reference_exports, take_exports
from etude.environments.burst import WarmRuntime
from etude.errors import MachineError
from etude.records.exports import STATE
from etude.records.rollout import Boundary, Invalid
from etude.records.task import Answer, Split, Task, Trust, Verifier
from etude.seams import Portable, Runtime
from etude.testing import MemoryRuntime

NAMES = ["memory", "namespace", "warm", "fleet", "remote"]
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
        made: list[Runtime] = []
        try:
            made += [make() for make in makers]
        except MachineError as error:
            for runtime in made:
                await runtime.close()
            pytest.skip(str(error))
        try:
            return await test(*made)
        finally:
            for runtime in made:
                await runtime.close()

    return asyncio.run(main())


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_a_machine_goes_to_another_runtime(name):
    async def test(here: Any, there: Any) -> None:
        assert isinstance(here, Portable)
        machine = await one(here, {"a.txt": b"before"})
        await machine.write("a.txt", b"after")
        packed = await here.pack(await machine.snapshot(), max_bytes=1 << 20)
        await machine.close()
        await here.close()
        [child] = await there.fork(await there.unpack(packed), 1)
        assert await child.read("a.txt") == b"after"
        assert await there.unpack(packed) == await there.unpack(packed)

    running(test, RUNTIMES[name], RUNTIMES[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_is_too_large_or_none_is_refused_by_kind(name):
    async def test(runtime: Any) -> None:
        snapshot = await runtime.prepare({"a.txt": b"x" * 10_000})
        with pytest.raises(ValueError):  # noqa: PT011 - the kind is the promise
            await runtime.pack(snapshot, max_bytes=1000)
        with pytest.raises(MachineError):
            await runtime.pack("0" * 64, max_bytes=1 << 20)
        packed = await runtime.pack(snapshot, max_bytes=1 << 20)
        for bad in (b"", b"junk" * 99, packed[:-1]):
            with pytest.raises(ValueError):  # noqa: PT011
                await runtime.unpack(bad)

    running(test, RUNTIMES[name])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "memory"])
def test_a_machines_state_is_judged_in_a_fork_of_the_frozen_one(name):
    async def test(runtime: Runtime) -> Any:
        solved = await reference_exports(runtime, TASK, ANSWER)
        untouched = await exports_of(runtime, TASK)
        grader = MachineGrader(runtime)
        return [*solved], [(await grader.grade(TASK, ANSWER, each)).reward for each in (solved, untouched)]

    assert running(test, RUNTIMES[name]) == ([STATE], [1.0, 0.0])


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
