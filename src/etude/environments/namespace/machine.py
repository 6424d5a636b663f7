"""`NamespaceMachine`: a machine made of namespaces, used through open file descriptors.

The machine's agent runs the commands; the host accesses files through the open work folder. The runner process executes
Python commands, by forking a started interpreter, and all commands where no agent was built.

Files are accessed as the machine's own user, and links are not followed (`guest.files`). A machine that dies was most
likely killed by its own programs. That is an outcome, not an error: the command counts as killed (exit code 137), and
files are not found. `MachineError` is raised only on evidence that programs in the machine cannot produce: launcher or
runner has ended, the first command could not be confined, or the owner closed the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

import msgspec

from etude.environments.agent import commands as agents
from etude.environments.agent.channel import Channel, ChannelLost
from etude.environments.command_registry import CommandRegistry, cancel_and_wait
from etude.environments.fair_time import MAX_EXTENSION, FairClock, cgroup_usage, wait_until_deadline
from etude.environments.namespace.guest import files, python, wire
from etude.environments.namespace.guest.packets import CONTINUE_ALL, END_ALL, INPUT_GIVEN, SEPARATE_STDERR, STOP_ALL
from etude.environments.namespace.guest.syscalls import acting_on_files_as
from etude.environments.namespace.guest.tools import BROKEN_EXIT, ENVIRONMENT, request
from etude.environments.namespace.launcher import CommandEnd, LauncherProcess, MachineHandle
from etude.environments.network.loopback import listen_on_loopback
from etude.environments.output import OutputBuffer
from etude.environments.paths import encode_path
from etude.errors import MachineError
from etude.records.command import Command, ExecOptions, ExecResult, OutputCallback, OutputChunk, check_max_bytes

T = TypeVar("T")
_SLACK_S = 5.0  # for the runner to end a command after its deadline; then the machine is killed
_LARGE_BYTES = 1 << 20  # larger files are accessed in a thread
_SIGNAL_S = 10.0  # for stopping or ending all processes
_KILLED = ExecResult(exit_code=137, output=b"", timed_out=False, truncated=False, wall_s=0.0)
_PIPE_BYTES = 4096  # the smallest capacity of a pipe
USERS = ("user",)
WITH_ROOT = (*USERS, "root")  # with an agent, and with host ids for both
_ENVIRONMENT = {  # without the variables that the agent sets per user
    name: value for name, value in ENVIRONMENT.items() if name not in ("HOME", "PWD", "USER")
}


class NamespaceMachine:
    """A `Machine` made of namespaces. `NamespaceRuntime` creates it.

    - `handle`: the machine that `launcher` has created
    - `owner`: host id of its user, for file accesses; None: that of this process
    - `max_tree_bytes`: the most content of its files in a snapshot
    - `keep`: stores a snapshot's bytes and returns the snapshot's id
    - `kill`: kills the machine and waits for its end
    - `users`: names of the users that commands can run as, the default first
    - `cores`: how many cores it may use
    """

    def __init__(
        self,
        handle: MachineHandle,
        launcher: LauncherProcess,
        *,
        owner: int | None,
        max_tree_bytes: int,
        keep: Callable[[bytes], str],
        kill: Callable[[], Awaitable[None]],
        users: Sequence[str] = USERS,
        cores: float = 1.0,
    ) -> None:
        self.number = handle.number
        self._handle, self._launcher, self._owner = handle, launcher, owner
        self._max_tree_bytes, self._keep, self._kill = max_tree_bytes, keep, kill
        self._users, self._environment, self._cores = users, _ENVIRONMENT, cores
        self._agent = Channel(handle.agent) if handle.agent >= 0 else None
        self._commands = CommandRegistry()
        self._leftover_outputs: list[PipeOutput] = []  # pipes that background processes can still write to
        self._used = False  # whether a command may have changed the machine
        self._num_users = 0  # operations that use the machine's descriptors
        self._gone: str | None = None  # why the machine is gone, if its own programs are to blame
        self._frozen: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._abandoned = self._descriptors_closed = False

    async def exec(
        self, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        return await self._commands.run_once(self._begin, argv, key=key, deadline_s=deadline_s, **options)

    def _begin(self, command: Command) -> Coroutine[Any, Any, ExecResult]:
        self._require_open()
        if self._frozen is not None:
            facts = "its processes were stopped, so no command can run"
            raise MachineError(
                "the machine is frozen", facts, hint="read its files, or run the command in a fork of its snapshot"
            )
        command.check_user(self._users)
        forked = command.user in ("", USERS[0]) and python.serves([*command.argv])  # by the runner's interpreter
        if self._agent is None or forked:
            return self._run(command)
        return self._run_by_agent(self._agent, replace(command, env={**self._environment, **command.env}))

    async def _run(self, command: Command) -> ExecResult:
        with self._in_use():
            if self._gone is not None:
                return _KILLED
            started = time.perf_counter()
            request_bytes = request(command.argv, cwd=command.cwd, env=command.env)
            stdin, deadline_s, tell = command.stdin, command.deadline_s, command.on_output
            if isinstance(stdin, bytes) and len(stdin) > _PIPE_BYTES:
                stdin = _as_stream(stdin)
            streams = self._streams(request_bytes, stdin, separate_stderr=tell is not None)
            output = PipeOutput(streams.outputs, command.output_bytes, tell)
            feeding: asyncio.Task[None] | None = None
            try:
                clock, lost_s = self._clock(), 0.0
                longest_s = deadline_s * (MAX_EXTENSION if clock is not None else 1.0)
                ending = self._launcher.run(
                    self._handle, streams.command_fds, longest_s, flags=streams.flags, tell=tell
                )
                number = self._launcher.last_number
                if streams.input >= 0 and not isinstance(stdin, bytes):
                    feeding = asyncio.create_task(feed_pipe(streams.input, stdin))
                    streams.input = -1
                waiting = asyncio.create_task(self._ended(ending, longest_s))
                try:
                    if clock is not None:
                        _, lost_s = await wait_until_deadline(
                            waiting, clock, deadline_s, partial(self._end_command, number)
                        )
                    ended = await waiting
                finally:
                    waiting.cancel()
                if ended.exit_code == BROKEN_EXIT:
                    _check_confined(streams.command_fds[0], request_bytes)
            finally:
                streams.close()
                if feeding is not None:
                    await cancel_and_wait(feeding)
                if output.end():
                    self._leftover_outputs.append(output)
            return ExecResult(
                exit_code=ended.exit_code,
                output=output.value(),
                timed_out=ended.timed_out,
                truncated=output.truncated,
                wall_s=time.perf_counter() - started,
                lost_s=lost_s,
            )

    def _clock(self) -> FairClock | None:
        """The clock of a command's deadline, or None (wall time) if no control group counts the machine's CPU time."""
        accounts = self._launcher.info["accounts"]
        if accounts is None:
            return None
        usage, threads = (path.format(slot=self._handle.slot) for path in accounts)
        clock = FairClock(cgroup_usage(usage, threads, also=(self._launcher.runner_pid,)), cores=self._cores)
        return clock if clock.is_available else None

    def _end_command(self, number: int) -> None:
        with contextlib.suppress(MachineError):  # the launcher is gone, and the command with it
            self._launcher.end_one(number)

    async def _run_by_agent(self, agent: Channel, command: Command) -> ExecResult:
        with self._in_use():
            if self._gone is not None:
                return _KILLED
            used, self._used = self._used, True
            try:
                return await agents.run(agent, command, self._clock())
            except ChannelLost as lost:
                await self._lose_agent(lost)
                return msgspec.structs.replace(_KILLED, timed_out=lost.late, wall_s=command.deadline_s)
            except (agents.UnknownUser, agents.ConfinementFailed) as refusal:
                return agents.as_outcome(refusal, used=used)

    async def _lose_agent(self, lost: ChannelLost) -> None:
        """Record that the machine is gone; end it if its launcher still runs."""
        self._gone = self._gone or str(lost)
        with contextlib.suppress(MachineError):
            await self._kill()
        if self._launcher.failure is not None:
            self._require_open()

    def _streams(self, request_bytes: bytes, stdin: bytes | AsyncIterable[bytes], *, separate_stderr: bool) -> _Streams:
        try:
            with acting_on_files_as(self._owner):
                return _Streams(request_bytes, stdin, separate_stderr=separate_stderr)
        except OSError as error:
            raise MachineError(
                "a command could not be started", str(error), hint="check ulimit -n and free memory"
            ) from None

    async def _ended(self, ended: asyncio.Future[CommandEnd], deadline_s: float) -> CommandEnd:
        try:
            async with asyncio.timeout(deadline_s + _SLACK_S):
                end = await ended
        except TimeoutError:
            self._gone = f"a command did not end {_SLACK_S:g} s after its deadline"
            with contextlib.suppress(MachineError):
                await self._kill()
            return CommandEnd(_KILLED.exit_code, timed_out=True, lost=True)
        if end.lost:
            self._gone = "its first process was killed"
            with contextlib.suppress(MachineError):
                await self._kill()
        return end

    async def freeze(self) -> None:
        self._require_open()
        if self._frozen is None:
            self._frozen = asyncio.create_task(self._signal_all(END_ALL))
        await asyncio.shield(self._frozen)

    async def _signal_all(self, kind: bytes) -> None:
        with self._in_use():
            if self._gone is None:
                await self._ended(self._launcher.signal_all(self._handle, kind), _SIGNAL_S)

    async def read(self, path: str, *, max_bytes: int = 1_048_576) -> bytes:
        check_max_bytes(max_bytes)
        name = os.fsdecode(encode_path(path))
        return await self._with_files(lambda: files.read(self._handle.work, name, max_bytes))

    async def write(self, path: str, data: bytes) -> None:
        name = os.fsdecode(encode_path(path))
        await self._with_files(lambda: files.write(self._handle.work, name, data), num_bytes=len(data))

    async def snapshot(self) -> str:
        """Save the machine's files and return the snapshot's id, as `Machine.snapshot` does.

        It contains the work folder without sockets, pipes, owners and times; for machines of an image, everything that
        has changed in the root.
        """
        async with self._paused():
            return self._keep(await self._in_thread(self._pack_state))

    def _pack_state(self) -> bytes:
        with acting_on_files_as(self._owner):
            return wire.pack(wire.TREE, *files.save(self._handle.work, self._max_tree_bytes))

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Stop all processes of the machine during the block."""
        running = self._commands and self._frozen is None
        if running:
            await self._signal_all(STOP_ALL)
        try:
            yield
        finally:
            if running:
                await self._signal_all(CONTINUE_ALL)

    async def listen(self, port: int = 0) -> socket.socket:
        """Return a listening socket on the machine's own loopback interface, for a service of the host.

        Programs in the machine reach this service and nothing else (see `environments.network`). `port`: 0 chooses a
        free one. Raises `MachineError` if the socket cannot be created.
        """
        with self._in_use():
            return await asyncio.to_thread(listen_on_loopback, _pid_of(self._handle.init), port)

    async def ready(self, deadline_s: float) -> None:
        """Wait until the machine's agent, if it has one, has started. Raises `MachineError` after `deadline_s`
        seconds."""
        if self._agent is not None:
            try:
                await self._agent.ready(deadline_s)
            except ChannelLost as lost:
                hint = "this process's standard error may say why"
                raise MachineError("a machine's agent did not start", str(lost), hint=hint) from None

    async def load(self, tree: list[bytes]) -> None:
        """Write a file tree into a new machine's work folder. `tree`: path, kind and content of each entry
        (`guest.files`).

        Raises `OSError` if the tree does not fit.
        """
        await self._with_files(lambda: files.load(self._handle.work, tree), num_bytes=sum(map(len, tree)))

    async def _with_files(self, work: Callable[[], T], *, num_bytes: int = 0) -> T:
        """Access the machine's files as its user."""

        def as_owner() -> T:
            with acting_on_files_as(self._owner):
                return work()

        with self._require_alive():
            return as_owner() if num_bytes < _LARGE_BYTES else await asyncio.to_thread(as_owner)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Access the machine's files as this process, in a thread."""
        with self._require_alive():
            return await asyncio.to_thread(work)

    @contextlib.contextmanager
    def _require_alive(self) -> Iterator[None]:
        with self._in_use():
            if self._gone is None and self._launcher.is_gone(self.number):
                self._gone = "its first process was killed"
            if self._gone is not None:
                raise FileNotFoundError(f"the machine is gone: {self._gone}")
            yield

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the machine's descriptors open during the block."""
        self._require_open()
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            if self._abandoned:
                self._close_descriptors()

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._end())
        await asyncio.shield(self._closing)

    async def _end(self) -> None:
        try:
            await self._kill()
        finally:
            self._abandoned = True
            self._close_descriptors()

    def abandon(self) -> None:
        """Discard a machine without waiting for its end. Idempotent."""
        if not self._abandoned:
            self._abandoned = True
            self._launcher.discard(self.number)
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        """Close the descriptors, once, when nothing uses them any more."""
        if self._num_users == 0 and not self._descriptors_closed:
            self._descriptors_closed = True
            for output in self._leftover_outputs:
                output.close()
            if self._agent is not None:
                self._agent.close()
            self._handle.close()

    def _require_open(self) -> None:
        if self._closing is not None:
            raise MachineError("the machine is closed", hint="machines are used once: fork another one")
        failure = self._launcher.failure
        if failure is not None:
            raise MachineError("the machine's launcher is gone", failure, hint="fork again: a new one is started")
        if self._abandoned:
            raise MachineError("the machine was discarded", hint="fork another one")


