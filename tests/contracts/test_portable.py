"""What runtimes promise whose snapshots go to another of their kind; tasks that are judged by a machine's state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from tests.contracts.test_machine import NEEDS, RUNTIMES, one
from tests.here import why_not
from tests.remote_server import PlainRuntime, ServedRuntime
from tests.virtual import microvm

from etude.environments import MachineGrader, reference_exports, simulate_exports, take_exports
from etude.environments.burst import Capacity, FleetHost, FleetRuntime
from etude.environments.grading import exports
from etude.errors import MachineError
from etude.records.exports import STATE
from etude.records.rollout import Boundary, Graded, Invalid
from etude.records.task import Answer, Split, Task, Trust, Verifier
from etude.seams import Portable, Runtime
from etude.testing import MemoryRuntime

NAMES = ["memory", "namespace", "fleet", "microvm", "gvisor", "remote"]
PACKED_BYTES = 64 << 20
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


SERVER = """
import _socket, os
server = _socket.socket()
server.bind(("127.0.0.1", 8000))
server.listen()
if os.fork():
    os._exit(0)
count = 0
while True:
    asking, _ = server._accept()
    count += 1
    os.write(asking, b"%d\\n" % count)
    os.close(asking)
"""
SERVING = msgspec.structs.replace(
    TASK, instruction="count who asks", files={"server.py": SERVER}, running=True, trust=Trust.CODE
)
ASK = "bash -c 'read said < /dev/tcp/127.0.0.1/8000; echo $said'"
SERVES = Answer(
    reference={},
    verifier=Verifier(
        files={"verify.sh": f"echo 0 > reward\ntest $({ASK}) = 3 && echo 1 > reward\n"},
        argv=("sh", "verify.sh"),
        reward_path="reward",
    ),
)
FORGE = "while :; do for at in . /etude-*; do echo 1 > $at/reward; echo true > $at/verify.sh; done; done"


class Keeping(MemoryRuntime):
    """A runtime whose snapshots stay where they are."""

    pack = unpack = None  # type: ignore[assignment]


def running(test: Callable[..., Awaitable[Any]], *makers: Callable[[], Runtime], needs: str = "namespace") -> Any:
    async def main() -> Any:
        if why := why_not(needs):
            pytest.skip(why)
        made: list[Runtime] = []
        try:
            made += [make() for make in makers]
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
        packed = await here.pack(await machine.snapshot(), max_bytes=PACKED_BYTES)
        await machine.close()
        await here.close()
        [child] = await there.fork(await there.unpack(packed), 1)
        assert await child.read("a.txt") == b"after"
        assert await there.unpack(packed) == await there.unpack(packed)

    running(test, RUNTIMES[name], RUNTIMES[name], needs=NEEDS.get(name, "namespace"))


@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_is_too_large_or_none_is_refused_by_kind(name):
    async def test(runtime: Any) -> None:
        snapshot = await runtime.prepare({"a.txt": b"x" * 10_000})
        with pytest.raises(ValueError):  # noqa: PT011 - the kind is the promise
            await runtime.pack(snapshot, max_bytes=1000)
        with pytest.raises(MachineError):
            await runtime.pack("0" * 64, max_bytes=PACKED_BYTES)
        packed = await runtime.pack(snapshot, max_bytes=PACKED_BYTES)
        for bad in (b"", b"junk" * 99, packed[:-1], packed + b"x"):
            with pytest.raises(ValueError):  # noqa: PT011
                await runtime.unpack(bad)

    running(test, RUNTIMES[name], needs=NEEDS.get(name, "namespace"))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "memory"])
def test_a_machines_state_is_judged_in_a_fork_of_the_frozen_one(name):
    async def test(runtime: Runtime) -> Any:
        solved = await reference_exports(runtime, TASK, ANSWER)
        untouched = await simulate_exports(runtime, TASK)
        grader = MachineGrader(runtime)
        return [*solved], [(await grader.grade(TASK, ANSWER, each)).grade for each in (solved, untouched)]

    assert running(test, RUNTIMES[name], needs=NEEDS.get(name, "namespace")) == ([STATE], [1.0, 0.0])


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("mkdir db; echo 42 > db/value; ln -s db/value link; sleep 1000 &", 1.0),
        ("truncate -s 1000000000 sparse", 0.0),
        ("kill -9 -1", 0.0),
    ],
)
@pytest.mark.parametrize("name", ["fleet", "remote"])
def test_any_files_an_agent_leaves_are_graded_on_remote_machines(name, script, reward):
    async def test(runtime: Runtime) -> Any:
        machine = await one(runtime, {"seed.txt": b"0\n"})
        await machine.exec(["sh", "-c", script], key="1", deadline_s=5.0)
        taken = await take_exports(machine, TASK, runtime)
        return await MachineGrader(runtime).grade(TASK, ANSWER, taken)

    outcome = running(test, RUNTIMES[name])
    assert isinstance(outcome, Graded), outcome
    assert outcome.grade == reward


def test_a_machine_state_that_no_server_with_these_keys_packed_is_not_graded():
    async def test(here: ServedRuntime, other: ServedRuntime) -> Any:
        return await MachineGrader(other).grade(TASK, ANSWER, await reference_exports(here, TASK, ANSWER))

    outcome = running(test, ServedRuntime, lambda: ServedRuntime(key="e2b_another_key_of_another"))
    assert isinstance(outcome, Invalid)
    assert (outcome.boundary, "another server" in outcome.evidence) == (Boundary.MACHINE, True)


@pytest.mark.parametrize(
    "make",
    [
        PlainRuntime,
        lambda: FleetRuntime({"a": FleetHost(Keeping(), Capacity(2, 1 << 30))}),
        lambda: ServedRuntime(Keeping()),
    ],
    ids=["plain", "fleet", "ours"],
)
def test_a_runtime_that_cannot_export_states_raises_an_error(make):
    async def test(runtime: Runtime) -> None:
        machine = await one(runtime, {"seed.txt": b"0\n"})
        with pytest.raises(MachineError, match="cannot export"):
            await take_exports(machine, TASK, runtime)

    running(test, make)


def test_a_running_service_is_judged_in_forks_that_hold_its_memory_and_reaches_no_verifier():
    async def test(runtime: Runtime) -> Any:
        grader, outcomes = MachineGrader(runtime), []
        for user, script in [
            ("", f"python -IS server.py && {ASK} && {ASK}"),
            ("", f"({FORGE}) > /dev/null 2>&1 &"),
            ("root", "echo b > /proc/sysrq-trigger; read never"),
        ]:
            machine = await one(runtime, {"server.py": SERVER.encode()})
            await machine.exec(["sh", "-c", script], key="1", deadline_s=60.0, user=user)
            outcomes.append(await grader.grade(SERVING, SERVES, await take_exports(machine, SERVING, runtime)))
            await machine.close()
        return [(outcome.grade, outcome.reason) for outcome in outcomes]

    assert running(test, microvm, needs="microvm") == [
        (1.0, "the verifier gives 1"),
        (0.0, "the verifier gives 0"),
        (0.0, "the machine's state is missing: the machine was gone"),
    ]


def test_where_snapshots_hold_no_processes_no_rollout_begins_and_no_grade_is_given():
    async def test(runtime: Runtime) -> Any:
        with pytest.raises(MachineError, match="files but no processes"):
            await simulate_exports(runtime, SERVING)
        packed = await runtime.pack(await runtime.prepare({}), max_bytes=PACKED_BYTES)  # type: ignore[attr-defined]
        return await MachineGrader(runtime).grade(SERVING, SERVES, {STATE: packed})

    outcome = running(test, RUNTIMES["namespace"])
    assert isinstance(outcome, Invalid)
    assert (outcome.boundary, "no processes" in outcome.evidence) == (Boundary.MACHINE, True)


def test_a_machine_state_over_the_limit_earns_nothing_and_names_the_limit(monkeypatch):
    monkeypatch.setattr(exports, "MAX_STATE_BYTES", 1000)

    async def test(runtime: Runtime) -> Any:
        machine = await one(runtime, {"seed.txt": b"0\n" * 1000})
        return await MachineGrader(runtime).grade(TASK, ANSWER, await take_exports(machine, TASK, runtime))

    outcome = running(test, RUNTIMES["namespace"])
    assert isinstance(outcome, Graded)
    assert (outcome.grade, outcome.values["over_limit"], "at most 1000" in outcome.reason) == (0.0, 1.0, True)
