from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import msgspec
import pytest
from tests.unit.harness.tokeniser import laptop_chat

from etude.errors import EngineError, MachineError
from etude.harness import HarnessConfig, standard_tools
from etude.records import Completion, CompletionRequest, Graded, Invalid, Rollout, RolloutSpec, Task
from etude.records.rollout import Boundary, Ending
from etude.records.task import Split, Trust
from etude.records.wire import pack, unpack
from etude.rewards import Composition
from etude.rollouts import Script, ScriptedPolicy, demonstrate, run_rollout, submitted
from etude.seams import Machine
from etude.testing import MemoryMachine, MemoryRuntime

CHAT = laptop_chat()
LIMITS = HarnessConfig(turn_tokens=48, context_tokens=2048, tools=tuple(standard_tools().signatures))
TASK = Task(
    source="list",
    split=Split.TRAIN,
    index=0,
    family="demo",
    instruction="fix the failing test",
    files={"calc.py": "def f(n):\n    return n - 3\n", "tests.py": "import calc\nprint(calc.f(1))\n"},
    exports=("calc.py",),
    test_command=("python", "tests.py"),
)
SPEC = RolloutSpec(
    rollout_id="g000000.0", group_id="g000000", attempt=0, task=TASK, seed=1, temperature=1.0, min_step=3
)


def repair() -> Script:
    listing = yield "ls", {}
    assert listing == "calc.py tests.py"
    shown = yield "test", {}
    assert shown == "-2"
    done = yield "edit", {"path": "calc.py", "line": 2, "text": "return n + 3"}
    assert done == "ok"
    yield "submit", {}


def roll(script: Script, runtime: MemoryRuntime | None = None, limits: HarnessConfig = LIMITS) -> Rollout:
    policy = ScriptedPolicy(script, CHAT)
    return asyncio.run(run_rollout(SPEC, runtime=runtime or MemoryRuntime(), policy=policy, chat=CHAT, harness=limits))