class _Streams:
    """The descriptors of a command: `command_fds` for the command (request, output, then what `flags` say), and the
    host's ends."""

    def __init__(self, request_bytes: bytes, stdin: bytes | AsyncIterable[bytes], *, separate_stderr: bool) -> None:
        """`stdin` given as bytes must fit into a pipe."""
        self.command_fds: list[int] = []
        self.outputs: list[int] = []
        self.input, self.flags = -1, 0
        try:
            self.command_fds.append(_memfd(request_bytes))
            for _ in range(2 if separate_stderr else 1):
                host_end, command_end = os.pipe2(os.O_CLOEXEC)
                self.outputs.append(host_end)
                self.command_fds.append(command_end)
            self.flags |= SEPARATE_STDERR if separate_stderr else 0
            if not isinstance(stdin, bytes):
                command_end, self.input = os.pipe2(os.O_CLOEXEC)
                self.command_fds.append(command_end)
                self.flags |= INPUT_GIVEN
            elif stdin:
                command_end, host_end = os.pipe2(os.O_CLOEXEC)
                self.command_fds.append(command_end)
                os.write(host_end, stdin)
                os.close(host_end)
                self.flags |= INPUT_GIVEN
        except OSError:
            self.close()
            for fd in self.outputs:
                os.close(fd)
            raise

    def close(self) -> None:
        """Close the command's descriptors. The reader of the outputs closes those."""
        for fd in (*self.command_fds, self.input):
            if fd >= 0:
                os.close(fd)
        self.command_fds, self.input = [], -1


