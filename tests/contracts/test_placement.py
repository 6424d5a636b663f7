"""What every placement promises: the same calls, the same errors, the same restarts, wherever a component runs.

A new one joins by a line in `PLACES`. The component is `tests/placed.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from etude import __version__
from etude.errors import ConfigError, DeadlineExceeded, EtudeError, RunError, WeightsError
from etude.loop.placement import ADDRESS, LocalPlacement, NoCapacity, Placement, Program
from etude.loop.processes import Child, Role, Supervisor
from etude.loop.rpc import CallFailed, ProcessLost
from etude.records import Version
from etude.telemetry import Telemetry

COMPONENT = Path(__file__).parents[1] / "placed.py"
SENT = Version(3, "0" * 8, "a" * 64)
PLACES = ["here", "ray"]
Open = Callable[[Path], Placement]


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """A way to open a placement, whose components are gone when it is closed."""
    if request.param == "here":
        yield lambda run: LocalPlacement()
        return
    from etude.loop import ray_cluster, ray_placement

    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("RAY_ADDRESS", raising=False)
        patched.setattr(ray_cluster, "LOCAL_CAPACITY", 1.0)  # one of each role
        ray_cluster.connect("ray")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ETUDE_TOKEN", "of this test")  # else one is made, and left to all that comes later
        patched.setattr(ray_placement, "PLACED_S", 300.0)  # a slow machine takes long to start an actor
        patched.setattr(ray_placement, "ANSWER_S", 300.0)
        try:
            yield ray_placement.RayPlacement
        finally:
            ray_cluster.disconnect()


class Placed:
    """A supervisor, and one component that it keeps up."""

    def __init__(self, place: Open, path: Path, *words: str, hung_s: float = 30.0) -> None:
        self.path = path
        self.telemetry = Telemetry(path / "events.jsonl", process="test")
        self.placement = place(path)
        self.supervisor = Supervisor(self.telemetry, hung_s=hung_s, placement=self.placement)
        self.words = words
        self.child = self.component("worker-0")
        self.ups = 0
        self._up = asyncio.Event()

    def component(self, name: str) -> Child:
        return Child(
            name,
            [str(COMPONENT), *self.words],
            logs=self.path / "logs",
            telemetry=self.telemetry,
            nice=3,
            env={"A_WORD": "from outside"},
            placement=self.placement,
        )

    async def __aenter__(self) -> Placed:
        await self.supervisor.add(self.child, self.role)
        return self

    @property
    def role(self) -> Role:
        return Role(self._on_up, self._answers, with_socket=True)

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.close()
        self.telemetry.close()

    async def _on_up(self, child: Child) -> None:
        assert child.caller is not None
        await child.caller.call("ready", bool, deadline_s=300.0)
        self.ups += 1
        self._up.set()

    async def _answers(self, child: Child) -> None:
        assert child.caller is not None
        await child.caller.call("ready", bool, deadline_s=60.0)

    async def call(self, method: str, kind: Any, *args: object, deadline_s: float = 300.0) -> Any:
        assert self.child.caller is not None
        return await self.child.caller.call(method, kind, *args, deadline_s=deadline_s)

    async def until_up(self, times: int) -> None:
        async with asyncio.timeout(300.0):
            while self.ups < times:
                self._up.clear()
                await self._up.wait()

    def states(self) -> list[str]:
        events = [json.loads(line) for line in (self.path / "events.jsonl").read_text().splitlines()]
        return [event["state"] for event in events if event["kind"] == "process"]


def gone(pid: int) -> bool:
    """Whether a process ends, or has ended; what its new parent has not reaped yet has ended, too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        end = time.monotonic() + 120.0
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
    return True


def test_calls_carry_records_and_errors_as_what_was_raised(place: Open, tmp_path: Path) -> None:
    async def main() -> None:
        async with Placed(place, tmp_path) as placed:
            answers = await asyncio.gather(*(placed.call("echo", Version, SENT, n) for n in range(20)))
            assert [version.step for version in answers] == list(range(3, 23))
            with pytest.raises(WeightsError, match="hint: fetch the anchor"):
                await placed.call("refuse", type(None))
            with pytest.raises(CallFailed, match="KeyError: 'oops'"):
                await placed.call("fail", type(None))
            with pytest.raises(DeadlineExceeded, match="worker-0 did not answer hang"):
                await placed.call("hang", type(None), deadline_s=0.05)

    asyncio.run(main())


