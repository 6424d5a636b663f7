"""Remote machines with faults: broken connections, lost responses, killed servers and clients."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.here import opened

from etude.environments import NamespaceRuntime
from etude.environments.remote import ClientConfig, Keyring, Quota, RemoteRuntime, create_app, serving
from etude.environments.remote.sandboxes import SandboxManager
from etude.errors import MachineError
from etude.records.command import OutputChunk

KEY = "e2b_" + "0123456789" * 4
CLIENT = """
import asyncio, sys
from etude.environments.remote import ClientConfig, RemoteRuntime
async def main():
    runtime = RemoteRuntime(sys.argv[1], key=sys.argv[2], config=ClientConfig(lease_s=2))
    [machine] = await runtime.fork(await runtime.prepare({}), 1)
    print(machine.id, flush=True)
    command = ["sh", "-c", f"echo up; sleep {sys.argv[3]}; :"]
    await machine.exec(command, key="1", deadline_s=600, on_output=lambda event: print(event, flush=True))
asyncio.run(main())
"""


class Relay:
    """A TCP relay to a server that can cut connections and lose responses."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self._writers: set[asyncio.StreamWriter] = set()
        self.lose = 0  # so many answers from now on
        self.connected = asyncio.Event()  # somebody listens to a process again

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self._server.close()
        self.cut()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, back}
        asked = bytearray()
        await asyncio.gather(self._ask(reader, back, asked), self._answer(there, writer, asked))
        self._writers -= {writer, back}

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                asked[:] = data[:100]
                writer.write(data)
                await writer.drain()
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.lose > 0:
                    self.lose -= 1
                    break
                writer.write(data)
                await writer.drain()
                if b"process.Process/Connect" in asked:
                    self.connected.set()
            writer.close()


@contextlib.asynccontextmanager
async def relayed(*, plain: bool) -> AsyncIterator[tuple[RemoteRuntime, Relay, SandboxManager]]:
    """A runtime whose server is behind a relay. `plain`: a server without etude's extensions."""
    behind = opened("namespace", NamespaceRuntime)
    app = create_app(behind, Keyring({"tests": Quota(key=KEY)}))
    if plain:
        app.router.routes[:] = [r for r in app.router.routes if not getattr(r, "path", "").startswith("/etude")]
    async with serving(app) as url:
        relay = Relay(url)
        runtime = RemoteRuntime(await relay.start(), key=KEY, config=ClientConfig(workdir="/workspace"))
        try:
            yield runtime, relay, app.state.manager
        finally:
            await runtime.close()
            await relay.close()
    await behind.close()


def with_relay(test: Callable[[RemoteRuntime, Relay, SandboxManager], Awaitable[Any]], *, plain: bool = False) -> None:
    async def main() -> None:
        async with relayed(plain=plain) as parts:
            await test(*parts)

    asyncio.run(main())


SCRIPT = "echo x >> runs; echo first; read word; echo second $word; echo x >> ends"


@pytest.mark.parametrize("plain", [False, True])
def test_a_command_whose_connection_breaks_returns_its_result_and_runs_once(plain):
    async def test(runtime: RemoteRuntime, relay: Relay, boxes: SandboxManager) -> None:
        [machine] = await runtime.fork(await runtime.prepare({}), 1)
        told, cut = [], asyncio.Event()

        def tell(event: object) -> None:
            if isinstance(event, OutputChunk):
                told.append(event.data)
                if event.data == b"first\n":
                    relay.cut()
                    cut.set()

        async def given() -> AsyncIterator[bytes]:
            await asyncio.wait_for(cut.wait(), 120)
            if plain:  # what a command says before somebody listens again is lost there
                await asyncio.wait_for(relay.connected.wait(), 120)
            yield b"word\n"

        result = await machine.exec(["sh", "-c", SCRIPT], key="1", deadline_s=300, stdin=given(), on_output=tell)
        assert (result.exit_code, b"".join(told), result.output) == (0, *[b"first\nsecond word\n"] * 2)
        assert result.truncated is plain  # a stranger's may have lost some: it is said
        assert await machine.read("runs") == b"x\n"
        assert await machine.exec(["sh", "-c", SCRIPT], key="1", deadline_s=300) is result

    with_relay(test, plain=plain)


