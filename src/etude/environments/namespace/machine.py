"""`Machine` over a channel: commands, files, snapshots.

A machine whose socket fails after its first request was most likely broken by what ran in it, so that is an outcome,
not an error: the command counts as killed (137), files are not found. `MachineError` is raised only on evidence that
agent code cannot make: the launcher process is gone, or the machine was closed by its owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import PurePosixPath

from etude.environments.namespace.channel import Channel, Hangup
from etude.environments.namespace.guest import wire
from etude.errors import MachineError
from etude.seams import ExecResult

MAX_COMMANDS = 4096  # of one machine: each keeps its result, so that a repeated key is answered from it
_SLACK_S = 5.0  # what a machine may take to kill a tree after the deadline, before the machine itself is killed
_FRAME_SLACK_BYTES = 4096
_FILE_DEADLINE_S = 30.0
_KILLED = 137


class NamespaceMachine:
    """A `Machine`. Requests are answered one after another; between two commands nothing runs in it."""

    def __init__(
        self,
        number: int,
        channel: Channel,
        *,
        max_tree_bytes: int,
        keep: Callable[[bytes], str],
        kill: Callable[[], Awaitable[None]],
        discard: Callable[[], None],
        launcher_failure: Callable[[], str | None],
    ) -> None:
        self.number = number  # the launcher's name for it
        self._channel, self._max_tree_bytes, self._keep = channel, max_tree_bytes, keep
        self._kill, self._discard, self._launcher_failure = kill, discard, launcher_failure
        self._commands: dict[str, asyncio.Task[ExecResult]] = {}
        self._gone: str | None = None  # why it answers no more, when what ran in it is to blame
        self._closing: asyncio.Task[None] | None = None

    async def exec(
        self, argv: Sequence[str], *, key: str, deadline_s: float, stdin: bytes = b"", output_bytes: int = 65_536
    ) -> ExecResult:
        """See `Machine.exec`. Cancelling the caller does not stop the command: ask again with the same key."""
        command = self._commands.get(key)
        if command is None:
            self._must_be_open()
            if not argv or any("\0" in a for a in argv):
                raise ValueError("a command has at least one word and no NUL byte")
            if len(self._commands) >= MAX_COMMANDS:
                raise MachineError(f"a machine runs at most {MAX_COMMANDS} commands", hint="fork another one")
            command = asyncio.create_task(self._run(list(argv), deadline_s, stdin, output_bytes))
            command.add_done_callback(_retrieve)
            self._commands[key] = command
        return await asyncio.shield(command)

    async def _run(self, argv: list[str], deadline_s: float, stdin: bytes, output_bytes: int) -> ExecResult:
        started = time.perf_counter()
        words = [os.fsencode(a) for a in argv]
        frame = wire.pack(wire.EXEC, wire.EXEC_PARAMS.pack(deadline_s, output_bytes), stdin, *words)
        try:
            reply = await self._ask(frame, output_bytes + _FRAME_SLACK_BYTES, deadline_s + _SLACK_S)
            code, timed_out, truncated = wire.EXEC_RESULT.unpack(reply[0][: wire.EXEC_RESULT.size].ljust(3, b"\0"))
            output = reply[1][:output_bytes]
        except FileNotFoundError:
            code, timed_out, truncated, output = _KILLED, time.perf_counter() - started >= deadline_s, False, b""
        except (OSError, ValueError) as error:
            code, timed_out, truncated, output = 126, False, False, f"{error}\n".encode(errors="replace")
        wall_s = time.perf_counter() - started
        return ExecResult(
            exit_code=code, output=output, timed_out=bool(timed_out), truncated=bool(truncated), wall_s=wall_s
        )

    async def read(self, path: str, *, max_bytes: int = 1_048_576) -> bytes:
        """See `Machine.read`. Links are not followed: `ValueError`. `FileNotFoundError` from a machine that is gone."""
        frame = wire.pack(wire.READ, inside(path), wire.SIZE.pack(max_bytes))
        return (await self._ask(frame, max_bytes + _FRAME_SLACK_BYTES, _FILE_DEADLINE_S, num_fields=1))[0]

    async def write(self, path: str, data: bytes) -> None:
        """See `Machine.write`. `OSError` where the machine's disk is full or the place is taken by a folder."""
        await self._ask(wire.pack(wire.WRITE, inside(path), data), _FRAME_SLACK_BYTES, _FILE_DEADLINE_S, num_fields=0)

    async def snapshot(self) -> str:
        """See `Machine.snapshot`: the work folder, without sockets, pipes, owners and times."""
        fields = await self._ask(wire.pack(wire.SAVE), 2 * self._max_tree_bytes, _FILE_DEADLINE_S, num_fields=-1)
        return self._keep(wire.pack(wire.LOAD, *fields))

    async def load(self, tree: bytes) -> None:
        """Wait until a new machine is READY and fill its work folder from a LOAD frame.

        Raises `Hangup`, or `OSError` for a tree that does not fit.
        """
        ready = await self._channel.call(b"", reply_bytes=_FRAME_SLACK_BYTES, deadline_s=_FILE_DEADLINE_S)
        if ready.kind != wire.READY:
            raise Hangup(b" ".join(ready.fields).decode(errors="replace"))
        reply = await self._channel.call(tree, reply_bytes=_FRAME_SLACK_BYTES, deadline_s=_FILE_DEADLINE_S)
        _raise_if_refused(reply)

    async def close(self) -> None:
        """See `Machine.close`."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._end())
        await asyncio.shield(self._closing)

    async def _end(self) -> None:
        try:
            await self._kill()
        finally:
            self._channel.hang_up()
            await asyncio.gather(*self._commands.values(), return_exceptions=True)
            self._channel.close()

    def abandon(self) -> None:
        """Let go of a machine without waiting for its end."""
        self._discard()
        self._channel.hang_up()
        self._channel.close()

    async def _ask(self, frame: bytes, reply_bytes: int, deadline_s: float, num_fields: int = 2) -> list[bytes]:
        self._must_be_open()
        if self._gone is None:
            try:
                reply = await self._channel.call(frame, reply_bytes=reply_bytes, deadline_s=deadline_s)
                _raise_if_refused(reply)
                if num_fields < 0 or len(reply.fields) == num_fields:
                    return reply.fields
                self._gone = "a reply of the wrong form"
            except Hangup as hangup:
                self._gone = str(hangup)
            with contextlib.suppress(MachineError):
                await self._kill()
            self._channel.close()
        self._must_be_open()
        raise FileNotFoundError(f"the machine is gone: {self._gone}")

    def _must_be_open(self) -> None:
        if self._closing is not None:
            raise MachineError("the machine is closed", hint="a machine is used once: fork another one")
        failure = self._launcher_failure()
        if failure is not None:
            raise MachineError("the machine's launcher is gone", failure, hint="fork again: a new one is started")


def _retrieve(task: asyncio.Task[ExecResult]) -> None:
    if not task.cancelled():
        task.exception()  # nobody may be waiting any more; whoever asks again with the key still gets it


def _raise_if_refused(reply: wire.Frame) -> None:
    if reply.kind in (wire.OK, wire.DONE):
        return
    if reply.kind != wire.REFUSED or len(reply.fields) != 2 or len(reply.fields[0]) != wire.ERRNO.size:
        raise Hangup(f"a reply of kind {reply.kind}")
    (number,) = wire.ERRNO.unpack(reply.fields[0])
    reason = reply.fields[1][:500].decode(errors="replace")
    raise OSError(number, reason) if number else ValueError(reason)


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
