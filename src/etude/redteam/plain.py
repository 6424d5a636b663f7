"""Machines without isolation: folders and processes on this host.

They are the control of the cheat suite: cheats succeed here that isolated machines resist, which shows that the cheats
work. They are also the reference for products that run tools as plain processes. Never run an agent on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Unpack

from etude.environments.command_registry import CommandRegistry
from etude.errors import MachineError
from etude.records.command import Command, ExecOptions, ExecResult, OutputCallback, OutputChunk
from etude.records.image import Image
from etude.seams import Machine, RuntimeInfo


class PlainMachine:
    """A folder of this host with the methods of `Machine`, without isolation. `PlainRuntime.fork` makes it."""

    def __init__(self, folder: Path, runtime: PlainRuntime) -> None:
        self._folder, self._runtime, self._groups = folder, runtime, list[int]()
        self._commands = CommandRegistry()

    async def exec(
        self, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        return await self._commands.run_once(self._run, argv, key=key, deadline_s=deadline_s, **options)

    async def _run(self, command: Command) -> ExecResult:
        stdin, (program, *rest) = command.stdin, command.argv
        if not isinstance(stdin, bytes):
            stdin = b"".join([part async for part in stdin])
        began = time.perf_counter()
        args = [sys.executable if os.path.basename(program) in ("python", "python3") else program, *rest]
        process = await asyncio.create_subprocess_exec(
            *args,
            cwd=self._folder / command.cwd,
            env={**os.environ, **command.env},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._groups.append(process.pid)
        output, timed_out = await self._until(process, stdin, command.deadline_s, command.on_output)
        code = process.returncode or 0
        return ExecResult(
            exit_code=code if code >= 0 else 128 - code,
            output=output[: command.output_bytes],
            timed_out=timed_out,
            truncated=len(output) > command.output_bytes,
            wall_s=time.perf_counter() - began,
        )

    async def _until(
        self, process: asyncio.subprocess.Process, stdin: bytes, deadline_s: float, on_output: OutputCallback | None
    ) -> tuple[bytes, bool]:
        assert process.stdin is not None
        assert process.stdout is not None
        output, timed_out = bytearray(), False
        with contextlib.suppress(OSError):
            process.stdin.write(stdin)
            process.stdin.close()
        try:
            async with asyncio.timeout(deadline_s):
                while data := await process.stdout.read(65_536):
                    output += data
                    if on_output is not None:
                        on_output(OutputChunk(1, data))
                await process.wait()
        except TimeoutError:
            timed_out = True
            self._end(process.pid)
            await process.wait()
        return bytes(output), timed_out

    def _end(self, group: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    async def read(self, path: str, *, max_bytes: int = 1_048_576) -> bytes:
        return (self._folder / path).read_bytes()[:max_bytes]

    async def write(self, path: str, data: bytes) -> None:
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    async def freeze(self) -> None:
        """Do nothing: processes continue to run."""

    async def snapshot(self) -> str:
        files = {str(p.relative_to(self._folder)): p.read_bytes() for p in self._folder.rglob("*") if p.is_file()}
        return await self._runtime.prepare(files)

    async def close(self) -> None:
        """Kill all processes of the machine and delete its files."""
        for group in self._groups:
            self._end(group)
        shutil.rmtree(self._folder, ignore_errors=True)


class PlainRuntime:
    """A `Runtime` whose machines are folders of this host, without isolation."""

    info = RuntimeInfo(name="plain", isolation="none", users=(), notes=("nothing is isolated",))

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="etude-plain-")
        self._trees: dict[str, dict[str, bytes]] = {}
        self._machines: list[PlainMachine] = []

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        """Keep the files for `fork`, and return the id of the snapshot. Raises `MachineError` if an image is given."""
        if image is not None:
            raise MachineError("plain machines have the root filesystem of the host", hint="use a runtime with images")
        digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
        self._trees[digest] = dict(files)
        return digest

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        machines = []
        for _ in range(n):
            folder = Path(self._folder.name) / str(len(self._machines))
            folder.mkdir()
            machine = PlainMachine(folder, self)
            self._machines.append(machine)
            for path, data in self._trees[snapshot].items():
                await machine.write(path, data)
            machines.append(machine)
        return list(machines)

    async def close(self) -> None:
        """Kill all processes of all machines and delete their files."""
        for machine in self._machines:
            await machine.close()
        self._folder.cleanup()