def test_standard_input_comes_whole_and_once_over_connections_that_break():
    async def test(runtime: RemoteRuntime, relay: Relay, boxes: SandboxManager) -> None:
        [machine] = await runtime.fork(await runtime.prepare({}), 1)
        pieces = [bytes([number]) * (700_000 + number) for number in range(12)]

        async def given() -> AsyncIterator[bytes]:
            for number, piece in enumerate(pieces):
                if number % 3 == 2:
                    relay.cut()
                if number % 4 == 3:
                    relay.lose = 1  # it was taken, and nobody says so
                yield piece

        result = await machine.exec(["sha256sum"], key="1", deadline_s=300, stdin=given())
        assert result.output.split()[0].decode() == hashlib.sha256(b"".join(pieces)).hexdigest()

    with_relay(test)


def test_a_command_that_ended_while_nobody_heard_is_answered_from_the_record():
    async def test(runtime: RemoteRuntime, relay: Relay, boxes: SandboxManager) -> None:
        [machine] = await runtime.fork(await runtime.prepare({}), 1)
        relay.lose = 1
        result = await machine.exec(["sh", "-c", "echo x >> runs; echo done"], key="1", deadline_s=30)
        assert (result.exit_code, result.output, await machine.read("runs")) == (0, b"done\n", b"x\n")

    with_relay(test)


def test_another_clients_command_that_ended_while_disconnected_is_an_error_and_not_run_again():
    async def test(runtime: RemoteRuntime, relay: Relay, boxes: SandboxManager) -> None:
        [machine] = await runtime.fork(await runtime.prepare({}), 1)
        relay.lose = 1
        with pytest.raises(MachineError, match="the result of command '1' is lost"):
            await machine.exec(["sh", "-c", "echo x >> runs"], key="1", deadline_s=30)
        assert await machine.read("runs") == b"x\n"

    with_relay(test, plain=True)


@pytest.mark.parametrize("plain", [False, True])
def test_a_machine_whose_answer_was_lost_is_made_once(plain):
    async def test(runtime: RemoteRuntime, relay: Relay, boxes: SandboxManager) -> None:
        snapshot = await runtime.prepare({})
        await runtime.fork(snapshot, 1)
        relay.lose = 1
        await runtime.fork(snapshot, 1)
        assert boxes.num_alive == 2

    with_relay(test, plain=plain)


def test_a_fork_of_more_machines_than_allowed_creates_none():
    async def test(runtime: RemoteRuntime, relay: Relay, boxes: SandboxManager) -> None:
        snapshot = await runtime.prepare({"a.txt": b"a"})
        with pytest.raises(MachineError, match="429"):
            await runtime.fork(snapshot, 17)
        assert boxes.num_alive == 0

    with_relay(test)


def test_a_renewed_lease_outlives_its_length_and_files_are_uploaded_once():
    async def test(runtime: RemoteRuntime, relay: Relay, boxes: SandboxManager) -> None:
        first = await runtime.prepare({"a.txt": b"a", "deep/b.txt": b"b"})
        kept = boxes.num_snapshots
        again = RemoteRuntime(runtime.url, key=KEY, config=ClientConfig(lease_s=2))
        try:
            assert await again.prepare({"deep/b.txt": b"b", "a.txt": b"a"}) == first
            assert boxes.num_snapshots == kept == 1
            [machine] = await again.fork(first, 1)
            waited = await machine.exec(["sleep", "3.0"], key="1", deadline_s=120)
            assert (waited.exit_code, await machine.read("deep/b.txt")) == (0, b"b")
        finally:
            await again.close()

    with_relay(test)


