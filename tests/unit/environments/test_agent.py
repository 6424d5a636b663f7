"""The machine agent as a real process: its responses, its limits, and how it classifies failures."""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
import socket
import struct
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.here import opened
from tests.local_agent import LocalAgent, LocalAgents, entries

from etude.environments.agent import AgentMachine, Channel, commands, program, protocol
from etude.environments.agent.channel import ChannelLost
from etude.environments.agent.protocol import Frame, Parser, ProtocolError, frame
from etude.errors import MachineError
from etude.records.command import MAX_COMMAND_BYTES, Command, OutputChunk

KINDS = [protocol.READY, protocol.STARTED, protocol.OUTPUT, protocol.ENDED, protocol.DATA, protocol.DONE, b"?"]
FRAMES = st.lists(
    st.builds(Frame, st.sampled_from(KINDS), st.integers(0, 2**32 - 1), st.binary(max_size=40)), max_size=6
)


def with_agent(test: Callable[[LocalAgent], Awaitable[Any]], *arguments: str, users: tuple[str, ...] = ()) -> Any:
    async def main() -> Any:
        runtime = opened("agent", lambda: LocalAgents(*arguments, users=users))
        try:
            await runtime.fork(await runtime.prepare({"hi.txt": b"hi\n"}), 1)
            return await test(runtime.agents[0])
        finally:
            await runtime.close()

    return asyncio.run(main())


async def shell(machine: AgentMachine, script: str, key: str = "1", **options: Any) -> Any:
    return await machine.exec(["sh", "-c", script], key=key, **{"deadline_s": 20.0, **options})


def alive(marker: str) -> list[int]:
    """Processes whose command line has this in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.01)
    assert condition(), what


@given(FRAMES, st.lists(st.integers(1, 50), max_size=20))
def test_frames_come_whole_however_they_are_cut(frames, cuts):
    data = b"".join(frame(f.kind, f.id, f.body) for f in frames)
    parser, found = Parser(), list[Frame]()
    for cut in [*cuts, len(data)]:
        piece, data = data[:cut], data[cut:]
        found += parser.feed(piece)
    found += parser.feed(data)
    assert found == frames


@given(FRAMES, st.data())
@settings(max_examples=200)
def test_damaged_frames_are_refused_or_are_others(frames, data):
    damaged = bytearray(b"".join(frame(f.kind, f.id, f.body) for f in frames) + b"\0")
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        for found in Parser().feed(bytes(damaged)):
            for read in (protocol.ended, protocol.number, protocol.refused):
                try:
                    read(found.body)
                except ProtocolError:
                    continue
    except ProtocolError:
        pass


def test_the_longest_command_fits_into_a_frame():
    command = Command.of(["a"] * ((MAX_COMMAND_BYTES - 32) // 17), key="1", deadline_s=1e300)
    with pytest.raises(ValueError, match="too long"):
        replace(command, argv=(*command.argv, "a"))
    assert len(protocol.run(1, command, 0)) <= protocol.MAX_FRAME


async def _none(*_: object) -> Any:
    return None


async def _answered_by(answer: bytes) -> tuple[Any, Any]:
    """What becomes of a command and a file when the agent's answer is this."""
    ours, theirs = os.pipe(), os.pipe()
    channel = Channel(ours[0], theirs[1])
    os.write(ours[1], frame(protocol.READY, 0, struct.pack("<I", 1)) + answer)

    async def nothing() -> Any:
        return None

    machine = AgentMachine(channel, env={}, users=["user"], snapshot=lambda _: nothing(), end=nothing, blame=lambda: "")
    command = machine.exec(["true"], key="1", deadline_s=0.1)
    try:
        return await asyncio.gather(command, machine.read("x"), return_exceptions=True)
    finally:
        await machine.close()
        os.close(ours[1])
        os.close(theirs[0])


