"""The protocol of host and machine: trees as frames, requests in memory, a host that outlives its machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.here import opened

from etude.environments import NamespaceRuntime
from etude.environments.agent.commands import ConfinementFailed, as_outcome
from etude.environments.namespace.guest import files, wire
from etude.environments.namespace.machine import NamespaceMachine, PipeOutput
from etude.environments.namespace.snapshots import Snapshots
from etude.environments.paths import encode_path
from etude.errors import MachineError

FRAMES = st.tuples(st.integers(0, 255), st.lists(st.binary(max_size=30), max_size=5))


@given(FRAMES)
def test_a_frame_comes_back_as_it_was(frame):
    kind, fields = frame
    assert wire.unpack(wire.pack(kind, *fields)) == (kind, fields)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_frame_error(body):
    try:
        frame = wire.unpack(body)
    except wire.FrameError:
        return
    assert wire.pack(frame.kind, *frame.fields) == body


@given(FRAMES, st.data())
def test_a_mutated_frame_is_a_frame_or_a_frame_error(frame, data):
    body = bytearray(wire.pack(frame[0], *frame[1]))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(wire.FrameError):
        wire.unpack(bytes(body))


def with_machine(test: Callable[[NamespaceMachine], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        runtime = opened("namespace", lambda: NamespaceRuntime(spare=0))
        try:
            [machine] = await runtime.fork(await runtime.prepare({}), 1)
            assert isinstance(machine, NamespaceMachine)
            return await test(machine)
        finally:
            await runtime.close()

    return asyncio.run(main())


async def begun(machine: Any, argv: list[str]) -> asyncio.Task[Any]:
    """A command that runs."""
    there = asyncio.Event()
    running = asyncio.create_task(machine.exec(argv, key="begun", deadline_s=100, on_output=lambda _: there.set()))
    await asyncio.wait_for(there.wait(), 20)
    return running


def test_a_machine_runs_a_bounded_number_of_commands(monkeypatch):
    monkeypatch.setattr("etude.environments.command_registry.MAX_COMMANDS", 1)

    async def use(machine):
        first = await machine.exec(["true"], key="1", deadline_s=20)
        assert await machine.exec(["true"], key="1", deadline_s=20) is first
        with pytest.raises(MachineError, match="at most 1 commands"):
            await machine.exec(["true"], key="2", deadline_s=20)

    with_machine(use)


@pytest.mark.parametrize("argv", [[], ["a\0b"], ["x" * (2 << 20)]])
def test_a_command_that_cannot_be_is_refused_here(argv):
    async def use(machine):
        with pytest.raises(ValueError, match=r"at least one word|too long"):
            await machine.exec(argv, key="1", deadline_s=1)

    with_machine(use)


@pytest.mark.parametrize("words", [["é", "", "\udcff", "a b\n"], ["x" * 100_000]])
def test_every_word_of_a_command_arrives_as_it_is(words):
    async def use(machine):
        code = "import os, sys; os.write(1, b'|'.join(map(os.fsencode, sys.argv[1:])))"
        return await machine.exec(["python", "-c", code, *words], key="1", deadline_s=20, output_bytes=200_000)

    assert with_machine(use).output == b"|".join(os.fsencode(w) for w in words)


def test_a_command_that_ends_with_the_code_of_a_broken_one_is_an_ordinary_result():
    async def use(machine):
        return await machine.exec(["sh", "-c", "echo out; exit 125"], key="1", deadline_s=20)

    result = with_machine(use)
    assert (result.exit_code, result.output) == (125, b"out\n")


def test_a_command_that_cannot_be_confined_is_the_hosts_fault(monkeypatch):
    async def use(machine):
        machine._handle = machine._handle._replace(slot=10_000)  # whose control groups do not exist
        if not machine._launcher.info["cgroups"]:
            pytest.skip("no control groups")
        with pytest.raises(MachineError, match="could not be set"):
            await machine.exec(["python", "-c", "pass"], key="1", deadline_s=20)

    with_machine(use)


def test_a_user_whom_a_machine_cannot_become_is_a_command_that_did_not_start():
    async def use(machine):
        if machine._agent is None:
            pytest.skip("no agent was built")
        machine._users = ("user", "4444")  # of whom the machine's user namespace does not know
        return await machine.exec(["true"], key="1", deadline_s=20, user="4444")

    result = with_machine(use)
    assert (result.exit_code, result.output) == (126, b"cannot start: becoming the command's user\n")


def test_what_an_untouched_machine_cannot_confine_is_the_hosts_fault():
    refusal = ConfinementFailed(
        "the limits of a command could not be set", "joining its control group", hint="raise the machine's limits"
    )
    with pytest.raises(MachineError, match="could not be set"):
        as_outcome(refusal, used=False)
    assert as_outcome(refusal, used=True).exit_code == 126


def test_an_agent_that_cannot_be_run_here_is_done_without_and_said_to_be(tmp_path, monkeypatch):
    other = tmp_path / "etude-agent"
    other.write_bytes(b"\x7fELF of another processor")
    other.chmod(0o755)
    monkeypatch.setattr("etude.environments.namespace.runtime.BUILT", other)

    async def main() -> None:
        runtime = opened("namespace", NamespaceRuntime)
        try:
            [machine] = await runtime.fork(await runtime.prepare({}), 1)
            assert (await machine.exec(["echo", "hi"], key="1", deadline_s=20)).output == b"hi\n"
            assert runtime.info.users == ("user",)
            assert any("agent" in note for note in runtime.info.notes)
        finally:
            await runtime.close()

    asyncio.run(main())


def test_a_command_may_reopen_its_own_output_and_input():
    async def use(machine):
        script = "echo one > /dev/stdout; echo two > /dev/stderr; cat /dev/stdin"
        return await machine.exec(["sh", "-c", script], key="1", deadline_s=20, stdin=b"three")

    assert with_machine(use).output == b"one\ntwo\nthree"


def test_files_that_the_host_writes_belong_to_the_machines_user_and_obey_its_modes():
    async def use(machine):
        await machine.write("made/here.txt", b"x")
        script = "stat -c %u made made/here.txt; echo y >> made/here.txt; chmod 0 made/here.txt"
        result = await machine.exec(["sh", "-c", script], key="1", deadline_s=20)
        assert result.output == b"1000\n1000\n"
        with pytest.raises(PermissionError):
            await machine.read("made/here.txt")
        own = Path("/proc/self/status").read_text().partition("\nUid:")[2].split()[:4]
        assert set(own) == {str(os.geteuid())}  # this process acts as itself again

    with_machine(use)


def test_a_large_file_and_a_small_one_come_back_as_they_were():
    async def use(machine):
        for name, data in (("large", os.urandom(3 << 20)), ("small", b"s")):
            await machine.write(name, data)
            assert await machine.read(name, max_bytes=4 << 20) == data

    with_machine(use)


def test_a_machine_that_is_let_go_in_the_middle_of_a_command_gives_its_descriptors_back():
    async def main():
        runtime = opened("namespace", lambda: NamespaceRuntime(spare=0))
        before = set(os.listdir("/proc/self/fd"))
        [machine] = await runtime.fork(await runtime.prepare({}), 1)
        running = await begun(machine, ["sleep", "100"])
        machine.abandon()
        machine.abandon()
        assert (await running).exit_code == 137
        assert set(os.listdir("/proc/self/fd")) == before
        await runtime.close()

    asyncio.run(main())


def test_output_after_the_end_of_its_writers_is_taken_whole():
    async def main():
        pipe, writer = os.pipe()
        output = PipeOutput([pipe], 100_000)
        os.write(writer, b"x" * 4000)
        os.close(writer)
        assert not output.end()
        assert output.value() == b"x" * 4000

    asyncio.run(main())


def test_the_least_recently_used_snapshot_goes_first_when_there_is_no_room():
    kept = Snapshots(max_bytes=2500)
    first, second = (kept.prepare({name: bytes(1000)}) for name in "ab")
    assert kept.get(first)
    third = kept.prepare({"c": bytes(1000)})
    assert [kept.get(s) is not None for s in (first, second, third)] == [True, False, True]


def test_a_snapshot_is_a_tree_that_can_be_loaded(tmp_path):
    kept = Snapshots(max_bytes=1 << 20)
    tree = kept.get(kept.prepare({"a/b.py": b"x = 1"}))
    assert tree is not None
    root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    files.load(root, wire.unpack(tree).fields)
    os.close(root)
    assert (tmp_path / "a/b.py").read_bytes() == b"x = 1"


@given(st.text(max_size=20))
def test_an_encoded_path_is_relative_without_dots_or_refused(path):
    try:
        plain = encode_path(path)
    except (ValueError, UnicodeEncodeError):
        return
    assert not plain.startswith(b"/")
    assert b".." not in plain.split(b"/")