class Watched(MemoryRuntime):
    """A runtime that keeps its machines."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Machine] = []

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        self.made += await super().fork(snapshot, n)
        return self.made[-n:]

    @property
    def all_closed(self) -> bool:
        return bool(self.made) and all(m.closed for m in self.made if isinstance(m, MemoryMachine))


def test_a_scripted_repair_exports_the_repaired_file_and_closes_its_machine() -> None:
    runtime = Watched()
    rollout = roll(repair(), runtime)
    assert rollout.ending is Ending.SUBMITTED
    assert rollout.exports == {"calc.py": b"def f(n):\n    return n + 3\n"}
    assert rollout.invalid is None
    assert rollout.num_turns == 4
    assert runtime.all_closed
    assert rollout.trace.turns[0].completion.spans[0].version.step == 3


def test_a_rollout_travels_as_bytes() -> None:
    rollout = roll(repair())
    again = unpack(pack(rollout), Rollout)
    assert again.exports == rollout.exports
    assert again.trace.path(3).token_ids.tolist() == rollout.trace.path(3).token_ids.tolist()


def test_fifty_turns_are_played_and_then_it_ends() -> None:
    def forever() -> Script:
        while True:
            yield "ls", {}

    rollout = roll(forever(), limits=HarnessConfig(max_turns=50, context_tokens=4096))
    assert (rollout.ending, rollout.num_turns) == (Ending.TURNS, 50)


def test_a_script_that_ends_without_submitting_submits() -> None:
    def once() -> Script:
        yield "ls", {}

    assert roll(once()).ending is Ending.SUBMITTED


def test_a_file_the_agent_deleted_or_blew_up_is_not_exported_and_the_rollout_stays_graded() -> None:
    def grow() -> Script:
        yield "write", {"path": "calc.py", "text": "x" * 200}
        yield "submit", {}

    limits = HarnessConfig(tools=LIMITS.tools, turn_tokens=48, context_tokens=2048, export_bytes=100)
    rollout = roll(grow(), limits=limits)
    assert rollout.exports == {}
    assert rollout.invalid is None


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../b", "./a", "", "/"])
def test_a_declared_export_that_is_no_plain_path_is_the_tasks_fault(path: str) -> None:
    def submit() -> Script:
        yield "submit", {}

    spec = msgspec.structs.replace(SPEC, task=msgspec.structs.replace(TASK, exports=(path,)))
    rollout = asyncio.run(
        run_rollout(spec, runtime=MemoryRuntime(), policy=ScriptedPolicy(submit(), CHAT), chat=CHAT, harness=LIMITS)
    )
    assert rollout.invalid is not None
    assert rollout.invalid.boundary is Boundary.TASK
    assert "plain relative path" in rollout.invalid.reason


class Gone:
    async def complete(self, request: CompletionRequest) -> Completion:
        raise EngineError("no engine answers", "3 of 3 are dead", hint="restart one")


def test_no_engine_makes_a_rollout_invalid_at_the_provider_with_evidence() -> None:
    runtime = Watched()
    rollout = asyncio.run(run_rollout(SPEC, runtime=runtime, policy=Gone(), chat=CHAT, harness=LIMITS))
    assert rollout.invalid == Invalid(
        boundary=Boundary.PROVIDER, reason="no engine answers", evidence="EngineError: 3 of 3 are dead"
    )
    assert rollout.exports == {}
    assert runtime.all_closed


class Broken(MemoryRuntime):
    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        raise MachineError("the launcher is gone", "exit status 9", hint="see its log")


def test_a_machine_that_cannot_be_made_makes_a_rollout_invalid_at_the_machine() -> None:
    rollout = asyncio.run(run_rollout(SPEC, runtime=Broken(), policy=Gone(), chat=CHAT, harness=LIMITS))
    assert rollout.invalid is not None
    assert rollout.invalid.boundary is Boundary.MACHINE


def test_a_machine_that_dies_while_files_are_read_out_is_invalid() -> None:
    class Dying(MemoryMachine):
        async def read(self, path: str, *, max_bytes: int = 0) -> bytes:
            raise MachineError("the machine is gone", hint="see the launcher's log")

    class Runtime(MemoryRuntime):
        async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
            return [Dying({}) for _ in range(n)]

    def submit() -> Script:
        yield "submit", {}

    rollout = roll(submit(), Runtime())
    assert rollout.invalid is not None
    assert rollout.invalid.boundary is Boundary.MACHINE
    assert rollout.num_turns == 1


def test_a_rollout_that_is_cancelled_closes_its_machine() -> None:
    class Never:
        def __init__(self) -> None:
            self.asked = asyncio.Event()

        async def complete(self, request: CompletionRequest) -> Completion:
            self.asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    runtime = Watched()

    async def cancel() -> None:
        policy = Never()
        work = asyncio.create_task(run_rollout(SPEC, runtime=runtime, policy=policy, chat=CHAT, harness=LIMITS))
        await policy.asked.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(cancel())
    assert runtime.all_closed


def test_an_agent_that_never_submitted_scores_nothing_and_keeps_its_terms() -> None:
    graded = Graded.of(1.0, {"tests": 1.0}, trust=Trust.DATA, reason="all pass")
    done = roll(repair())
    assert Composition().of(graded.with_terms(submitted(done))).value == 1.0
    idle = msgspec.structs.replace(done, ending=Ending.TURNS)
    outcome = graded.with_terms(submitted(idle))
    assert outcome.values == {"grade": 1.0, "tests": 1.0, "submitted": 0.0}
    reward = Composition().of(outcome)
    assert (reward.value, reward.reason) == (0.0, "not submitted (turns); all pass")
    assert Composition(require_submit=False).of(outcome).value == 1.0


def machine() -> MemoryMachine:
    return MemoryMachine({p: t.encode() for p, t in TASK.files.items()})


def test_a_demonstration_is_the_very_conversation_that_a_rollout_of_the_script_has() -> None:
    messages = demonstrate(TASK, repair(), standard_tools(), machine())
    rollout = roll(repair())
    assert CHAT.encode_conversation(messages).tolist() == rollout.trace.path(rollout.num_turns - 1).token_ids.tolist()


def test_a_random_script_demonstrates_what_it_plays() -> None:
    def stumble(rng: random.Random) -> Iterator[tuple[str, dict[str, str | int]]]:
        for _ in range(rng.randint(1, 6)):
            yield rng.choice([("ls", {}), ("cat", {"path": "calc.py"}), ("cat", {"path": "nope"}), ("test", {})])

    for seed in range(20):
        messages = demonstrate(TASK, stumble(random.Random(seed)), standard_tools(), machine())  # type: ignore[arg-type]
        rollout = roll(stumble(random.Random(seed)))  # type: ignore[arg-type]
        path = rollout.trace.path(rollout.num_turns - 1).token_ids
        played = CHAT.encode_conversation(messages).tolist()
        assert path[: len(played)].tolist() == played


def test_a_machine_that_waits_cannot_be_demonstrated_on() -> None:
    class Waiting(MemoryMachine):
        async def read(self, path: str, *, max_bytes: int = 0) -> bytes:
            await asyncio.sleep(0)
            return b""

    def look() -> Script:
        yield "cat", {"path": "a"}

    with pytest.raises(RuntimeError, match="in memory"):
        demonstrate(TASK, look(), standard_tools(), Waiting({}))