@pytest.mark.parametrize(
    "answer",
    [
        b"\0\0\0\0",
        struct.pack("<I", 2**31) + b"x" * 20,
        b"\x05\0\0\0?\2\0\0\0" * 2,
        frame(protocol.READY, 0, struct.pack("<I", 99)),
    ],
    ids=["no length", "a huge length", "an answer of no kind", "another version"],
)
def test_an_agent_with_invalid_responses_counts_as_a_lost_machine(answer, monkeypatch):
    monkeypatch.setattr("etude.environments.agent.channel.secrets.randbelow", lambda _: 0)  # so that 2 is asked first
    command, file = asyncio.run(_answered_by(answer))
    assert command.exit_code == 137
    assert isinstance(file, FileNotFoundError)
    assert "the machine is gone: its agent sent" in str(file), "found out by what it said, not by a deadline"


@pytest.mark.parametrize("words", [b"no such user", b"becoming the command's user", b"bounding a command"])
def test_a_machine_that_refuses_what_comes_after_a_command_is_an_outcome_whoever_brought_it_about(words: bytes) -> None:
    refusal = (22).to_bytes(4, "little") + words

    async def test() -> None:
        host, guest = socket.socketpair()
        guest.setblocking(False)
        channel, loop = Channel(os.dup(host.fileno())), asyncio.get_running_loop()
        machine = AgentMachine(channel, env={}, users=["user"], snapshot=_none, end=_none, blame=lambda: "")
        parser = Parser()

        async def answered(key: str, kind: bytes, body: bytes) -> Any:
            asking = asyncio.create_task(machine.exec(["true"], key=key, deadline_s=20.0))
            [asked] = parser.feed(await loop.sock_recv(guest, 4096))
            await loop.sock_sendall(guest, frame(kind, asked.id, body))
            return await asking

        await loop.sock_sendall(guest, frame(protocol.READY, 0, struct.pack("<I", 1)))
        if words == b"bounding a command":
            with pytest.raises(MachineError, match="could not be set"):
                await answered("0", protocol.REFUSED, refusal)
        assert (await answered("1", protocol.ENDED, struct.pack("<iBQ", 0, 0, 0))).exit_code == 0
        refused = await answered("2", protocol.REFUSED, refusal)
        assert (refused.exit_code, refused.output) == (126, b"cannot start: %b\n" % words)
        await machine.close()
        host.close()
        guest.close()

    asyncio.run(test())


def test_a_response_without_a_request_closes_the_channel_and_is_named() -> None:
    async def test() -> None:
        host, guest = socket.socketpair()
        channel, loop = Channel(os.dup(host.fileno())), asyncio.get_running_loop()
        guest.setblocking(False)
        asking = asyncio.create_task(channel.request(protocol.PING, deadline_s=20.0))
        [asked] = Parser().feed(await loop.sock_recv(guest, 4096))
        await loop.sock_sendall(guest, 2 * frame(protocol.DONE, asked.id))
        assert await asking == b""
        with pytest.raises(ChannelLost, match=r"its agent sent an answer of kind .* that no request waits for"):
            await channel.request(protocol.PING, deadline_s=20.0)
        host.close()
        guest.close()

    asyncio.run(test())


def test_a_killed_agent_is_an_outcome_unless_the_host_is_to_blame():
    async def test(agent):
        sleeping = asyncio.create_task(agent.machine.exec(["sleep", "100"], key="1", deadline_s=100))
        await agent.machine.read("hi.txt")
        agent.process.kill()
        assert (await sleeping).exit_code == 137
        with pytest.raises(FileNotFoundError, match="gone"):
            await agent.machine.read("hi.txt")
        assert (await agent.machine.exec(["true"], key="2", deadline_s=20)).exit_code == 137

    async def blamed(agent):
        agent.blamed = "the house burned down"
        agent.process.kill()
        with pytest.raises(MachineError, match="burned"):
            await agent.machine.read("hi.txt")
        agent.blamed = ""

    with_agent(test)
    with_agent(blamed)


def test_an_agent_that_never_comes_up_is_the_hosts_fault():
    async def test(agent):
        pass

    with pytest.raises(ChannelLost, match="channel"):
        with_agent(test, "--no-such-option")