async def _as_stream(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _memfd(data: bytes) -> int:
    fd = os.memfd_create("", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.pwrite(fd, view, len(data) - len(view)) :]
    return fd


def _check_confined(request: int, request_bytes: bytes) -> None:
    found = os.pread(request, len(request_bytes) + 4096, 0)
    if found != request_bytes:
        facts = found.decode(errors="replace")
        raise MachineError(
            "the limits of a command could not be set", facts, hint="check MachineLimits and the host's limits"
        )


def _pid_of(pidfd: int) -> int:
    """PID of a pidfd's process, as this process sees it; -1 if it has ended."""
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))


# -------------------------------------------------------------------------------------------------- a command's output


_CHUNK_BYTES = 65_536
_PIPE_CHUNKS = 4  # more than a pipe holds


class PipeOutput(OutputBuffer):
    """An `OutputBuffer` that reads a command's pipes without blocking.

    It reads one chunk per event-loop iteration, so that the output of one command cannot starve other work. `pipes`:
    descriptors of standard output and, if separate, standard error. `limit`: the most bytes to keep. `tell` receives
    every byte as well, with the number of its pipe (1 or 2).
    """

    def __init__(self, pipes: Sequence[int], limit: int, tell: OutputCallback | None = None) -> None:
        super().__init__(limit)
        self._loop, self._tell = asyncio.get_running_loop(), tell
        self._open = dict(enumerate(pipes, start=1))
        self._ended = False
        for number, pipe in self._open.items():
            os.set_blocking(pipe, False)
            self._loop.add_reader(pipe, self._read_pipe, number)

    def _read_pipe(self, number: int) -> bool:
        try:
            data = os.read(self._open[number], _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_pipe(number)
        elif not self._ended:
            self.add(data)
            if self._tell is not None:
                self._tell(OutputChunk(number, data))
        return bool(data)

    def end(self) -> bool:
        """Read the remaining output after the command has ended. Returns whether a process that the command started
        still has the pipe open.

        If so, the pipe is drained and its data discarded until that process ends or `close` is called.
        """
        for number in list(self._open):
            for _ in range(_PIPE_CHUNKS):
                if not self._read_pipe(number):
                    break
        self._ended = True
        return bool(self._open)

    def close(self) -> None:
        """Stop reading. Idempotent."""
        for number in list(self._open):
            self._close_pipe(number)

    def _close_pipe(self, number: int) -> None:
        pipe = self._open.pop(number)
        self._loop.remove_reader(pipe)
        os.close(pipe)


# ------------------------------------------------------------------------------------------ a command's standard input


async def feed_pipe(pipe: int, parts: AsyncIterable[bytes]) -> None:
    """Write all parts into the pipe (a descriptor) as it has space. Close it at the end, or once nobody reads from
    it."""
    os.set_blocking(pipe, False)
    try:
        with contextlib.suppress(BrokenPipeError):
            async for part in parts:
                await _write(pipe, memoryview(part))
    finally:
        os.close(pipe)


async def _write(pipe: int, view: memoryview) -> None:
    while view:
        try:
            view = view[os.write(pipe, view) :]
        except BlockingIOError:
            await _wait_writable(pipe)


async def _wait_writable(pipe: int) -> None:
    """Wait until the pipe has space. No deadline of its own: it is cancelled when the command ends."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(pipe, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(pipe)
