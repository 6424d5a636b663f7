"""The library's fakes keep their seams' promises."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from etude import seams
from etude.errors import ContextFull, EngineBehind, EngineError, MachineError
from etude.records.completion import CompletionRequest, Sampling, StopReason
from etude.records.rollout import Trace, Turn
from etude.testing import (
    EnginePolicy,
    FakeGrader,
    FakeLearner,
    ListSource,
    MemoryMachine,
    MemoryRuntime,
    ScriptedEngine,
    run_python,
)


def _request(prompt: list[int], *, stop: tuple[int, ...] = (9,), **changes: object) -> CompletionRequest:
    fields: dict[str, object] = {
        "request_id": "r/0",
        "session_id": "r",
        "prompt_ids": np.array(prompt, np.int32),
        "sampling": Sampling(max_tokens=4, stop_token_ids=stop),
    }
    return CompletionRequest(**(fields | changes))  # type: ignore[arg-type]


def test_every_fake_stands_behind_its_seam() -> None:
    engine = ScriptedEngine([])
    assert isinstance(engine, seams.Engine)
    assert isinstance(EnginePolicy(engine), seams.Policy)
    assert isinstance(MemoryRuntime(), seams.Runtime)
    assert isinstance(MemoryMachine({}), seams.Machine)
    assert isinstance(FakeGrader(), seams.Grader)
    assert isinstance(FakeLearner(), seams.Learner)
    assert isinstance(ListSource([]), seams.TaskSource)


def test_scripted_completions_make_a_whole_path_with_every_route() -> None:
    async def two_turns() -> Trace:
        policy = EnginePolicy(ScriptedEngine([[5, 9, 7], [6, 6, 6, 6, 6]], step=3))
        asked = _request([1, 2, 3])
        first = await policy.complete(asked)
        second = await policy.complete(_request([1, 2, 3, 5, 9, 4], routes_from=first.routes_start + len(first.routes)))
        assert first.stop_reason is StopReason.STOP
        assert second.stop_reason is StopReason.LENGTH
        return Trace(
            (
                Turn(parent=None, prompt_ids=asked.prompt_ids, completion=first, sampling=asked.sampling),
                Turn(parent=0, prompt_ids=np.array([4], np.int32), completion=second, sampling=asked.sampling),
            )
        )

    path = asyncio.run(two_turns()).path(1)
    assert path.token_ids.tolist() == [1, 2, 3, 5, 9, 4, 6, 6, 6, 6]
    assert path.steps.tolist() == [3] * 10
    assert path.routes[:-1, 0, 0].tolist() == [p % 4 for p in range(9)]


def test_a_scripted_completion_has_the_routes_of_a_long_prompt() -> None:
    done = asyncio.run(ScriptedEngine([[5, 9]]).generate(_request([1] * 1000, routes_from=200)))
    assert (done.routes_start, done.routes.dtype) == (200, np.uint8)
    assert done.routes[:, 0, 0].tolist() == [p % 4 for p in range(200, 1001)]


def test_a_scripted_engine_refuses_what_an_engine_refuses() -> None:
    async def refusals() -> None:
        engine = ScriptedEngine([[1]], context_tokens=8)
        with pytest.raises(ContextFull):
            await engine.generate(_request([1] * 5))
        with pytest.raises(EngineBehind):
            await engine.generate(_request([1], min_step=2))
        await engine.adopt(2, deadline_s=1)
        with pytest.raises(EngineBehind):
            await engine.generate(_request([1], pin_step=1))
        assert (await engine.generate(_request([1], min_step=2))).spans[0].version.step == 2
        with pytest.raises(EngineError, match="no answer left"):
            await engine.generate(_request([1]))

    asyncio.run(refusals())


def test_a_paused_engine_keeps_requests_waiting_until_it_resumes_or_their_deadline_ends() -> None:
    async def paused() -> None:
        engine = ScriptedEngine([[1]])
        await engine.pause()
        with pytest.raises(EngineError, match="stayed paused"):
            await engine.generate(_request([1], deadline_s=0.01))
        waiting = asyncio.create_task(engine.generate(_request([1])))
        await asyncio.sleep(0)  # it runs up to its first wait
        assert (await engine.info()).num_waiting == 1
        await engine.resume()
        assert (await waiting).token_ids.tolist() == [1]

    asyncio.run(paused())


def test_machines_of_a_snapshot_are_alike_and_independent() -> None:
    async def siblings() -> None:
        runtime = MemoryRuntime()
        snapshot = await runtime.prepare({"a.py": b"print(1)"})
        first, second = await runtime.fork(snapshot, 2)
        await first.write("a.py", b"print(2)")
        assert (await second.read("a.py")) == b"print(1)"
        assert await first.snapshot() != snapshot == await second.snapshot()
        await runtime.close()
        with pytest.raises(MachineError, match="closed"):
            await second.read("a.py")
        with pytest.raises(MachineError, match="no snapshot"):
            await runtime.fork("none", 1)

    asyncio.run(siblings())


def test_a_key_never_runs_twice_and_output_is_capped() -> None:
    async def twice() -> None:
        machine = MemoryMachine({"t.py": b"open('n', 'a').write('x')\nprint('y' * 100)"})
        results = [await machine.exec(["python", "t.py"], key="k", deadline_s=60, output_bytes=10) for _ in range(2)]
        assert results[0] == results[1]
        assert (results[0].output, results[0].truncated) == (b"y" * 10, True)
        assert await machine.read("n") == b"x"
        assert (await machine.exec(["sh", "-c", "ls"], key="l", deadline_s=1)).exit_code == 127

    asyncio.run(twice())


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a\0b"])
def test_a_memory_machine_keeps_to_its_directory(path: str) -> None:
    with pytest.raises(ValueError, match="leaves the working directory"):
        asyncio.run(MemoryMachine({}).write(path, b""))


def test_reading_follows_the_seams_errors() -> None:
    machine = MemoryMachine({"a/b.py": b"12345"})
    with pytest.raises(FileNotFoundError):
        asyncio.run(machine.read("c"))
    with pytest.raises(IsADirectoryError):
        asyncio.run(machine.read("a"))
    with pytest.raises(ValueError, match="larger"):
        asyncio.run(machine.read("a/b.py", max_bytes=4))


@pytest.mark.parametrize(
    ("script", "code", "output"),
    [
        (b"import sys; print(sys.argv[1:], sys.stdin.read()); sys.exit(3)", 3, "['x'] in\n"),
        (b"raise SystemExit('no')", 1, "no\n"),
        (b"1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        (b"import one; import json; print(one.X, json.dumps(1))", 0, "1 1\n"),
        (b"import ring; print(ring.Y)", 0, "2\n"),
        (b"from one import X as y; print(y)", 0, "1\n"),
        (b"def (", 1, "SyntaxError: invalid syntax (t.py, line 1)\n"),
    ],
)
def test_run_python_does_what_an_interpreter_does(script: bytes, code: int, output: str) -> None:
    files = {"t.py": script, "one.py": b"X = 1", "ring.py": b"import other\nY = 2", "other.py": b"import ring"}
    assert run_python(files, "t.py", ["x"], b"in") == (code, output)


def test_a_fake_learner_counts_steps_and_remembers_them(tmp_path: Path) -> None:
    learner, other = FakeLearner(), FakeLearner()
    learner.optim_step()
    assert learner.publish(["g0.0"]).version.step == 1
    assert learner.publish(["g0.1"]).version != learner.published[0].version
    learner.save(str(tmp_path / "c"))
    other.load(str(tmp_path / "c"))
    assert other.step == 1
