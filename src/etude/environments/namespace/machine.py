"""`Machine` by its descriptors: commands go to the agent in it, files are reached through the open work folder.

Python goes to the runner, which forks an interpreter that has started; so does everything where no agent was built.

Files are read and written as the machine's own user, without following a link (`guest.files`). A machine that dies
was most likely killed by what ran in it, so that is an outcome, not an error: the command counts as killed (137),
files are not found. `MachineError` is raised only on evidence that agent code cannot make: launcher or runner is gone,
a command could not be confined before any had run, or the machine was closed by its owner.
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
from etude.environments.agent.channel import Channel, Lost
from etude.environments.commands import Commands
from etude.environments.fair_time import PATIENCE, FairClock, fairly, of_group
from etude.environments.namespace.guest import files, python, wire
from etude.environments.namespace.guest.packets import CONTINUE_ALL, END_ALL, ERRORS_APART, INPUT_GIVEN, STOP_ALL
from etude.environments.namespace.guest.syscalls import acting_on_files_as
from etude.environments.namespace.guest.tools import BROKEN_EXIT, ENVIRONMENT, request
from etude.environments.namespace.launcher import Ended, LauncherProcess, Made
from etude.environments.network.inside import listen_inside
from etude.environments.output import Capped
from etude.environments.paths import inside
from etude.errors import MachineError
from etude.records.command import Command, ExecOptions, ExecResult, Printed, Tell, check_max_bytes

T = TypeVar("T")
_SLACK_S = 5.0  # what the runner may take to end a command after its deadline, before the machine itself is killed
_LARGE_BYTES = 1 << 20  # files from here on are moved in a thread
_SIGNAL_S = 10.0  # what stopping or ending everything in a machine may take
_KILLED = ExecResult(exit_code=137, output=b"", timed_out=False, truncated=False, wall_s=0.0)
_PIPE_BYTES = 4096  # any pipe holds as much, also where a user may have no more
USERS = ("user",)
WITH_ROOT = (*USERS, "root")  # of a machine that has an agent, where there are ids for both
_ENVIRONMENT = {name: value for name, value in ENVIRONMENT.items() if name not in ("HOME", "PWD", "USER")}  # the user's


class NamespaceMachine:
    """A `Machine`. Commands run beside each other."""

    def __init__(
        self,
        made: Made,
        launcher: LauncherProcess,
        *,
        owner: int | None,
        max_tree_bytes: int,
        keep: Callable[[bytes], str],
        kill: Callable[[], Awaitable[None]],
        users: Sequence[str] = USERS,
        cores: float = 1.0,
    ) -> None:
        self.number = made.number
        self._made, self._launcher, self._owner = made, launcher, owner
        self._max_tree_bytes, self._keep, self._kill = max_tree_bytes, keep, kill
        self._users, self._environment, self._cores = users, _ENVIRONMENT, cores
        self._agent = Channel(made.agent) if made.agent >= 0 else None
        self._commands = Commands()
        self._left: list[Output] = []  # pipes that something a command left behind can still write to
        self._used = False  # whether its agent ran something that can have changed it
        self._at_work = 0  # how many have the machine's descriptors in use
        self._gone: str | None = None  # why it answers no more, when what ran in it is to blame
        self._frozen: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._abandoned = self._let_go_of = False

    async def exec(
        self, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """See `Machine.exec`. Cancelling the caller does not stop the command: ask again with the same key."""
        return await self._commands.once(self._begin, argv, key=key, deadline_s=deadline_s, **options)

    def _begin(self, command: Command) -> Coroutine[Any, Any, ExecResult]:
        self._must_be_open()
        if self._frozen is not None:
            raise MachineError("the machine is frozen", hint="read its files, or fork a snapshot of it")
        command.check_user(self._users)
        forked = command.user in ("", USERS[0]) and python.serves([*command.argv])  # by the runner's interpreter
        if self._agent is None or forked:
            return self._run(command)
        return self._run_by_agent(self._agent, replace(command, env={**self._environment, **command.env}))

    async def _run(self, command: Command) -> ExecResult:
        with self._using():
            if self._gone is not None:
                return _KILLED
            started = time.perf_counter()
            words = request(command.argv, cwd=command.cwd, env=command.env)
            stdin, deadline_s, tell = command.stdin, command.deadline_s, command.tell
            if isinstance(stdin, bytes) and len(stdin) > _PIPE_BYTES:
                stdin = _in_parts(stdin)
            streams = self._streams(words, stdin, apart=tell is not None)
            output = Output(streams.outputs, command.output_bytes, tell)
            feeding: asyncio.Task[None] | None = None
            try:
                clock, lost_s = self._clock(), 0.0
                longest_s = deadline_s * (PATIENCE if clock is not None else 1.0)
                ending = self._launcher.run(self._made, streams.given, longest_s, flags=streams.flags, tell=tell)
                number = self._launcher.last
                if streams.input >= 0 and not isinstance(stdin, bytes):
                    feeding = asyncio.create_task(feed(streams.input, stdin))
                    streams.input = -1
                waiting = asyncio.create_task(self._ended(ending, longest_s))
                try:
                    if clock is not None:
                        _, lost_s = await fairly(waiting, clock, deadline_s, partial(self._end_one, number))
                    ended = await waiting
                finally:
                    waiting.cancel()
                if ended.exit_code == BROKEN_EXIT:
                    _raise_if_broken(streams.given[0], words)
            finally:
                streams.close()
                if feeding is not None:
                    await _stop(feeding)
                if output.end():
                    self._left.append(output)
            return ExecResult(
                exit_code=ended.exit_code,
                output=output.value(),
                timed_out=ended.timed_out,
                truncated=output.truncated,
                wall_s=time.perf_counter() - started,
                lost_s=lost_s,
            )

    def _clock(self) -> FairClock | None:
        """What counts a command's deadline. Without a control group that counts CPU time it is wall time: None."""
        accounts = self._launcher.facts["accounts"]
        if accounts is None:
            return None
        usage, threads = (path.format(slot=self._made.slot) for path in accounts)
        clock = FairClock(of_group(usage, threads, also=(self._launcher.runner_pid,)), cores=self._cores)
        return clock if clock.counts else None

    def _end_one(self, number: int) -> None:
        with contextlib.suppress(MachineError):  # the launcher is gone, and the command with it
            self._launcher.end_one(number)

    async def _run_by_agent(self, agent: Channel, command: Command) -> ExecResult:
        with self._using():
            if self._gone is not None:
                return _KILLED
            used, self._used = self._used, True
            try:
                return await agents.run(agent, command, self._clock())
            except Lost as lost:
                await self._lose_agent(lost)
                return msgspec.structs.replace(_KILLED, timed_out=lost.late, wall_s=command.deadline_s)
            except (agents.NoUser, agents.Unconfined) as refusal:
                return agents.as_outcome(refusal, used=used)

    async def _lose_agent(self, lost: Lost) -> None:
        """The machine is no more, with its launcher or without."""
        self._gone = self._gone or str(lost)
        with contextlib.suppress(MachineError):
            await self._kill()
        if self._launcher.failure is not None:
            self._must_be_open()

    def _streams(self, words: bytes, stdin: bytes | AsyncIterable[bytes], *, apart: bool) -> _Streams:
        try:
            with acting_on_files_as(self._owner):
                return _Streams(words, stdin, apart=apart)
        except OSError as error:
            raise MachineError("a command could not be started", str(error), hint="see ulimit -n, and memory") from None

    async def _ended(self, ended: asyncio.Future[Ended], deadline_s: float) -> Ended:
        try:
            async with asyncio.timeout(deadline_s + _SLACK_S):
                how = await ended
        except TimeoutError:
            self._gone = f"a command did not end {_SLACK_S:g} s after its deadline"
            with contextlib.suppress(MachineError):
                await self._kill()
            return Ended(_KILLED.exit_code, timed_out=True, lost=True)
        if how.lost:
            self._gone = "its first process was killed"
            with contextlib.suppress(MachineError):
                await self._kill()
        return how

    async def freeze(self) -> None:
        """See `Machine.freeze`: every process in it is killed."""
        self._must_be_open()
        if self._frozen is None:
            self._frozen = asyncio.create_task(self._signal_all(END_ALL))
        await asyncio.shield(self._frozen)

    async def _signal_all(self, kind: bytes) -> None:
        with self._using():
            if self._gone is None:
                await self._ended(self._launcher.signal_all(self._made, kind), _SIGNAL_S)

    async def read(self, path: str, *, max_bytes: int = 1_048_576) -> bytes:
        """See `Machine.read`. Links are not followed: `ValueError`. `FileNotFoundError` from a machine that is gone."""
        check_max_bytes(max_bytes)
        name = os.fsdecode(inside(path))
        return await self._on_files(lambda: files.read(self._made.work, name, max_bytes))

    async def write(self, path: str, data: bytes) -> None:
        """See `Machine.write`. `OSError` where the machine's disk is full or the place is taken by a folder."""
        name = os.fsdecode(inside(path))
        await self._on_files(lambda: files.write(self._made.work, name, data), num_bytes=len(data))

    async def snapshot(self) -> str:
        """See `Machine.snapshot`: the work folder, without sockets, pipes, owners and times; of a machine of an image
        all that has changed in it."""
        async with self._standing():
            return self._keep(await self._on_root(self._saved))

    def _saved(self) -> bytes:
        """Its state as a frame."""
        with acting_on_files_as(self._owner):
            return wire.pack(wire.TREE, *files.save(self._made.work, self._max_tree_bytes))

    @contextlib.asynccontextmanager
    async def _standing(self) -> AsyncIterator[None]:
        """Nothing in it runs meanwhile."""
        running = self._commands and self._frozen is None
        if running:
            await self._signal_all(STOP_ALL)
        try:
            yield
        finally:
            if running:
                await self._signal_all(CONTINUE_ALL)

    async def listen(self, port: int = 0) -> socket.socket:
        """A listening socket on the machine's own loopback, to be served from here (`environments.network`): the only
        thing that its commands can connect to. `MachineError` where it cannot be made."""
        with self._using():
            return await asyncio.to_thread(listen_inside, _number_of(self._made.init), port)

    async def ready(self, deadline_s: float) -> None:
        """Wait until its agent, if it has one, is there. Raises `MachineError`: nothing has run in it yet."""
        if self._agent is not None:
            try:
                await self._agent.ready(deadline_s)
            except Lost as lost:
                hint = "this process's standard error may say why"
                raise MachineError("a machine's agent did not start", str(lost), hint=hint) from None

    async def load(self, tree: list[bytes]) -> None:
        """Fill a new machine's work folder from the fields of a TREE frame. `OSError` for a tree that does not fit."""
        await self._on_files(lambda: files.load(self._made.work, tree), num_bytes=sum(map(len, tree)))

    async def _on_files(self, work: Callable[[], T], *, num_bytes: int = 0) -> T:
        """Work on its files as its user."""

        def as_owner() -> T:
            with acting_on_files_as(self._owner):
                return work()

        with self._present():
            return as_owner() if num_bytes < _LARGE_BYTES else await asyncio.to_thread(as_owner)

    async def _on_root(self, work: Callable[[], T]) -> T:
        """Work on its files as this process, in a thread."""
        with self._present():
            return await asyncio.to_thread(work)

    @contextlib.contextmanager
    def _present(self) -> Iterator[None]:
        with self._using():
            if self._gone is None and self._launcher.is_gone(self.number):
                self._gone = "its first process was killed"
            if self._gone is not None:
                raise FileNotFoundError(f"the machine is gone: {self._gone}")
            yield

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """The machine's descriptors stay open meanwhile."""
        self._must_be_open()
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1
            if self._abandoned:
                self._let_go()

    async def close(self) -> None:
        """See `Machine.close`."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._end())
        await asyncio.shield(self._closing)

    async def _end(self) -> None:
        try:
            await self._kill()
        finally:
            self._abandoned = True
            self._let_go()

    def abandon(self) -> None:
        """Let go of a machine without waiting for its end. Idempotent."""
        if not self._abandoned:
            self._abandoned = True
            self._launcher.discard(self.number)
            self._let_go()

    def _let_go(self) -> None:
        """Close the descriptors, once, when nobody uses them any more."""
        if self._at_work == 0 and not self._let_go_of:
            self._let_go_of = True
            for output in self._left:
                output.close()
            if self._agent is not None:
                self._agent.close()
            self._made.close()

    def _must_be_open(self) -> None:
        if self._closing is not None:
            raise MachineError("the machine is closed", hint="a machine is used once: fork another one")
        failure = self._launcher.failure
        if failure is not None:
            raise MachineError("the machine's launcher is gone", failure, hint="fork again: a new one is started")
        if self._abandoned:
            raise MachineError("the machine was let go", hint="fork another one")


class _Streams:
    """What a command is `given` (its request and output, then what `flags` say), and the ends on this side of it."""

    def __init__(self, words: bytes, stdin: bytes | AsyncIterable[bytes], *, apart: bool) -> None:
        """`stdin` as bytes fits into a pipe."""
        self.given: list[int] = []
        self.outputs: list[int] = []
        self.input, self.flags = -1, 0
        try:
            self.given.append(_in_memory(words))
            for _ in range(2 if apart else 1):
                ours, theirs = os.pipe2(os.O_CLOEXEC)
                self.outputs.append(ours)
                self.given.append(theirs)
            self.flags |= ERRORS_APART if apart else 0
            if not isinstance(stdin, bytes):
                theirs, self.input = os.pipe2(os.O_CLOEXEC)
                self.given.append(theirs)
                self.flags |= INPUT_GIVEN
            elif stdin:
                theirs, ours = os.pipe2(os.O_CLOEXEC)
                self.given.append(theirs)
                os.write(ours, stdin)
                os.close(ours)
                self.flags |= INPUT_GIVEN
        except OSError:
            self.close()
            for fd in self.outputs:
                os.close(fd)
            raise

    def close(self) -> None:
        """Close what the command was given; its outputs belong to whoever reads them."""
        for fd in (*self.given, self.input):
            if fd >= 0:
                os.close(fd)
        self.given, self.input = [], -1


async def _in_parts(data: bytes) -> AsyncIterator[bytes]:
    yield data


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


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # its source's trouble: the command has met the end of its input


def _number_of(pidfd: int) -> int:
    """A process's number, as this process sees it; -1 when it is gone."""
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))