def test_an_agent_speaks_over_a_pair_of_pipes_as_well():
    async def main() -> None:
        command = [str(opened("agent", program)), "--stdio", "--work", "/tmp"]
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        process = subprocess.Popen(command, stdin=theirs_in, stdout=theirs_out)  # noqa: ASYNC220 - at once
        os.close(theirs_in)
        os.close(theirs_out)
        channel = Channel(ours_in, ours_out)
        await channel.ready(20)
        listing = ["sh", "-c", "cat; ls /proc/self/fd >&2"]
        result = await commands.run(channel, Command.of(listing, key="1", deadline_s=20, stdin=b"in\n"))
        assert result.output.split() == [b"in", b"0", b"1", b"2", b"3"]
        channel.close()
        assert await asyncio.to_thread(process.wait, 100) == 0

    asyncio.run(main())


def test_when_the_channel_ends_nothing_that_it_started_is_left():
    marker = f"10000{os.getpid()}"

    async def test(agent):
        script = f"setsid sh -c 'sleep {marker} & exec sleep {marker}' & sleep {marker} & echo over"
        assert (await shell(agent.machine, script)).output == b"over\n"
        await until(lambda: len(alive(marker)) >= 3, "what was left is there")

    with_agent(test)
    assert alive(marker) == []


def test_a_deadline_holds_where_the_host_has_stopped_reading():
    marker = f"20000{os.getpid()}"

    async def test(agent):
        channel = agent.channel
        flood = Command.of(["sh", "-c", f"sleep {marker} & yes"], key="1", deadline_s=1.0, output_bytes=100)
        asyncio.get_running_loop().remove_reader(channel._in)
        channel.send(protocol.run(7, flood, protocol.ALL_OUTPUT))
        await until(lambda: bool(alive(marker)), "it runs")
        await until(lambda: not alive(marker), "it was ended")
        held_kb = int(Path(f"/proc/{agent.process.pid}/status").read_text().partition("VmRSS:")[2].split()[0])
        assert held_kb < 8192  # of a flood, no more than what waits to be sent

    with_agent(test)


def test_input_that_nobody_reads_holds_nothing_up():
    async def endless():
        while True:
            yield b"x" * 100_000

    async def test(agent):
        ends = await shell(agent.machine, "exit 3", "1", stdin=endless())
        closes = await shell(agent.machine, "exec <&-; sleep 0.2", "2", stdin=endless())
        late = await shell(agent.machine, "sleep 100", "3", stdin=endless(), deadline_s=0.5)
        assert (ends.exit_code, closes.exit_code, late.timed_out) == (3, 0, True)
        assert (await shell(agent.machine, "wc -c", "4", stdin=b"x" * 1_000_000)).output.strip() == b"1000000"

    with_agent(test)


def test_a_command_whose_listener_fails_is_killed_and_the_others_go_on():
    marker = f"30000{os.getpid()}"

    def tell(event):
        if isinstance(event, OutputChunk):
            raise LookupError("not so")

    async def test(agent):
        with pytest.raises(LookupError, match="not so"):
            await shell(agent.machine, f"echo; sleep {marker}", "1", on_output=tell)
        await until(lambda: not alive(marker), "it was killed")
        assert (await shell(agent.machine, "echo on", "2")).output == b"on\n"

    with_agent(test)


def test_sending_a_file_to_an_agent_that_does_not_read_ends_at_a_deadline(monkeypatch):
    monkeypatch.setattr("etude.environments.agent.machine._FILES_S", 0.1)
    monkeypatch.setattr("etude.environments.agent.machine._BYTES_PER_S", 1 << 40)

    async def main():
        ours, theirs = os.pipe(), os.pipe()
        os.write(ours[1], frame(protocol.READY, 0, struct.pack("<I", 1)))
        channel = Channel(ours[0], theirs[1])
        await channel.ready(20)

        async def end():
            pass

        machine = AgentMachine(channel, env={}, users=("user",), snapshot=None, end=end, blame=lambda: "")
        with pytest.raises(FileNotFoundError, match="too short for its agent to take"):
            await asyncio.wait_for(machine.write("large", bytes(4 << 20)), 20)
        os.close(ours[1])
        os.close(theirs[0])

    asyncio.run(main())


