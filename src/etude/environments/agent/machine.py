"""`AgentMachine`: a machine over a channel to its agent, for all backends that have an agent.

Programs in a machine can kill its agent, or make it send anything. That is an outcome, not an error: the command counts
as killed (exit code 137), and files are not found. `MachineError` is raised only on evidence that programs in the
machine cannot produce. Only the backend has such evidence: when no answer comes, its function `blame` returns what went
wrong on the host, or "".
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
from etude.environments.agent.channel import Channel, ChannelLost, Reply, timeout_as_lost
from etude.environments.command_registry import CommandRegistry, consume_exception
from etude.environments.paths import encode_path
from etude.errors import MachineError
from etude.records.command import Command, ExecOptions, ExecResult, check_max_bytes

_FILES_S = 30.0  # for a file operation, plus one second per _BYTES_PER_S bytes
_BYTES_PER_S = 4 << 20
_KILLED = ExecResult(exit_code=137, output=b"", timed_out=False, truncated=False, wall_s=0.0)


class AgentMachine:
    """A `Machine` whose commands and files are served by an agent. Backends create it.

    - `channel`: the connected channel to its agent
    - `env`: environment variables of every command
    - `users`: names of the users that commands can run as, the default first
    - `snapshot`: takes a snapshot of the machine and returns its id
    - `end`: kills the machine and frees its resources; called once
    - `blame`: called when no answer comes; returns why the host is to blame, or "" if it is not
    - `used`: whether commands have run in the machine that this one was restored from
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
        self._snapshot, self._end, self._blame = snapshot, end, blame
        self._commands = CommandRegistry()
        self._used = used  # whether a command may have changed the machine
        self._gone: str | None = None  # why the machine is gone, if its own programs are to blame
        self._frozen: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

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
        user = command.user or self._users[0]
        return self._run(replace(command, env={**self._env, **command.env}, user=user))

    async def _run(self, command: Command) -> ExecResult:
        if self._gone is not None:
            return _KILLED
        used, self._used = self._used, True
        try:
            return await commands.run(self._channel, command)
        except ChannelLost as lost:
            await self._lose(lost)
            return msgspec.structs.replace(_KILLED, timed_out=lost.late, wall_s=command.deadline_s)
        except (commands.UnknownUser, commands.ConfinementFailed) as refusal:
            return commands.as_outcome(refusal, used=used)

    async def read(self, path: str, *, max_bytes: int = 1_048_576) -> bytes:
        check_max_bytes(max_bytes)
        name = encode_path(path)
        try:
            request = max_bytes.to_bytes(8, "little") + name
            return await self._request(protocol.READ, request, max_bytes=max_bytes)
        except OSError as error:
            raise _file_error(error, path, max_bytes) from None

    async def write(self, path: str, data: bytes) -> None:
        name = encode_path(path)
        head = (0o644).to_bytes(4, "little"), len(name).to_bytes(2, "little") + name
        parts = [data[at : at + protocol.PART] for at in range(0, len(data), protocol.PART)] or [b""]
        last = len(parts) - 1
        try:
            frames = (b"".join((head[0], bytes([i == last]), head[1], part)) for i, part in enumerate(parts))
            await self._send(protocol.WRITE, frames, len(data))
        except OSError as error:
            raise _file_error(error, path) from None

    async def save(self, max_bytes: int) -> bytes:
        """Return the working directory as one byte string, a serialised file tree (the TREE frame of
        `namespace.guest.wire`).

        Raises `ValueError` if the files have more than `max_bytes` together, `FileNotFoundError` if the machine is
        gone.
        """
        try:
            return await self._request(
                protocol.SAVE, max_bytes.to_bytes(8, "little"), max_bytes=2 * max_bytes + (64 << 20)
            )
        except OSError as error:
            raise _file_error(error, "the working directory", max_bytes) from None

    async def load(self, tree: bytes) -> None:
        """Write a file tree into the working directory of a new machine. `tree`: the result of `save`, of this
        machine or another one.

        Raises `OSError` if the files do not fit, `FileNotFoundError` if the machine is gone.
        """
        last = max(len(tree) - 1, 0) // protocol.PART
        parts = (tree[i * protocol.PART : (i + 1) * protocol.PART] for i in range(last + 1))
        await self._send(protocol.LOAD, (bytes([i == last]) + part for i, part in enumerate(parts)), len(tree))

    async def freeze(self) -> None:
        self._require_open()
        if self._frozen is None:
            self._frozen = asyncio.create_task(self._freeze())
        await asyncio.shield(self._frozen)

    async def _freeze(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # a machine that is gone needs no freeze
            await self._request(protocol.FREEZE, b"")

    async def snapshot(self) -> str:
        self._require_alive()
        try:
            return await self._snapshot(self)
        except ChannelLost as lost:
            await self._lose(lost)
            raise FileNotFoundError(f"the machine is gone: {self._gone}") from None

    async def renew(self, *, seed: bytes, clock_ns: int, host_name: str) -> None:
        """Give a restored machine a random seed, a time and a host name of its own.

        `clock_ns`: Unix time in nanoseconds. Raises `MachineError` if the agent does not answer or refuses.
        """
        try:
            await self._channel.renew(seed=seed, clock_ns=clock_ns, host_name=host_name)
        except (ChannelLost, OSError) as error:
            raise MachineError(
                "a restored machine could not get a new identity", str(error), hint="fork another machine"
            ) from None

    async def _request(self, kind: bytes, body: bytes, *, max_bytes: int = 0) -> bytes:
        self._require_alive()
        deadline_s = _FILES_S + max_bytes / _BYTES_PER_S
        try:
            return await self._channel.request(kind, body, deadline_s=deadline_s, max_bytes=max_bytes)
        except ChannelLost as lost:
            await self._lose(lost)
            raise FileNotFoundError(f"the machine is gone: {self._gone}") from None

    async def _send(self, kind: bytes, bodies: Iterable[bytes], num_bytes: int) -> None:
        """Send a request of several frames completely, even if the caller is cancelled."""
        self._require_alive()
        sending = asyncio.create_task(self._send_all(kind, bodies, _FILES_S + num_bytes / _BYTES_PER_S))
        sending.add_done_callback(consume_exception)
        try:
            await asyncio.shield(sending)
        except ChannelLost as lost:
            await self._lose(lost)
            raise FileNotFoundError(f"the machine is gone: {self._gone}") from None

    async def _send_all(self, kind: bytes, bodies: Iterable[bytes], deadline_s: float) -> None:
        reply = Reply()
        number = self._channel.begin(reply)
        with timeout_as_lost(deadline_s, "its agent to take and answer a request"):
            async with asyncio.timeout(deadline_s):
                for body in bodies:
                    await self._channel.wait_for_space()
                    self._channel.send(protocol.frame(kind, number, body))
                await reply.wait(deadline_s)

    async def _lose(self, lost: ChannelLost) -> None:
        """Handle a missing answer: end the machine. Raises `MachineError` if the host is to blame and not the
        machine's programs."""
        if self._closing is None and self._gone is None:
            why = self._blame() or ("" if self._channel.is_up else f"its agent did not start: {lost}")
            if why:
                raise MachineError("the connection to a machine was lost", why, hint="fork again")
            self._gone = str(lost)
            await self._end_once()
        else:
            self._gone = self._gone or "it was closed"

    async def _end_once(self) -> None:
        """End the machine. Afterwards nothing runs in it."""
        self._channel.close(self._gone or "it was closed")
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._end_once())
        await asyncio.shield(self._closing)

    def _require_alive(self) -> None:
        self._require_open()
        if self._gone is not None:
            raise FileNotFoundError(f"the machine is gone: {self._gone}")

    def _require_open(self) -> None:
        if self._closing is not None:
            raise MachineError("the machine is closed", hint="machines are used once: fork another one")


def _file_error(error: OSError, path: str, max_bytes: int | None = None) -> Exception:
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