def test_a_call_that_is_no_longer_waited_for_is_cancelled_there(place: Open, tmp_path: Path) -> None:
    async def main() -> None:
        async with Placed(place, tmp_path) as placed:
            pending = asyncio.create_task(placed.call("hang", type(None)))
            for _ in range(2):  # the second is answered after the call that hangs has begun
                await placed.call("echo", Version, SENT, 1)
            pending.cancel()
            await placed.call("until_cancelled", type(None))

    asyncio.run(main())


def test_a_component_has_its_address_environment_niceness_and_log(place: Open, tmp_path: Path) -> None:
    async def main() -> None:
        async with Placed(place, tmp_path, "--host", ADDRESS) as placed:
            word, address, of_env, threads, nice = await placed.call("said", list[str])
            assert (word, of_env, threads, nice) == ("--host", "from outside", "1", str(os.nice(0) + 3))
            assert address.count(".") == 3
            used = await placed.supervisor.usage(True)
            assert used["worker-0"]["cpu_s"] > 0
            assert used["worker-0"]["pss_bytes"] > 1 << 20
            assert used["conductor"]["cpu_s"] > 0
            with pytest.raises(ProcessLost):
                await placed.call("end", type(None), 3)
            await placed.until_up(2)
        assert "asked to end with 3" in (tmp_path / "logs" / "worker-0.log").read_text()

    asyncio.run(main())


def test_a_killed_component_fails_its_calls_and_comes_back(place: Open, tmp_path: Path) -> None:
    async def main() -> None:
        async with Placed(place, tmp_path) as placed:
            pending = asyncio.create_task(placed.call("hang", type(None)))
            pid, _ = await placed.call("pids", tuple[int, int])
            assert pid == placed.child.pid
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ProcessLost):
                await pending
            await placed.until_up(2)
            assert (await placed.call("pids", tuple[int, int]))[0] != pid
            assert placed.states()[:5] == ["start", "ready", "exit", "restart", "start"]

    asyncio.run(main())


def test_a_stopped_component_is_killed_by_name_and_comes_back(place: Open, tmp_path: Path) -> None:
    async def main() -> None:
        async with Placed(place, tmp_path, hung_s=0.5) as placed:
            pid, _ = await placed.call("pids", tuple[int, int])
            os.kill(pid, signal.SIGSTOP)
            await placed.until_up(2)
            assert "hung" in placed.states()
            assert gone(pid)

    asyncio.run(main())


def test_a_component_that_cannot_start_says_why(place: Open, tmp_path: Path) -> None:
    async def main() -> None:
        placed = Placed(place, tmp_path, "--broken")
        try:
            with pytest.raises(EtudeError, match="worker-0 ended while starting") as caught:
                await placed.__aenter__()
            assert "no luck" in caught.value.facts
        finally:
            await placed.__aexit__()

    asyncio.run(main())


def test_a_program_that_is_not_called_runs_to_its_end_and_its_exit_code_is_told(place: Open, tmp_path: Path) -> None:
    async def main() -> None:
        placed = Placed(place, tmp_path)
        script = "import os, sys; print(os.getcwd()); sys.exit(75)"
        argv, told = ["-c", script], placed.telemetry
        child = Child("corpus", argv, logs=tmp_path / "logs", telemetry=told, placement=placed.placement)
        placed.supervisor.children["corpus"] = child
        try:
            await child.start(with_socket=False)
            assert await child.exited() == 75
            assert (child.pid, child.caller, child.was_killed) == (None, None, False)
        finally:
            await placed.__aexit__()
        assert (tmp_path / "logs" / "corpus.log").read_text() == f"{os.getcwd()}\n"

    asyncio.run(main())


def test_closing_a_placement_ends_its_processes(place: Open, tmp_path: Path) -> None:
    async def main() -> tuple[int, int]:
        async with Placed(place, tmp_path) as placed:
            return await placed.call("pids", tuple[int, int])

    pid, parent = asyncio.run(main())
    assert gone(pid)
    assert parent == os.getpid() or gone(parent)


# What a cluster alone can show


@pytest.mark.parametrize("place", ["ray"], indirect=True)
def test_a_killed_actor_is_restarted_once(place: Open, tmp_path: Path) -> None:
    async def main() -> None:
        async with Placed(place, tmp_path) as placed:
            _, actor = await placed.call("pids", tuple[int, int])
            os.kill(actor, signal.SIGKILL)
            await placed.until_up(2)
        assert placed.states()[:5] == ["start", "ready", "exit", "restart", "start"]
        assert placed.states().count("restart") == 1

    asyncio.run(main())


