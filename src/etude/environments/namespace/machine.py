"""`Machine` by its descriptors: commands go to the runner, files are reached through the open work folder.

Files are read and written as the machine's own user, without following a link (`guest.files`). A machine that dies
was most likely killed by what ran in it, so that is an outcome, not an error: the command counts as killed (137),
files are not found. `MachineError` is raised only on evidence that agent code cannot make: launcher or runner is gone,
a command could not be confined, or the machine was closed by its owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import PurePosixPath
from typing import TypeVar

from etude.environments.namespace.guest import files, wire
from etude.environments.namespace.guest.syscalls import acting_on_files_as
from etude.environments.namespace.guest.tools import BROKEN_EXIT, MAX_REQUEST_BYTES
from etude.environments.namespace.launcher import Ended, LauncherProcess, Made
from etude.environments.namespace.output import Output
from etude.errors import MachineError
from etude.seams import ExecResult

T = TypeVar("T")
MAX_COMMANDS = 4096  # of one machine: each keeps its result, so that a repeated key is answered from it
_SLACK_S = 5.0  # what the runner may take to end a command after its deadline, before the machine itself is killed
_LARGE_BYTES = 1 << 20  # files from here on are moved in a thread
_KILLED = 137


class NamespaceMachine:
    """A `Machine`. Requests are answered one after another; between two commands nothing runs in it."""

    def __init__(
        self,
        made: Made,
        launcher: LauncherProcess,
        *,
        owner: int | None,
        max_tree_bytes: int,
        keep: Callable[[bytes], str],
        kill: Callable[[], Awaitable[None]],
    ) -> None:
        self.number = made.number
        self._made, self._launcher, self._owner = made, launcher, owner
        self._max_tree_bytes, self._keep, self._kill = max_tree_bytes, keep, kill
        self._commands: dict[str, asyncio.Task[ExecResult]] = {}
        self._turn = asyncio.Lock()
        self._gone: str | None = None  # why it answers no more, when what ran in it is to blame
        self._closing: asyncio.Task[None] | None = None
        self._abandoned = False

    async def exec(
        self, argv: Sequence[str], *, key: str, deadline_s: float, stdin: bytes = b"", output_bytes: int = 65_536
    ) -> ExecResult:
        """See `Machine.exec`. Cancelling the caller does not stop the command: ask again with the same key."""
        command = self._commands.get(key)
        if command is None:
            self._must_be_open()
            if not argv or any("\0" in a for a in argv):
                raise ValueError("a command has at least one word and no NUL byte")
            if sum(map(len, argv)) > MAX_REQUEST_BYTES // 4 - len(argv):
                raise ValueError("the command line is too long")
            if len(self._commands) >= MAX_COMMANDS:
                raise MachineError(f"a machine runs at most {MAX_COMMANDS} commands", hint="fork another one")
            command = asyncio.create_task(self._run(list(argv), deadline_s, stdin, output_bytes))
            command.add_done_callback(_retrieve)
            self._commands[key] = command
        return await asyncio.shield(command)

    async def _run(self, argv: list[str], deadline_s: float, stdin: bytes, output_bytes: int) -> ExecResult:
        async with self._using():
            if self._gone is not None:
                return ExecResult(exit_code=_KILLED, output=b"", timed_out=False, truncated=False, wall_s=0.0)
            started = time.perf_counter()
            words = os.fsencode("\0".join(argv))
            streams, pipe = self._streams(words, stdin)
            output = Output(pipe, output_bytes)
            try:
                ended = await self._ended(self._launcher.run(self._made, streams, deadline_s), deadline_s)
                if ended.exit_code == BROKEN_EXIT:
                    _raise_if_broken(streams[0], words)
            finally:
                for fd in streams:
                    os.close(fd)
                output.close()
            return ExecResult(
                exit_code=ended.exit_code,
                output=output.value(),
                timed_out=ended.timed_out,
                truncated=output.truncated,
                wall_s=time.perf_counter() - started,
            )

    def _streams(self, words: bytes, stdin: bytes) -> tuple[list[int], int]:
        """What a command is given (its request, output and input), and the end where the output comes out."""
        fds: list[int] = []
        try:
            with acting_on_files_as(self._owner):
                fds += os.pipe2(os.O_CLOEXEC)
                fds.append(_in_memory(words))
                fds += [_in_memory(stdin)] if stdin else []
        except OSError as error:
            for fd in fds:
                os.close(fd)
            raise MachineError("a command could not be started", str(error), hint="see ulimit -n, and memory") from None
        pipe, pipe_in, request, *given = fds
        return [request, pipe_in, *given], pipe

    async def _ended(self, ended: asyncio.Future[Ended], deadline_s: float) -> Ended:
        try:
            async with asyncio.timeout(deadline_s + _SLACK_S):
                how = await ended
        except TimeoutError:
            self._gone = f"a command did not end {_SLACK_S:g} s after its deadline"
            with contextlib.suppress(MachineError):
                await self._kill()
            return Ended(_KILLED, timed_out=True, lost=True)
        if how.lost:
            self._gone = "its first process was killed"
            with contextlib.suppress(MachineError):
                await self._kill()
        return how

    async def read(self, path: str, *, max_bytes: int = 1_048_576) -> bytes:
        """See `Machine.read`. Links are not followed: `ValueError`. `FileNotFoundError` from a machine that is gone."""
        name = os.fsdecode(inside(path))
        return await self._on_files(lambda: files.read(self._made.work, name, max_bytes))

    async def write(self, path: str, data: bytes) -> None:
        """See `Machine.write`. `OSError` where the machine's disk is full or the place is taken by a folder."""
        name = os.fsdecode(inside(path))
        await self._on_files(lambda: files.write(self._made.work, name, data), num_bytes=len(data))

    async def snapshot(self) -> str:
        """See `Machine.snapshot`: the work folder, without sockets, pipes, owners and times."""
        limit = self._max_tree_bytes
        fields = await self._on_files(lambda: files.save(self._made.work, limit), num_bytes=limit)
        return self._keep(wire.pack(wire.TREE, *fields))

    async def load(self, tree: bytes) -> None:
        """Fill a new machine's work folder from a TREE frame. `OSError` for a tree that does not fit."""
        fields = wire.unpack(tree).fields
        await self._on_files(lambda: files.load(self._made.work, fields), num_bytes=len(tree))

    async def _on_files(self, work: Callable[[], T], *, num_bytes: int = 0) -> T:
        def as_owner() -> T:
            with acting_on_files_as(self._owner):
                return work()

        async with self._using():
            if self._gone is None and self._launcher.is_gone(self.number):
                self._gone = "its first process was killed"
            if self._gone is not None:
                raise FileNotFoundError(f"the machine is gone: {self._gone}")
            return as_owner() if num_bytes < _LARGE_BYTES else await asyncio.to_thread(as_owner)

    @contextlib.asynccontextmanager
    async def _using(self) -> AsyncIterator[None]:
        """Have the machine to oneself; its descriptors stay open meanwhile."""
        async with self._turn:
            self._must_be_open()
            try:
                yield
            finally:
                if self._abandoned:
                    self._made.close()

    async def close(self) -> None:
        """See `Machine.close`."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._end())
        await asyncio.shield(self._closing)

    async def _end(self) -> None:
        try:
            await self._kill()
        finally:
            async with self._turn:
                if not self._abandoned:
                    self._abandoned = True
                    self._made.close()

    def abandon(self) -> None:
        """Let go of a machine without waiting for its end. Idempotent."""
        if not self._abandoned:
            self._abandoned = True
            self._launcher.discard(self.number)
            if not self._turn.locked():
                self._made.close()

    def _must_be_open(self) -> None:
        if self._closing is not None:
            raise MachineError("the machine is closed", hint="a machine is used once: fork another one")
        failure = self._launcher.failure
        if failure is not None:
            raise MachineError("the machine's launcher is gone", failure, hint="fork again: a new one is started")
        if self._abandoned:
            raise MachineError("the machine was let go", hint="fork another one")


def _in_memory(data: bytes) -> int:
    """A file of these bytes, without a name, at its beginning."""
    fd = os.memfd_create("", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.pwrite(fd, view, len(data) - len(view)) :]
    return fd


def _raise_if_broken(request: int, words: bytes) -> None:
    found = os.pread(request, len(words) + 4096, 0)
    if found != words:
        facts = found.decode(errors="replace")
        raise MachineError("a command could not be confined", facts, hint="see MachineLimits and the host's limits")


def _retrieve(task: asyncio.Task[ExecResult]) -> None:
    if not task.cancelled():
        task.exception()  # nobody may be waiting any more; whoever asks again with the key still gets it


def inside(path: str) -> bytes:
    """A relative path in its plain form. `ValueError` for one that leaves the working directory.

    >>> inside("./a//b.py")
    b'a/b.py'
    """
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise ValueError(f"{path!r} is not a path inside the working directory")
    encoded = os.fsencode(str(pure))
    if len(encoded) > 4095 or max((len(os.fsencode(p)) for p in pure.parts), default=0) > 255:
        raise ValueError(f"a path of {len(encoded)} bytes is too long")
    return encoded
