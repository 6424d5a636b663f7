"""The errors for a child process that does not start, or is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from etude.config import to_toml
from etude.errors import DeadlineExceeded, EtudeError
from etude.loop.config import RunConfig
from etude.loop.phases import _program
from etude.loop.placement import LocalPlacement, LocalProcess, OnWait, Process, Program
from etude.loop.processes import READY_S, Child, Role, Supervisor
from etude.loop.rpc import ProcessLost
from etude.run import RunFolder
from etude.telemetry import Telemetry


def brought_up(tmp_path: Path, program: str, ready_s: float) -> None:
    """A child that runs a program and is never ready."""

    async def never(_: Child) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        telemetry = Telemetry(tmp_path / "events.jsonl", process="test")
        supervisor = Supervisor(telemetry)
        child = Child("learner", ["-c", program], logs=tmp_path / "logs", telemetry=telemetry)
        try:
            await supervisor.add(child, Role(never, never, ready_s=ready_s))
        finally:
            await supervisor.close()
            telemetry.close()

    asyncio.run(main())


def test_a_child_that_is_not_ready_in_time_is_reported_with_its_log_and_cpu_time(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="waited for learner to be ready") as caught:
        brought_up(tmp_path, "import time; time.sleep(3600)", 0.2)
    assert "it is alive and has used" in caught.value.facts
    assert str(tmp_path / "logs" / "learner.log") in caught.value.hint


def test_a_child_that_dies_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="learner ended while starting") as caught:
        brought_up(tmp_path, "raise SystemExit('no room')", READY_S)
    assert "no room" in caught.value.facts


def test_no_children_are_not_waited_for(tmp_path: Path) -> None:
    async def story() -> None:
        async with asyncio.timeout(10):
            await Supervisor(Telemetry(tmp_path / "events.jsonl", process="test")).add_all([])

    asyncio.run(story())


class LosesStarts(LocalPlacement):
    """Programs are children of this process; the starts of these numbers find their machine lost, as on a cluster that
    does not know yet that a node is gone."""

    def __init__(self, *lost: int) -> None:
        self.lost, self.asked = lost, 0

    async def start(self, program: Program, waits: OnWait) -> Process:
        self.asked += 1
        if self.asked in self.lost:
            raise ProcessLost("the actor is gone", "its node died", hint="its node was lost")
        return await super().start(program, waits)


class SlowToDie(LocalPlacement):
    """A process takes no notice of the first signals to kill it: a machine that is cut off is given up late."""

    def __init__(self, ignored: int) -> None:
        self.ignored = ignored

    async def start(self, program: Program, waits: OnWait) -> Process:
        process = await super().start(program, waits)
        kill = process.signal

        def signalled(signum: int) -> None:
            self.ignored -= signum == signal.SIGKILL
            if signum != signal.SIGKILL or self.ignored < 0:
                kill(signum)

        process.signal = signalled  # type: ignore[method-assign]
        return process


class OnALoadedHost(LocalPlacement):
    """A child waits for a core almost all the time, by the kernel's count."""

    async def start(self, program: Program, waits: OnWait) -> Process:
        process = await super().start(program, waits)

        async def queued_s() -> dict[int, float]:
            return {process.pid: 0.99 * time.monotonic(), 1: 0.0}

        process.queued_s = queued_s  # type: ignore[method-assign]
        return process