@pytest.mark.parametrize("place", ["ray"], indirect=True)
def test_connecting_changes_nothing_of_what_a_sigterm_does(place: Open) -> None:
    assert not callable(signal.getsignal(signal.SIGTERM)), "Ray has a handler that exits at once"


@pytest.mark.parametrize("place", ["ray"], indirect=True)
def test_a_component_without_room_waits_and_takes_the_room_that_becomes_free(place: Open, tmp_path: Path) -> None:
    async def main() -> None:
        placed = Placed(place, tmp_path)
        try:
            both = {name: placed.component(name) for name in ("worker-0", "worker-1")}
            await placed.supervisor.add_all((child, placed.role) for child in both.values())
            [first] = [name for name, child in both.items() if child.pid is not None]
            [other] = both.keys() - {first}
            assert both[other].is_waiting
            await placed.supervisor.remove(first)
            await placed.until_up(2)
            assert both[other].pid is not None
        finally:
            await placed.__aexit__()
        events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        [waited] = [event for event in events if event.get("state") == "waiting"]
        assert waited["name"] == other
        assert "worker 1" in waited["reason"]

    asyncio.run(main())


@pytest.mark.parametrize("place", ["ray"], indirect=True)
def test_a_role_that_no_node_has_room_for_ends_the_wait_by_name(
    place: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from etude.loop import ray_placement

    async def main() -> None:
        async with Placed(place, tmp_path / "one"):  # another run has it
            monkeypatch.setattr(ray_placement, "PLACED_S", 0.0)
            monkeypatch.setattr(ray_placement, "CAPACITY_S", 0.0)
            late = Placed(place, tmp_path / "late")
            try:
                with pytest.raises(NoCapacity, match=r"no node has free resources for worker-0: .*worker 1") as caught:
                    await late.__aenter__()
                assert """ray start --address=... --resources='{"worker": 1}'""" in caught.value.hint
            finally:
                await late.__aexit__()

    asyncio.run(main())


@pytest.mark.parametrize("place", ["ray"], indirect=True)
def test_a_component_without_calls_ends_with_its_conductors_connection(place: Open, tmp_path: Path) -> None:
    async def main() -> int:
        placement = place(tmp_path)
        program = Program("corpus", ["-c", "import time; time.sleep(1000)"], tmp_path / "corpus.log")
        try:
            process = await placement.start(program, _never_waits)
            assert process.returncode is None
            process._link.close()  # type: ignore[attr-defined]  # as the kernel does when the conductor is killed
            async with asyncio.timeout(120.0):
                return await process.wait()
        finally:
            await placement.close()

    assert asyncio.run(main()) == -signal.SIGKILL


@pytest.mark.parametrize("place", ["ray"], indirect=True)
def test_a_node_that_does_not_see_the_run_folder_takes_no_part_and_is_named(
    place: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from etude.loop import ray_cluster, ray_placement

    elsewhere, told = tmp_path / "elsewhere", list[str]()

    async def waits(why: str) -> None:
        told.append(why)

    async def main() -> None:
        placement = place(elsewhere)
        try:
            with pytest.raises(RunError, match="the node of the learner cannot take part") as caught:
                await placement.start(Program("learner", ["-c", ""], tmp_path / "log"), waits)
            assert f"it does not see {elsewhere}" in caught.value.facts
            monkeypatch.setattr(ray_placement, "CAPACITY_S", 0.0)
            with pytest.raises(NoCapacity) as none:
                await placement.start(Program("worker-0", ["-c", ""], tmp_path / "log"), waits)
            assert f"it does not see {elsewhere}" in none.value.facts
        finally:
            await placement.close()

    asyncio.run(main())
    assert any(f"it does not see {elsewhere}" in why for why in told)
    assert ray_cluster._missing_on_node({str(tmp_path): None}, __version__) == ""
    with pytest.raises(ConfigError, match="1 of 1 nodes cannot take part") as refused:
        ray_cluster._check_nodes(("worker",), 300.0, ray_cluster._missing_on_node, {str(elsewhere): None}, __version__)
    assert f"does not see {elsewhere}" in refused.value.facts
    assert "mount one file system on every node" in refused.value.hint

    def waits_long() -> str:
        time.sleep(60.0)
        return ""

    with pytest.raises(ConfigError, match="1 of 1 nodes cannot take part") as late:
        ray_cluster._check_nodes(("worker",), 0.1, waits_long)
    assert "did not answer within 0.1 s" in late.value.facts
    assert "free processors of the nodes" in late.value.hint, "its file system is not why"


async def _never_waits(why: str) -> None:
    raise AssertionError(why)
