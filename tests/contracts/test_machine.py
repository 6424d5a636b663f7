"""What every runtime and its machines promise. A new one joins with one line in RUNTIMES."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from tests.here import opened
from tests.local_agent import LocalAgents
from tests.remote_server import PlainRuntime, ServedRuntime
from tests.virtual import microvm

from etude.environments import NamespaceRuntime
from etude.environments.burst import Capacity, FleetHost, FleetRuntime
from etude.environments.gvisor import GVisorRuntime
from etude.errors import MachineError
from etude.records.command import OutputChunk, ProcessStarted
from etude.seams import Machine, Runtime
from etude.testing import MemoryRuntime


def fleet() -> Runtime:
    capacity = Capacity(cores=2, memory_bytes=1 << 30)
    return FleetRuntime({name: FleetHost(NamespaceRuntime(max_machines=20, spare=2), capacity) for name in "ab"})


RUNTIMES: dict[str, Callable[[], Runtime]] = {
    "memory": MemoryRuntime,
    "namespace": NamespaceRuntime,
    "namespace without the agent": lambda: NamespaceRuntime(with_agent=False),
    "agent": LocalAgents,
    "fleet": fleet,
    "microvm": microvm,
    "gvisor": GVisorRuntime,
    "remote": ServedRuntime,
    "remote, another's": PlainRuntime,
}
NEEDS = {name: name for name in ("memory", "agent", "microvm", "gvisor")}
"""What a runtime is made of where it is not namespaces."""
FILES = {"hi.py": b"print('hi')\n", "pkg/data.txt": b"42\n", "echo.py": b"import sys; print(sys.stdin.read())\n"}
COUNT = b"n = int(open('count').read()) + 1\nopen('count', 'w').write(str(n))\nprint(n)\n"


class Shared:
    """One runtime for all tests of a backend, since opening one costs more than most of them: each closes its own
    machines, and a test that closes the runtime takes a `fresh` one."""

    def __init__(self, name: str) -> None:
        self._name, self._runner = name, asyncio.Runner()
        self._forked: list[Machine] = []
        self._runtime: Runtime | None = None

    def __call__(self, test: Callable[[Runtime], Awaitable[Any]], *, fresh: bool = False) -> Any:
        return self._runner.run(self._test(test, fresh))

    async def _test(self, test: Callable[[Runtime], Awaitable[Any]], fresh: bool) -> Any:
        if fresh:
            runtime = self._opened()
            try:
                return await test(runtime)
            finally:
                await runtime.close()
        if self._runtime is None:
            self._runtime = self._opened()
        fork = self._runtime.fork

        async def forked(*arguments: Any, **options: Any) -> list[Machine]:
            machines = await fork(*arguments, **options)
            self._forked += machines
            return machines

        self._runtime.fork = forked  # type: ignore[method-assign]
        try:
            return await test(self._runtime)
        finally:
            self._runtime.fork = fork  # type: ignore[method-assign]
            await asyncio.gather(*(machine.close() for machine in self._forked))
            self._forked.clear()

    def _opened(self) -> Runtime:
        return opened(NEEDS.get(self._name, "namespace"), RUNTIMES[self._name])

    def close(self) -> None:
        with self._runner as runner:
            if self._runtime is not None:
                runner.run(self._runtime.close())


@pytest.fixture(params=RUNTIMES, scope="module")
def using(request: pytest.FixtureRequest) -> Iterator[Shared]:
    shared = Shared(request.param)
    yield shared
    shared.close()


@pytest.fixture
def using_processes(using: Shared, request: pytest.FixtureRequest) -> Shared:
    if request.node.callspec.params["using"] == "memory":
        pytest.skip("nothing runs beside it")
    return using


async def one(runtime: Runtime, files: dict[str, bytes]) -> Machine:
    [machine] = await runtime.fork(await runtime.prepare(files), 1, deadline_s=300.0)
    return machine


def test_it_is_a_runtime_and_forks_machines(using):
    async def test(runtime):
        assert isinstance(runtime, Runtime)
        assert isinstance(await one(runtime, FILES), Machine)

    using(test)


def test_the_same_files_make_the_same_snapshot_and_others_another(using):
    async def test(runtime):
        first = await runtime.prepare(FILES)
        assert first == await runtime.prepare(dict(reversed(FILES.items())))
        assert first != await runtime.prepare({**FILES, "hi.py": b"print('ho')\n"})

    using(test)


def test_a_script_of_the_snapshot_runs_and_its_output_and_exit_code_come_back(using):
    async def test(runtime):
        machine = await one(runtime, {**FILES, "bad.py": b"import sys\nprint('no')\nsys.exit(3)\n"})
        good = await machine.exec(["python", "hi.py"], key="1", deadline_s=120)
        bad = await machine.exec(["python", "bad.py"], key="2", deadline_s=120)
        assert (good.exit_code, good.output, good.timed_out, good.truncated) == (0, b"hi\n", False, False)
        assert (bad.exit_code, bad.output) == (3, b"no\n")

    using(test)


def test_stdin_reaches_the_command(using):
    async def test(runtime):
        machine = await one(runtime, FILES)
        result = await machine.exec(["python", "echo.py"], key="1", deadline_s=120, stdin=b"over here")
        assert result.output == b"over here\n"

    using(test)


def test_an_exception_is_a_traceback_and_exit_code_one(using):
    async def test(runtime):
        machine = await one(runtime, {"boom.py": b"raise ValueError('boom')\n"})
        result = await machine.exec(["python", "boom.py"], key="1", deadline_s=120)
        assert result.exit_code == 1
        assert b"ValueError: boom" in result.output

    using(test)


def test_a_repeated_key_is_answered_from_the_record_and_never_runs_twice(using):
    async def test(runtime):
        machine = await one(runtime, {"count.py": COUNT, "count": b"0"})
        first = await machine.exec(["python", "count.py"], key="same", deadline_s=120)
        again = await machine.exec(["python", "count.py"], key="same", deadline_s=120)
        other = await machine.exec(["python", "count.py"], key="other", deadline_s=120)
        assert (first.output, again, other.output) == (b"1\n", first, b"2\n")

    using(test)


def test_output_is_capped_and_says_so(using):
    async def test(runtime):
        machine = await one(runtime, {"much.py": b"print('x' * 100_000)\n"})
        result = await machine.exec(["python", "much.py"], key="1", deadline_s=120, output_bytes=1000)
        assert result.truncated
        assert len(result.output) <= 1000

    using(test)


def test_a_written_file_is_read_back_and_seen_by_commands(using):
    async def test(runtime):
        machine = await one(runtime, FILES)
        await machine.write("hi.py", b"print('changed')\n")
        await machine.write("new/deep/er.txt", b"\0\xff")
        assert await machine.read("new/deep/er.txt") == b"\0\xff"
        assert await machine.read("pkg/data.txt") == b"42\n"
        assert (await machine.exec(["python", "hi.py"], key="1", deadline_s=120)).output == b"changed\n"

    using(test)


def test_no_machines_and_a_bound_below_nothing_are_refused_with_the_reason(using):
    async def test(runtime):
        machine = await one(runtime, FILES)
        for n in (0, -1):
            with pytest.raises(ValueError, match="from 1 on"):
                await runtime.fork(await runtime.prepare(FILES), n)
        with pytest.raises(ValueError, match="max_bytes"):
            await machine.read("hi.py", max_bytes=-5)

    using(test)


def test_reading_what_is_not_a_file_says_what_is_wrong(using):
    async def test(runtime):
        machine = await one(runtime, FILES)
        with pytest.raises(FileNotFoundError):
            await machine.read("absent.txt")
        with pytest.raises(IsADirectoryError):
            await machine.read("pkg")
        with pytest.raises(ValueError, match="larger"):
            await machine.read("hi.py", max_bytes=3)

    using(test)


def test_a_path_that_leaves_the_working_directory_is_refused(using):
    async def test(runtime):
        machine = await one(runtime, FILES)
        for path in ("../x", "/etc/passwd", "a/../../x", "a\0b"):
            with pytest.raises(ValueError):  # noqa: PT011 - the kind is the promise
                await machine.read(path)
            with pytest.raises(ValueError):  # noqa: PT011
                await machine.write(path, b"x")

    using(test)


def test_siblings_share_nothing(using):
    async def test(runtime):
        left, right = await runtime.fork(await runtime.prepare(FILES), 2, deadline_s=300.0)
        await left.write("hi.py", b"print('left')\n")
        assert await right.read("hi.py") == FILES["hi.py"]

    using(test)


def test_a_snapshot_of_a_used_machine_forks_its_state_and_the_machine_goes_on(using):
    async def test(runtime):
        machine = await one(runtime, {"count.py": COUNT, "count": b"0"})
        await machine.exec(["python", "count.py"], key="1", deadline_s=120)
        [child] = await runtime.fork(await machine.snapshot(), 1, deadline_s=300.0)
        await machine.exec(["python", "count.py"], key="2", deadline_s=120)
        assert (await child.read("count"), await machine.read("count")) == (b"1", b"2")

    using(test)


def test_a_machine_without_files_is_empty_but_works(using):
    async def test(runtime):
        machine = await one(runtime, {})
        await machine.write("hi.py", FILES["hi.py"])
        assert (await machine.exec(["python", "hi.py"], key="1", deadline_s=120)).output == b"hi\n"

    using(test)


def test_a_missing_command_is_a_result_not_an_error(using):
    async def test(runtime):
        machine = await one(runtime, FILES)
        assert (await machine.exec(["no-such-program"], key="1", deadline_s=120)).exit_code == 127

    using(test)


def test_a_closed_machine_refuses_and_closing_again_does_nothing(using):
    async def test(runtime):
        machine = await one(runtime, FILES)
        await machine.close()
        await machine.close()
        with pytest.raises(MachineError):
            await machine.read("hi.py")
        with pytest.raises(MachineError):
            await machine.exec(["python", "hi.py"], key="1", deadline_s=120)

    using(test)


def test_an_unknown_snapshot_is_refused(using):
    async def test(runtime):
        with pytest.raises(MachineError):
            await runtime.fork("0" * 64, 1)

    using(test)


def test_closing_the_runtime_ends_its_machines_and_closing_again_does_nothing(using):
    async def test(runtime):
        machine = await one(runtime, FILES)
        await runtime.close()
        await runtime.close()
        with pytest.raises(MachineError):
            await machine.exec(["python", "hi.py"], key="1", deadline_s=120)

    using(test, fresh=True)


def test_a_frozen_machine_can_be_read_and_forked_but_runs_nothing(using):
    async def test(runtime):
        machine = await one(runtime, FILES)
        await machine.write("made.txt", b"here")
        await machine.freeze()
        await machine.freeze()
        assert await machine.read("made.txt") == b"here"
        with pytest.raises(MachineError):
            await machine.exec(["python", "hi.py"], key="1", deadline_s=120)
        [child] = await runtime.fork(await machine.snapshot(), 1, deadline_s=300.0)
        assert (await child.exec(["python", "hi.py"], key="1", deadline_s=120)).output == b"hi\n"

    using(test)


async def shell(machine: Machine, script: str, key: str, **options: Any) -> Any:
    return await machine.exec(["sh", "-c", script], key=key, **{"deadline_s": 120.0, **options})


def test_a_file_that_the_machines_user_shut_is_read_or_refused_as_a_file(using_processes):
    async def test(runtime):
        machine = await one(runtime, FILES)
        await shell(machine, "chmod 000 hi.py", "shut")
        with contextlib.suppress(PermissionError):
            assert await machine.read("hi.py") == FILES["hi.py"]

    using_processes(test)


def test_working_directory_environment_and_user_are_the_commands_own(using_processes):
    async def test(runtime):
        machine = await one(runtime, FILES)
        for argv in (
            ["sh", "-c", "pwd; echo $WORD"],
            ["python", "-c", "import os; print(os.getcwd(), os.environ['WORD'])"],
        ):
            result = await machine.exec(argv, key=argv[0], deadline_s=120, cwd="pkg", env={"WORD": "grüße"})
            where, word = result.output.decode().split()
            assert (where.endswith("/pkg"), word) == (True, "grüße"), result
        assert (await shell(machine, "pwd", "tmp", cwd="/tmp")).output == b"/tmp\n"
        for user in runtime.info.users:
            who = await shell(machine, "id -un", user, user=user)
            assert (who.exit_code, who.output) == (0, f"{user}\n".encode()), who
        with pytest.raises(ValueError, match="nobody-here"):
            await shell(machine, "true", "who", user="nobody-here")
        absent = await shell(machine, "true", "where", cwd="no/such/folder")
        assert (absent.exit_code, b"no/such/folder" in absent.output) == (126, True)

    using_processes(test)


def test_output_is_told_as_it_comes_and_by_stream(using_processes):
    async def test(runtime):
        machine = await one(runtime, FILES)
        told: list[ProcessStarted | OutputChunk] = []
        release = asyncio.Event()

        async def given():
            await asyncio.wait_for(release.wait(), 120)
            yield b"go\n"

        def tell(event):
            told.append(event)
            if isinstance(event, OutputChunk) and b"first" in event.data:
                release.set()  # what comes next was not asked for before this had come

        result = await shell(machine, "echo first; read word; echo $word >&2", "1", stdin=given(), on_output=tell)
        assert isinstance(told[0], ProcessStarted)
        assert told[0].pid > 1
        by_stream = {1: b"", 2: b""}
        for event in told[1:]:
            by_stream[event.stream] += event.data
        assert (by_stream, result.output) == ({1: b"first\n", 2: b"go\n"}, b"first\ngo\n")

    using_processes(test)


def test_commands_run_beside_each_other(using_processes):
    async def test(runtime):
        machine = await one(runtime, FILES)
        assert (await shell(machine, "mkfifo meet", "0")).exit_code == 0
        writer, reader = shell(machine, "echo hello > meet", "1"), shell(machine, "cat meet", "2")
        results = await asyncio.gather(writer, reader)  # each needs the other
        assert [r.output for r in results] == [b"", b"hello\n"]

    using_processes(test)


def test_what_a_command_leaves_in_the_background_lives_on_and_a_deadline_ends_all_that_it_started(using_processes):
    async def test(runtime):
        machine = await one(runtime, FILES)
        left = await shell(machine, "sleep 1000 & echo $! > pid", "1")
        assert left.exit_code == 0
        asked_s = time.perf_counter()
        assert (await shell(machine, "kill -0 $(cat pid)", "2")).exit_code == 0
        enough_s = 0.3 + 20 * (time.perf_counter() - asked_s)  # for some commands more, on this machine
        hidden = (
            "setsid sh -c '(sleep 1001 & echo $! > hidden; exec sleep 1002) & ' & while ! test -s hidden; do :; done"
        )
        late = await shell(machine, f"{hidden}; exec sleep 1003", "3", deadline_s=enough_s)
        assert (late.timed_out, late.exit_code) == (True, 137)
        after = await shell(
            machine, "kill -0 $(cat hidden) 2>/dev/null && echo hidden; kill -0 $(cat pid) && echo left", "4"
        )
        assert after.output == b"left\n"

    using_processes(test)


def test_a_command_that_closes_nothing_and_ends_is_not_waited_for(using_processes):
    async def test(runtime):
        machine = await one(runtime, FILES)
        result = await shell(machine, "sleep 1000 & echo over", "1", deadline_s=120.0)
        assert (result.output, result.timed_out) == (b"over\n", False)

    using_processes(test)


def test_large_files_come_back_whole(using_processes):
    async def test(runtime):
        machine = await one(runtime, FILES)
        data = bytes(range(256)) * 12_289
        await machine.write("deep/large.bin", data)
        assert await machine.read("deep/large.bin", max_bytes=len(data)) == data
        counted = await shell(machine, "wc -c < deep/large.bin", "1")
        assert int(counted.output) == len(data)

    using_processes(test)


def test_a_link_is_not_followed_when_a_file_is_read(using_processes):
    async def test(runtime):
        machine = await one(runtime, FILES)
        await shell(machine, "ln -s hi.py link; ln -s /etc out; mkfifo pipe", "1")
        for path in ("link", "out/passwd", "pipe"):
            with pytest.raises(ValueError):  # noqa: PT011 - the kind is the promise
                await machine.read(path)

    using_processes(test)


def test_kept_environment_files_modes_and_links_are_in_a_snapshot(using_processes):
    async def test(runtime):
        machine = await one(runtime, FILES)
        await shell(machine, "chmod +x hi.py; ln -s hi.py link; mkdir empty", "1")
        [child] = await runtime.fork(await machine.snapshot(), 1, deadline_s=300.0)
        assert (await shell(child, "test -x hi.py && readlink link && test -d empty", "1")).output == b"hi.py\n"

    using_processes(test)