def start_server(tmp_path: Path, port: int = 0) -> tuple[subprocess.Popen[str], str]:
    """`etude machines serve` as its own process, and its URL."""
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[tests]\nkey = "{KEY}"\n')
    keys.chmod(0o600)
    command = [sys.executable, "-m", "etude.cli", "machines", "serve", "--keys", str(keys), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line:
        _, err = server.communicate()
        if "namespace" in err:
            pytest.skip(err)
        raise AssertionError(err)
    return server, line.split()[-1]


def sleepers(seconds: str) -> list[psutil.Process]:
    """The processes that sleep for so long, in all machines."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:2] == ["sh", "-c"] and seconds in process.cmdline()[2]:
                found.append(process)
    return found


def test_nothing_is_left_of_a_server_that_was_killed_and_its_machines_are_not_made_again(tmp_path):
    seconds = f"1000.{os.getpid()}1"
    server, url = start_server(tmp_path)
    again = None

    async def main() -> None:
        nonlocal again
        runtime = RemoteRuntime(url, key=KEY)
        try:
            snapshot = await runtime.prepare({"a.txt": b"a"})
            [machine] = await runtime.fork(snapshot, 1)
            began = asyncio.Event()

            def tell(event: object) -> None:
                if isinstance(event, OutputChunk):
                    began.set()

            running = asyncio.create_task(
                machine.exec(["sh", "-c", f"echo up; sleep {seconds}; :"], key="1", deadline_s=600, on_output=tell)
            )
            await asyncio.wait_for(began.wait(), 120)
            async with asyncio.timeout(60):
                while len(left := await asyncio.to_thread(sleepers, seconds)) != 1:  # noqa: ASYNC110 - other processes
                    await asyncio.sleep(0.01)  # for a moment there is the fork of it that will be its program, too
            server.kill()
            server.wait()
            again, _ = await asyncio.to_thread(start_server, tmp_path, int(url.rpartition(":")[2]))
            with pytest.raises(MachineError):
                await running
            with pytest.raises(MachineError):
                await machine.exec(["true"], key="2", deadline_s=10)
            gone, alive = await asyncio.to_thread(psutil.wait_procs, left, 120)
            assert (len(gone), alive) == (1, [])
            with pytest.raises(MachineError, match="refused a machine"):  # the new server has never seen it
                await runtime.fork(snapshot, 1)
            assert await runtime.prepare({"a.txt": b"a"}) == snapshot
            [another] = await runtime.fork(snapshot, 1)
            assert await another.read("a.txt") == b"a"
        finally:
            await runtime.close()

    try:
        asyncio.run(main())
    finally:
        for process in (server, again):
            if process is not None:
                process.kill()
                process.communicate()


def test_nothing_is_left_of_a_client_that_was_killed_once_its_lease_has_ended(tmp_path):
    seconds = f"1000.{os.getpid()}2"
    server, url = start_server(tmp_path)
    client = subprocess.Popen([sys.executable, "-c", CLIENT, url, KEY, seconds], stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline().strip()
        while "up" not in client.stdout.readline():
            pass
        left = sleepers(seconds)  # and, for a moment, the fork of it that will be its program
        assert left
        client.kill()
        _, alive = psutil.wait_procs(left, 120)
        assert alive == sleepers(seconds) == []
    finally:
        for process in (client, server):
            process.kill()
            process.communicate()


def test_a_server_that_is_told_to_end_lets_machines_finish_and_then_ends_by_itself(tmp_path):
    server, url = start_server(tmp_path)

    async def main() -> None:
        runtime = RemoteRuntime(url, key=KEY)
        try:
            [machine] = await runtime.fork(await runtime.prepare({}), 1)
            began = asyncio.Event()
            running = asyncio.create_task(
                machine.exec(["sleep", "1"], key="1", deadline_s=60, on_output=lambda _: began.set())
            )
            await asyncio.wait_for(began.wait(), 120)
            server.send_signal(signal.SIGTERM)
            assert server.stdout is not None
            while "no new machines" not in await asyncio.to_thread(server.stdout.readline):
                pass
            with pytest.raises(MachineError, match="about to end"):
                await runtime.fork(await runtime.prepare({}), 1, deadline_s=3.0)
            assert (await running).exit_code == 0
            await machine.close()
            assert await asyncio.to_thread(server.wait, 120) == 0
        finally:
            await runtime.close()

    try:
        asyncio.run(main())
    finally:
        server.kill()
        server.communicate()


def test_files_of_a_snapshot_that_the_service_dropped_are_sent_again():
    async def test(runtime: RemoteRuntime, relay: Relay, boxes: SandboxManager) -> None:
        files = {"a.txt": b"a"}
        snapshot = await runtime.prepare(files)
        behind = boxes.runtime
        assert isinstance(behind, NamespaceRuntime)
        behind._snapshots.clear()  # as if others had needed the room
        with pytest.raises(MachineError, match="no snapshot"):
            await runtime.fork(snapshot, 1)
        [machine] = await runtime.fork(await runtime.prepare(files), 1)
        assert (await machine.read("a.txt"), boxes.num_snapshots) == (b"a", 1)
        assert await runtime.prepare(files) == snapshot

    with_relay(test)
