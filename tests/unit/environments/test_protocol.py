"""What crosses the socket: frames, and a host that survives any bytes from a machine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.environments.namespace.channel import Channel, Hangup
from etude.environments.namespace.guest import wire
from etude.environments.namespace.machine import NamespaceMachine, inside
from etude.environments.namespace.snapshots import Snapshots
from etude.errors import MachineError

FRAMES = st.tuples(st.integers(0, 255), st.lists(st.binary(max_size=30), max_size=5))


@given(FRAMES)
def test_a_frame_comes_back_as_it_was(frame):
    kind, fields = frame
    packed = wire.pack(kind, *fields)
    assert wire.HEAD.unpack_from(packed) == (len(packed) - 4,)
    assert wire.unpack(packed[4:]) == (kind, fields)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_frame_error(body):
    try:
        frame = wire.unpack(body)
    except wire.FrameError:
        return
    assert wire.pack(frame.kind, *frame.fields)[4:] == body


@given(FRAMES, st.data())
def test_a_mutated_frame_is_a_frame_or_a_frame_error(frame, data):
    body = bytearray(wire.pack(frame[0], *frame[1])[4:])
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        wire.unpack(bytes(body))
    except wire.FrameError:
        return


def answered_by(data: bytes, use: Any, *, ended: bool = True) -> Any:
    """Run `use(machine)` on a machine whose socket says `data` and then, if `ended`, hangs up."""

    async def main() -> Any:
        ours, theirs = socket.socketpair()
        killed: list[str] = []

        async def kill() -> None:
            killed.append("killed")

        machine = NamespaceMachine(
            1,
            Channel(ours),
            max_tree_bytes=1 << 16,
            keep=lambda tree: "snapshot",
            kill=kill,
            discard=lambda: None,
            launcher_failure=lambda: None,
        )
        theirs.sendall(data)
        if ended:
            theirs.shutdown(socket.SHUT_WR)
        try:
            return await use(machine), list(killed)
        finally:
            await machine.close()
            theirs.close()

    return asyncio.run(main())


HOSTILE = st.binary(max_size=80) | st.builds(
    lambda kind, fields: wire.pack(kind, *fields),
    st.sampled_from([wire.READY, wire.DONE, wire.OK, wire.REFUSED, wire.BROKEN, 0]),
    st.lists(st.binary(max_size=12), max_size=4),
)


@given(HOSTILE)
def test_a_command_on_a_hostile_machine_still_has_a_result(data):
    result, _ = answered_by(data, lambda m: m.exec(["x"], key="1", deadline_s=5, output_bytes=20))
    assert 0 <= result.exit_code <= 255
    assert len(result.output) <= 20 or result.exit_code == 126


@given(HOSTILE)
def test_files_of_a_hostile_machine_are_bytes_or_an_ordinary_error(data):
    async def use(machine):
        with contextlib.suppress(OSError, ValueError):
            assert isinstance(await machine.read("x", max_bytes=100), bytes)
        with pytest.raises((OSError, ValueError)):
            await machine.snapshot()

    answered_by(data, use)


def test_a_machine_that_hangs_up_is_killed_and_its_command_counts_as_killed():
    result, killed = answered_by(b"", lambda m: m.exec(["x"], key="1", deadline_s=5))
    assert result.exit_code == 137
    assert killed == ["killed"]


def test_a_reply_larger_than_asked_for_is_not_read_into_memory():
    async def use(machine):
        with pytest.raises(FileNotFoundError, match="4294967295 bytes where"):
            await machine.read("x")

    answered_by(b"\xff\xff\xff\xff", use, ended=False)


def test_bytes_that_nobody_asked_for_end_the_machine():
    async def use(machine):
        with pytest.raises(FileNotFoundError, match="nobody asked"):
            await machine.read("x")

    answered_by(wire.pack(wire.OK, b"a") + b"!", use)


def test_a_refusal_is_the_error_it_names():
    async def use(machine):
        with pytest.raises(IsADirectoryError):
            await machine.read("x")

    answered_by(wire.pack(wire.REFUSED, wire.ERRNO.pack(21), b"is a folder"), use)


def test_a_machine_that_says_nothing_is_given_up_at_the_deadline_by_name():
    async def main():
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        with pytest.raises(Hangup, match=r"no answer within 0\.05 s"):
            await channel.call(b"x", reply_bytes=10, deadline_s=0.05)
        channel.close()
        theirs.close()

    asyncio.run(main())


def test_a_machine_runs_a_bounded_number_of_commands(monkeypatch):
    monkeypatch.setattr("etude.environments.namespace.machine.MAX_COMMANDS", 1)

    async def use(machine):
        await machine.exec(["x"], key="1", deadline_s=1)
        await machine.exec(["x"], key="1", deadline_s=1)
        with pytest.raises(MachineError, match="at most 1 commands"):
            await machine.exec(["x"], key="2", deadline_s=1)

    answered_by(b"", use)


@pytest.mark.parametrize("argv", [[], ["a\0b"]])
def test_a_command_that_cannot_be_is_refused_here(argv):
    async def use(machine):
        with pytest.raises(ValueError, match="at least one word"):
            await machine.exec(argv, key="1", deadline_s=1)

    answered_by(b"", use)


def test_the_least_recently_used_snapshot_goes_first_when_there_is_no_room():
    kept = Snapshots(max_bytes=2500)
    first, second = (kept.prepare({name: bytes(1000)}) for name in "ab")
    assert kept.get(first)
    third = kept.prepare({"c": bytes(1000)})
    assert [kept.get(s) is not None for s in (first, second, third)] == [True, False, True]


@given(st.text(max_size=20))
def test_a_path_is_inside_or_refused(path):
    try:
        plain = inside(path)
    except (ValueError, UnicodeEncodeError):
        return
    assert not plain.startswith(b"/")
    assert b".." not in plain.split(b"/")