def states_with_answers_after(tmp_path: Path, answer_s: float, hung_s: float, placement: LocalPlacement) -> list[str]:
    """What is reported of a child that answers two health checks, each after `answer_s` seconds."""
    checks = 0

    async def is_up(_: Child) -> None:
        """Be ready at once."""

    async def answers(_: Child) -> None:
        nonlocal checks
        await asyncio.sleep(answer_s)
        checks += 1

    def states() -> list[str]:
        return [json.loads(line)["state"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]

    async def main() -> list[str]:
        telemetry = Telemetry(tmp_path / "events.jsonl", process="test")
        supervisor = Supervisor(telemetry, hung_s=hung_s, placement=placement)
        argv = ["-c", "import time; time.sleep(600)"]
        child = Child("worker-0", argv, logs=tmp_path / "logs", telemetry=telemetry, placement=placement)
        try:
            async with asyncio.timeout(300):
                await supervisor.add(child, Role(is_up, answers))
                while checks < 2 and "hung" not in states():  # noqa: ASYNC110  it is read from a file
                    await asyncio.sleep(0.01)
                return states()
        finally:
            await supervisor.close()
            telemetry.close()

    return asyncio.run(main())


def test_a_child_that_waits_for_a_core_is_not_hung_and_one_that_could_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.loop.processes.BEAT_S", 0.01)
    slow = states_with_answers_after(tmp_path / "slow", 1.5, 0.5, OnALoadedHost())
    assert slow == ["start", "ready"]
    hung = states_with_answers_after(tmp_path / "hung", 600.0, 0.5, LocalPlacement())
    assert hung[:3] == ["start", "ready", "hung"]


def test_a_child_that_waits_for_a_core_for_ever_is_hung_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.loop.processes.BEAT_S", 0.01)
    states = states_with_answers_after(tmp_path, 600.0, 0.1, OnALoadedHost())
    assert states[:3] == ["start", "ready", "hung"]


def test_a_supervisor_that_got_no_core_counts_that_as_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.loop.processes.BEAT_S", 0.01)
    looks = LocalProcess.queued_s

    async def blocked(process: LocalProcess) -> dict[int, float]:
        time.sleep(1.0)  # noqa: ASYNC251  as if this process had got no core
        return await looks(process)

    monkeypatch.setattr(LocalProcess, "queued_s", blocked)
    assert states_with_answers_after(tmp_path, 0.9, 0.8, LocalPlacement()) == ["start", "ready"]


def states_of_a_loss(tmp_path: Path, placement: LocalPlacement, *, is_silent: bool) -> list[str]:
    """What is reported of a child that is killed, or silent, until it is ready again."""
    ups = 0

    async def is_up(_: Child) -> None:
        nonlocal ups
        ups += 1

    async def answers(_: Child) -> None:
        if is_silent and ups < 2:
            await asyncio.Event().wait()

    def states() -> list[str]:
        return [json.loads(line)["state"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]

    async def main() -> None:
        telemetry = Telemetry(tmp_path / "events.jsonl", process="test")
        supervisor = Supervisor(telemetry, hung_s=0.05, placement=placement)
        argv = ["-c", "import time; time.sleep(600)"]
        child = Child("worker-0", argv, logs=tmp_path / "logs", telemetry=telemetry, placement=placement)
        try:
            async with asyncio.timeout(300):
                await supervisor.add(child, Role(is_up, answers))
                if not is_silent:
                    assert child.pid is not None
                    os.kill(child.pid, signal.SIGKILL)
                while states().count("ready") < 2:  # noqa: ASYNC110  it is read from a file
                    await asyncio.sleep(0.01)
        finally:
            await supervisor.close()
            telemetry.close()

    asyncio.run(main())
    return states()


def test_a_loss_is_reported_once_where_the_first_starts_after_it_are_lost_too(tmp_path: Path) -> None:
    states = states_of_a_loss(tmp_path, LosesStarts(2, 3), is_silent=False)
    assert states == ["start", "ready", "exit", "restart", "start", "ready"]


def test_a_silent_child_is_reported_once_where_its_end_is_seen_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.loop.processes.BEAT_S", 0.01)
    states = states_of_a_loss(tmp_path, SlowToDie(2), is_silent=True)
    assert states == ["start", "ready", "hung", "exit", "restart", "start", "ready"]


def test_a_phases_program_whose_machine_is_lost_as_it_starts_is_started_elsewhere(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", config_toml=to_toml(RunConfig()), seed=0)
    telemetry = Telemetry(tmp_path / "events.jsonl", process="test")

    async def main() -> None:
        supervisor = Supervisor(telemetry, placement=LosesStarts(1))
        await _program(
            run, telemetry, supervisor, "corpus", "this"
        )  # a module that runs to its end, whatever it is told
        await supervisor.close()

    asyncio.run(main())
    telemetry.close()
    states = [json.loads(line)["state"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert states == ["start", "exit"]
