"""Agent programs on the worker's host. A launcher process starts them, and kills them with all their child
processes."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from etude.environments.child_process import end_killed
from etude.environments.output import OutputBuffer
from etude.errors import ConfigError, EtudeError, MachineError

T = TypeVar("T")
START_S = 120.0
"""Seconds in which the launcher must have imported the modules of programs."""
END_S = 30.0
"""Seconds in which a killed program, and all that it started, must have ended."""
LOST = 137
"""The exit code of a program whose supervisor was killed."""


@functools.lru_cache(maxsize=8)
def launcher_of(python: str, modules: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> Launcher:
    """Return this process's launcher for programs of the interpreter `python` that need `modules` imported.

    `env`: environment variables to set, besides those of this process, when the modules are imported."""
    return Launcher(python, modules, dict(env))


class Launcher:
    """A process that starts programs. It is itself started with the first program. `launcher_of` makes one.

    It ends when this process ends. If it has died, it is started again."""

    def __init__(self, python: str, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._env = env
        self._command = [python, str(Path(__file__).with_name("launcher.py"))]
        self._modules = tuple(modules)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="launcher")  # starting it may take long
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self.notes = ""  # what is unsafe about the imported modules

    async def start(self) -> None:
        """Start the launcher process, unless it runs, and wait until it has imported its modules.

        Raises `ConfigError` if a module cannot be imported, and `MachineError` if the launcher does not start."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._send, [])

    async def launch(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, fork: bool, log_bytes: int
    ) -> Program:
        """Start a program in the folder `cwd` with the environment `env`.

        With `fork` it runs in a fork of the launcher's interpreter, and ``argv[0]`` is ignored. Its output is kept up
        to `log_bytes`. Raises the errors of `start`."""
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            sending = asyncio.get_running_loop().run_in_executor(self._thread, self._send, [theirs.fileno(), writing])
            await uncancelled(sending)  # the descriptors must stay open until they are sent
        except BaseException:
            ours.close()
            os.close(reading)
            raise
        finally:
            theirs.close()
            os.close(writing)
        program = Program(ours, reading, log_bytes)
        order = {"argv": [*argv], "env": dict(env), "cwd": str(cwd), "fork": fork}
        try:
            await asyncio.get_running_loop().sock_sendall(ours, json.dumps(order).encode() + b"\n")
        except OSError:
            pass  # `Program.wait` says that it is lost
        except BaseException:
            await program.close()
            raise
        return program

    def _send(self, fds: list[int]) -> None:
        """Send descriptors to the launcher, which is started if it does not run. Called in its thread only."""
        for _ in range(2):
            try:
                sock = self._started()
                if fds:
                    socket.send_fds(sock, [b"x"], fds)
                return
            except (OSError, ValueError) as error:  # it has died
                self._end()
                reason = str(error)
        hint = "see standard error; there may be too little memory, or too many processes"
        raise MachineError("the launcher of agent programs does not start", reason, hint=hint)

    def _started(self) -> socket.socket:
        if self._sock is not None:
            return self._sock
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [*self._command, str(theirs.fileno()), *self._modules]
            process = self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **self._env},
            )
        self._sock = ours
        atexit.register(self._end)
        ours.settimeout(START_S)
        if not (data := ours.recv(4096)) and self._modules:
            self._end()
            if (code := process.returncode) >= 0:  # not killed, as for too little memory
                raise ConfigError(
                    "harness.program.warm needs a Python interpreter as the first word of harness.program.argv",
                    f"{self._command[0]} ended with exit code {code} before it had imported {self._modules[0]}",
                    hint='write "{python}" there for the interpreter of etude, or leave warm out',
                )
        report = json.loads(data)
        if "error" in report:
            self._end()
            facts = f"{self._command[0]} cannot import {', '.join(self._modules)}: {report['error']}"
            raise ConfigError(
                "the modules of harness.program.warm cannot be imported",
                facts,
                hint="install the modules for this interpreter, or leave them out",
            )
        if report.get("threads"):
            self.notes = f"the warm modules started {report['threads']} threads, which forked programs do not have"
        return ours

    def _end(self) -> None:
        """End the launcher process. Raises `MachineError` if it has not ended within `END_S` seconds."""
        atexit.unregister(self._end)
        sock, process = self._sock, self._process
        self._sock = self._process = None  # a process that does not end is not waited for again
        if sock is not None and process is not None:
            sock.close()
            end_killed(process, deadline_s=END_S)


class Program:
    """A running program. `Launcher.launch` starts one, and its caller must call `close`."""

    def __init__(self, stream: socket.socket, output: int, log_bytes: int) -> None:
        stream.setblocking(False)
        os.set_blocking(output, False)
        self.output = OutputBuffer(log_bytes)
        self._stream, self._pipe, self._loop = stream, output, asyncio.get_running_loop()
        self._loop.add_reader(output, self._read)
        self._ended: asyncio.Task[bytes] = asyncio.create_task(self._message(), name="end of a program")

    async def wait(self) -> int:
        """Wait until the program and all processes that it started have ended, and return its exit code.

        Has no deadline of its own. Raises `ConfigError` if the program could not be executed."""
        data = await asyncio.shield(self._ended)
        report = json.loads(data or b"{}")
        if "error" in report:
            hint = "give the path of a program of this host, or one that is on PATH"
            raise ConfigError("harness.program.argv cannot be executed", report["error"], hint=hint)
        code = int(report.get("exit", LOST))
        return code if code >= 0 else 128 - code

    async def close(self) -> None:
        """Kill the program and all processes that it started, and wait for their end. Idempotent.

        Raises `MachineError` if they have not ended within `END_S` seconds."""
        try:
            with contextlib.suppress(OSError):
                self._stream.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(END_S):
                with contextlib.suppress(EtudeError):
                    await asyncio.shield(self._ended)
        except TimeoutError:
            facts = f"{END_S:g} s after SIGKILL it still runs"
            raise MachineError(
                "an agent program does not end",
                facts,
                hint="see the kernel log (dmesg): the program probably hangs in the kernel",
            ) from None
        finally:
            self._ended.cancel()
            self._read(until_empty=True)
            if self._pipe >= 0:
                self._close_pipe()
            self._stream.close()

    async def _message(self) -> bytes:
        data = bytearray()
        with contextlib.suppress(OSError):
            while part := await self._loop.sock_recv(self._stream, 4096):
                data += part
        return bytes(data)

    def _read(self, *, until_empty: bool = False) -> None:
        while self._pipe >= 0:
            try:
                data = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._close_pipe()
            self.output.add(data)
            if not until_empty:
                return

    def _close_pipe(self) -> None:
        self._loop.remove_reader(self._pipe)
        os.close(self._pipe)
        self._pipe = -1


async def uncancelled(work: asyncio.Future[T]) -> T:
    """Return the result of `work`. A call that is cancelled waits for its end, then raises `CancelledError`."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