def test_many_commands_at_once_are_told_apart():
    async def test(agent):
        results = await asyncio.gather(
            *(shell(agent.machine, f"echo {i}; exit {i}", str(i), stdin=b"x" * i) for i in range(100))
        )
        assert [(r.exit_code, r.output) for r in results] == [(i, b"%d\n" % i) for i in range(100)]

    with_agent(test)


def test_a_listener_that_fails_fails_its_own_command_only():
    def fail(event):
        raise RuntimeError("no ears")

    async def test(agent):
        failing, other = await asyncio.gather(
            shell(agent.machine, "echo 1", "1", on_output=fail),
            shell(agent.machine, "echo 2", "2"),
            return_exceptions=True,
        )
        assert isinstance(failing, RuntimeError)
        assert other.output == b"2\n"

    with_agent(test)


def test_of_a_flood_both_ends_come_back_and_the_middle_is_counted():
    async def test(agent):
        script = "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last"
        for key, limit in (("small", 1000), ("large", 1_000_000)):
            result = await shell(agent.machine, script, key, output_bytes=limit)
            missing = len(b"first\n\nlast\n") + 3_000_000 - limit
            assert result.truncated
            assert result.output.startswith(b"first\n")
            assert result.output.endswith(b"x\nlast\n")
            assert f"[... {missing} bytes".encode() in result.output
            assert len(result.output) <= limit

    with_agent(test)


def test_commands_have_the_streams_of_a_pipe_and_no_descriptor_beside():
    async def test(agent):
        result = await shell(
            agent.machine, "ls /proc/self/fd; echo out >/dev/stdout; echo err >/dev/stderr; cat", stdin=b"in"
        )
        assert result.output.split() == [b"0", b"1", b"2", b"3", b"out", b"err", b"in"]  # 3 is what ls lists

    with_agent(test)


def test_a_file_without_a_shebang_is_a_script_and_a_missing_interpreter_is_not_found():
    async def test(agent):
        await agent.machine.write("plain", b"echo plain $1\n")
        await agent.machine.write("bad", b"#!/no/such/thing\n")
        await shell(agent.machine, "chmod +x plain bad")
        plain = await agent.machine.exec(["./plain", "x"], key="2", deadline_s=20)
        bad = await agent.machine.exec(["./bad"], key="3", deadline_s=20)
        folder = await agent.machine.exec(["./"], key="4", deadline_s=20)
        assert (plain.output, bad.exit_code, folder.exit_code) == (b"plain x\n", 127, 126)

    with_agent(test)


def test_a_tree_comes_back_as_it_was_and_nothing_moves_while_it_is_read():
    async def test(agent):
        await shell(
            agent.machine,
            "mkdir -p d/e; echo '#!' >d/x; chmod +x d/x; ln -s ../.. d/l; mkfifo p; touch ''$'\\xff' || true",
        )
        await shell(agent.machine, "while :; do echo >> growing; done &", "2")
        await until(Path(agent.folder, "growing").exists, "it grows")
        tree = entries(await agent.machine.save(1 << 26))
        assert tree[b"d/x"] == (b"x", b"#!\n")
        assert tree[b"d/l"] == (b"l", b"../..")
        assert (tree[b"d/e"], tree[b"hi.txt"], b"p" in tree) == ((b"d", b""), (b"f", b"hi\n"), False)
        size = len(tree[b"growing"][1])
        await until(lambda: Path(agent.folder, "growing").stat().st_size > size, "it goes on")
        with pytest.raises(ValueError, match="larger than 3"):
            await agent.machine.save(3)

    with_agent(test)


@pytest.mark.parametrize("path", [b"../x", b"/x", b"a/../../x", b"l/x"])
def test_a_tree_that_leaves_its_folder_is_refused(path, tmp_path):
    async def test(agent):
        await shell(agent.machine, f"ln -s {tmp_path} l")
        tree = b"\1" + protocol.fields(path, b"f", b"data")
        with pytest.raises(OSError):  # noqa: PT011 - the kernel says which
            await agent.machine.load(tree)
        assert list(tmp_path.iterdir()) == []

    with_agent(test)