# -------------------------------------------------------------------------------------------------- a command's output


_CHUNK_BYTES = 65_536
_PIPE_CHUNKS = 4  # more than a pipe holds


class Output(Capped):
    """Fills itself from the reading ends of pipes, a chunk each time the event loop comes by, so that a flood from one
    command takes turns with everything else. `tell` gets every byte as well, under its pipe's number: 1, 2."""

    def __init__(self, pipes: Sequence[int], limit: int, tell: Tell | None = None) -> None:
        super().__init__(limit)
        self._loop, self._tell = asyncio.get_running_loop(), tell
        self._open = dict(enumerate(pipes, start=1))
        self._ended = False
        for number, pipe in self._open.items():
            os.set_blocking(pipe, False)
            self._loop.add_reader(pipe, self._more, number)

    def _more(self, number: int) -> bool:
        try:
            data = os.read(self._open[number], _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._let_go(number)
        elif not self._ended:
            self.add(data)
            if self._tell is not None:
                self._tell(Printed(number, data))
        return bool(data)

    def end(self) -> bool:
        """Take what is there now that the command has ended. True when something that it left behind can still write:
        then the pipe is emptied, into nothing, until that ends or `close` is called."""
        for number in list(self._open):
            for _ in range(_PIPE_CHUNKS):
                if not self._more(number):
                    break
        self._ended = True
        return bool(self._open)

    def close(self) -> None:
        """Stop reading. Idempotent."""
        for number in list(self._open):
            self._let_go(number)

    def _let_go(self, number: int) -> None:
        pipe = self._open.pop(number)
        self._loop.remove_reader(pipe)
        os.close(pipe)


# ------------------------------------------------------------------------------------------ a command's standard input


async def feed(pipe: int, parts: AsyncIterable[bytes]) -> None:
    """Write each part into a pipe as it has room; close it at their end, or once nobody reads it any more."""
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
            await _room(pipe)


async def _room(pipe: int) -> None:
    """Ends with the command: whoever runs it cancels this."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(pipe, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(pipe)
