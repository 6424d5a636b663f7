"""`Machine` over a channel to an agent: what every backend shares whose machines have one.

What runs in a machine can kill its agent, or make it say anything; so that is an outcome, not an error: the command
counts as killed (137), files are not found. `MachineError` is raised only on evidence that agent code cannot make. The
backend has it: when there is no answer, `blame` is asked, and says in words what the host did wrong, or nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import msgspec

from etude.environments.agent import commands, protocol
from etude.environments.agent.channel import Channel, Lost, Reply, waiting
from etude.environments.commands import Commands, retrieve
from etude.environments.paths import inside
from etude.errors import MachineError
from etude.records.command import Command, ExecOptions, ExecResult, check_max_bytes

_FILES_S = 30.0  # what a file may take, and a second more for each of so many bytes:
_BYTES_PER_S = 4 << 20
_KILLED = ExecResult(exit_code=137, output=b"", timed_out=False, truncated=False, wall_s=0.0)


class AgentMachine:
    """A `Machine`. `env` is what every command has, `users` whom it can run as, the first where nobody is named.

    `snapshot` makes one of the machine and returns its id (`save` gives the working directory as a TREE frame); `end`
    kills the machine and frees what it held, once; `blame` says why the host is to blame that no answer comes, "" where
    it is not. `used` is a machine that comes from one in which something ran, all its memory included.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        env: Mapping[str, str],
        users: Sequence[str],
        snapshot: Callable[[AgentMachine], Awaitable[str]],
        end: Callable[[], Coroutine[Any, Any, None]],
        blame: Callable[[], str],
        used: bool = False,
    ) -> None:
        self._channel, self._env, self._users = channel, dict(env), tuple(users)
        self._snapshot, self._finish, self._blame = snapshot, end, blame
        self._commands = Commands()
        self._used = used  # whether anything that ran in it can have changed it
        self._gone: str | None = None  # why it answers no more, when what ran in it is to blame
        self._frozen: asyncio.Task[None] | None = None
        self._finished: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

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
        user = command.user or self._users[0]
        return self._run(replace(command, env={**self._env, **command.env}, user=user))

    async def _run(self, command: Command) -> ExecResult:
        if self._gone is not None:
            return _KILLED
        used, self._used = self._used, True
        try:
            return await commands.run(self._channel, command)
        except Lost as lost:
            await self._lose(lost)
            return msgspec.structs.replace(_KILLED, timed_out=lost.late, wall_s=command.deadline_s)
        except (commands.NoUser, commands.Unconfined) as refusal:
            return commands.as_outcome(refusal, used=used)

    async def read(self, path: str, *, max_bytes: int = 1_048_576) -> bytes:
        """See `Machine.read`. Links are not followed: `ValueError`. `FileNotFoundError` from a machine that is gone."""
        check_max_bytes(max_bytes)
        name = inside(path)
        try:
            asked = max_bytes.to_bytes(8, "little") + name
            return await self._ask(protocol.READ, asked, max_bytes=max_bytes)
        except OSError as error:
            raise _file_error(error, path, max_bytes) from None

    async def write(self, path: str, data: bytes) -> None:
        """See `Machine.write`. `OSError` where the machine's disk is full or the place is taken by a folder."""
        name = inside(path)
        head = (0o644).to_bytes(4, "little"), len(name).to_bytes(2, "little") + name
        parts = [data[at : at + protocol.PART] for at in range(0, len(data), protocol.PART)] or [b""]
        last = len(parts) - 1
        try:
            frames = (b"".join((head[0], bytes([i == last]), head[1], part)) for i, part in enumerate(parts))
            await self._send(protocol.WRITE, frames, len(data))
        except OSError as error:
            raise _file_error(error, path) from None

    async def save(self, max_bytes: int) -> bytes:
        """The working directory as a TREE frame (`guest.wire`). `ValueError` past `max_bytes` of content."""
        try:
            return await self._ask(protocol.SAVE, max_bytes.to_bytes(8, "little"), max_bytes=2 * max_bytes + (64 << 20))
        except OSError as error:
            raise _file_error(error, "the working directory", max_bytes) from None

    async def load(self, tree: bytes) -> None:
        """Fill the working directory of a new machine from a TREE frame. `OSError` for a tree that does not fit."""
        last = max(len(tree) - 1, 0) // protocol.PART
        parts = (tree[i * protocol.PART : (i + 1) * protocol.PART] for i in range(last + 1))
        await self._send(protocol.LOAD, (bytes([i == last]) + part for i, part in enumerate(parts)), len(tree))

    async def freeze(self) -> None:
        """See `Machine.freeze`: every process in it is killed."""
        self._must_be_open()
        if self._frozen is None:
            self._frozen = asyncio.create_task(self._freeze())
        await asyncio.shield(self._frozen)

    async def _freeze(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # a machine that is gone is as frozen as can be
            await self._ask(protocol.FREEZE, b"")

    async def snapshot(self) -> str:
        """See `Machine.snapshot`."""
        self._must_be_there()
        try:
            return await self._snapshot(self)
        except Lost as lost:
            await self._lose(lost)
            raise FileNotFoundError(f"the machine is gone: {self._gone}") from None

    async def renew(self, *, seed: bytes, clock_ns: int, host_name: str) -> None:
        """Give a restored machine its own random numbers, time and name. Raises `MachineError`."""
        try:
            await self._channel.renew(seed=seed, clock_ns=clock_ns, host_name=host_name)
        except (Lost, OSError) as error:
            raise MachineError(
                "a machine could not be told from its siblings", str(error), hint="see its log"
            ) from None

    async def _ask(self, kind: bytes, body: bytes, *, max_bytes: int = 0) -> bytes:
        self._must_be_there()
        deadline_s = _FILES_S + max_bytes / _BYTES_PER_S
        try:
            return await self._channel.ask(kind, body, deadline_s=deadline_s, max_bytes=max_bytes)
        except Lost as lost:
            await self._lose(lost)
            raise FileNotFoundError(f"the machine is gone: {self._gone}") from None

    async def _send(self, kind: bytes, bodies: Iterable[bytes], num_bytes: int) -> None:
        """A request in several frames, whole even where the caller is cancelled."""
        self._must_be_there()
        sending = asyncio.create_task(self._send_all(kind, bodies, _FILES_S + num_bytes / _BYTES_PER_S))
        sending.add_done_callback(retrieve)
        try:
            await asyncio.shield(sending)
        except Lost as lost:
            await self._lose(lost)
            raise FileNotFoundError(f"the machine is gone: {self._gone}") from None

    async def _send_all(self, kind: bytes, bodies: Iterable[bytes], deadline_s: float) -> None:
        reply = Reply()
        number = self._channel.begin(reply)
        with waiting(deadline_s, "its agent to take and answer a request"):
            async with asyncio.timeout(deadline_s):
                for body in bodies:
                    await self._channel.room()
                    self._channel.send(protocol.frame(kind, number, body))
                await reply.wait(deadline_s)

    async def _lose(self, lost: Lost) -> None:
        """No answer comes. Whose fault? Raises `MachineError` where it is not what ran in the machine."""
        if self._closing is None and self._gone is None:
            why = self._blame() or ("" if self._channel.is_up else f"its agent did not start: {lost}")
            if why:
                raise MachineError("a machine is lost", why, hint="fork again")
            self._gone = str(lost)
            await self._finish_once()
        else:
            self._gone = self._gone or "it was closed"

    async def _finish_once(self) -> None:
        """Nothing runs in it any more when this returns."""
        self._channel.close(self._gone or "it was closed")
        if self._finished is None:
            self._finished = asyncio.create_task(self._finish())
        await asyncio.shield(self._finished)

    async def close(self) -> None:
        """See `Machine.close`."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._finish_once())
        await asyncio.shield(self._closing)

    def _must_be_there(self) -> None:
        self._must_be_open()
        if self._gone is not None:
            raise FileNotFoundError(f"the machine is gone: {self._gone}")

    def _must_be_open(self) -> None:
        if self._closing is not None:
            raise MachineError("the machine is closed", hint="a machine is used once: fork another one")


def _file_error(error: OSError, path: str, max_bytes: int | None = None) -> Exception:
    """What a caller of `read` or `write` is told."""
    match error.errno:
        case errno.EFBIG if max_bytes is not None:
            return ValueError(f"{path} is larger than {max_bytes} bytes")
        case errno.ELOOP | errno.EXDEV:
            return ValueError(f"{path} leaves the work folder or goes through a link")
        case errno.ENXIO:
            return ValueError(f"{path} is not a regular file")
        case None:
            return error
    return OSError(error.errno, error.strerror, path)