def test_a_full_disk_and_a_folder_in_the_way_are_errors_of_the_writer():
    async def test(agent):
        await shell(agent.machine, "mkdir here; ln -s hi.txt link")
        with pytest.raises(IsADirectoryError):
            await agent.machine.write("here", b"x")
        with pytest.raises(NotADirectoryError):
            await agent.machine.write("hi.txt/x", b"x")
        with pytest.raises(ValueError, match="link"):
            await agent.machine.write("link", b"x")
        with pytest.raises(OSError, match="large"):
            await agent.machine.write("big", b"x" * 3_000_000)
        assert await agent.machine.read("big") == b""  # half a file helps nobody

    soft, hard = _file_limit(1_000_000)
    try:
        with_agent(test)
    finally:
        _file_limit(soft, hard)


def _file_limit(soft: int, hard: int = -1) -> tuple[int, int]:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))
    return before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become others")
def test_users_are_those_of_the_machine_and_what_they_may_not_they_cannot():
    nobody = pwd.getpwnam("nobody")

    async def test(agent):
        status = "cat /proc/self/status; id -G"
        results = [await shell(agent.machine, status, user, user=user) for user in ("nobody", "root")]
        theirs, roots = (
            dict(line.split(":\t", 1) for line in r.output.decode().splitlines() if ":\t" in line) for r in results
        )
        assert theirs["Uid"].split() == [str(nobody.pw_uid)] * 4
        assert (theirs["Groups"].strip(), theirs["NoNewPrivs"], roots["NoNewPrivs"]) == ("", "1", "1")
        assert [int(theirs[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")] == [0] * 4
        assert theirs["CapBnd"] == roots["CapBnd"] == roots["CapEff"]
        assert int(roots["CapEff"], 16) & (1 << 21 | 1 << 19 | 1 << 16) == 0  # SYS_ADMIN, SYS_PTRACE, SYS_MODULE
        await agent.machine.write("made/here", b"x")
        assert Path(agent.folder, "made/here").stat().st_uid == nobody.pw_uid
        await shell(agent.machine, "touch secret; chmod 600 secret", "3", user="root")
        with pytest.raises(PermissionError):
            await agent.machine.read("secret")
        inside = await shell(
            agent.machine, "cat /proc/$PPID/environ /proc/$PPID/mem; ls /proc/$PPID/fd", "4", user="nobody"
        )
        assert inside.exit_code != 0
        assert inside.output.count(b"Permission denied") == 3
        numbered = await agent.machine.exec(["id", "-u"], key="5", deadline_s=20, user=str(nobody.pw_uid))
        assert int(numbered.output) == nobody.pw_uid

    with_agent(test, "--user", "nobody", users=("nobody", "root", str(nobody.pw_uid)))


def test_the_program_is_static_and_needs_nothing_of_a_machine():
    data = opened("agent", lambda: program().read_bytes())
    offset, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    kinds = {struct.unpack_from("<I", data, offset + i * size)[0] for i in range(count)}
    assert 3 not in kinds  # PT_INTERP: no loader


def test_a_message_that_an_agent_missed_is_announced_again() -> None:
    async def test() -> None:
        host, guest = socket.socketpair()
        channel, loop = Channel(os.dup(host.fileno()), nudge_s=0.03), asyncio.get_running_loop()
        guest.setblocking(False)
        asking = asyncio.create_task(channel.request(protocol.PING, deadline_s=20.0))
        parser, heard = Parser(), list[Frame]()
        while len(heard) < 2:  # it wakes at the second
            heard += parser.feed(await loop.sock_recv(guest, 4096))
        await loop.sock_sendall(guest, b"".join(frame(protocol.DONE, one.id) for one in heard))
        assert await asking == b""
        assert [one.kind for one in heard] == [protocol.PING] * len(heard)
        await asyncio.sleep(0.15)
        with pytest.raises(BlockingIOError):  # it has shown that it is awake: nothing more is sent
            guest.recv(1)
        channel.close()
        host.close()
        guest.close()

    asyncio.run(test())
