"""One command over a channel: what it is given as it takes it, what it prints as it comes, how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, Callable
from dataclasses import replace

from etude.environments.agent import protocol
from etude.environments.agent.channel import Channel, Lost
from etude.environments.agent.protocol import Ended, ProtocolError
from etude.environments.fair_time import PATIENCE, FairClock, fairly
from etude.environments.output import Capped
from etude.errors import MachineError
from etude.records.command import Command, ExecResult, Printed, Started

SLACK_S = 5.0  # what the agent may take to end a command after its deadline
_PART_BYTES = 64 << 10  # of standard input in one frame
_MOST_HELD = 512 << 10  # the agent keeps half of this of a command's end; whoever wants more gets everything
_OF_USERS = ("no such user", "becoming the command's user")  # the agent's words: of the machine's /etc/passwd


async def run(channel: Channel, command: Command, clock: FairClock | None = None) -> ExecResult:
    """Run a command. Raises `Lost` where there is no answer to be had, `Unconfined` where the agent cannot confine
    it, `NoUser` for a user that the machine has not; and what `tell` raises: then the command is killed.
    `clock` counts its deadline here; without one the agent does, by its own clock."""
    began = time.perf_counter()
    heard = _Heard(command, lambda: channel.send(protocol.frame(protocol.KILL, number)))
    number = channel.begin(heard)
    longest_s = command.deadline_s * (PATIENCE if clock is not None else 1.0)
    channel.send(protocol.run(number, replace(command, deadline_s=longest_s), _flags(command)))
    feeding = asyncio.create_task(_feed(channel, number, command.stdin, heard)) if command.has_input else None
    late, lost_s = False, 0.0
    try:
        if clock is not None:
            late, lost_s = await fairly(heard.ended, clock, command.deadline_s, heard.kill)
        async with asyncio.timeout(SLACK_S if clock is not None else command.deadline_s + SLACK_S):
            ended = await heard.ended
    except TimeoutError:
        raise Lost(f"a command did not end {SLACK_S:g} s after its deadline", late=True) from None
    finally:
        if feeding is not None:
            await _stop(feeding)
    return ExecResult(
        exit_code=ended.exit_code,
        output=heard.output.value(),
        timed_out=ended.late or late,
        truncated=heard.output.truncated,
        wall_s=time.perf_counter() - began,
        lost_s=lost_s,
    )


def _flags(command: Command) -> int:
    given = protocol.STDIN if command.has_input else 0
    if command.tell is not None:
        return given | protocol.APART
    return given | (protocol.WHOLE if command.output_bytes > _MOST_HELD else 0)


class _Heard:
    """What the agent answers to one command."""

    def __init__(self, command: Command, kill: Callable[[], None]) -> None:
        self.output, self._tell, self.kill = Capped(command.output_bytes), command.tell, kill
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.ended.add_done_callback(_retrieve)
        self.window = protocol.INPUT_WINDOW
        self.moved = asyncio.Event()

    def heard(self, kind: bytes, body: bytes) -> bool:
        if kind == protocol.OUTPUT and body:
            self.output.add(body[1:])
            self._told(Printed(1 if body[0] == 0 else body[0], body[1:]))
        elif kind == protocol.STARTED:
            self._told(Started(protocol.number(body)))
        elif kind == protocol.TAKEN:
            self.window = min(self.window + protocol.number(body), protocol.INPUT_WINDOW)
            self.moved.set()
        elif kind == protocol.ENDED:
            ended = protocol.ended(body)
            self.output.total = max(self.output.total, ended.printed)
            self._settle(ended)
            return True
        elif kind == protocol.REFUSED:
            self._settle(_refusal(*protocol.refused(body)))
            return True
        else:
            raise ProtocolError(f"an answer of kind {kind!r} to a command")
        return False

    def _told(self, event: Started | Printed) -> None:
        if self._tell is not None:
            try:
                self._tell(event)
            except Exception as error:  # noqa: BLE001 - the caller's own; others of the channel must not suffer
                self._tell = None
                self._settle(error)
                self.kill()

    def lost(self, why: str) -> None:
        self._settle(Lost(why))

    def _settle(self, result: Ended | Exception) -> None:
        if self.ended.done():
            return
        if isinstance(result, Ended):
            self.ended.set_result(result)
        else:
            self.ended.set_exception(result)


class NoUser(ValueError):
    """The machine's own list of users has not whom a command shall run as, or nobody that one can become."""


class Unconfined(MachineError):
    """The agent says that it could not confine a command."""


def as_outcome(refusal: NoUser | Unconfined, *, used: bool) -> ExecResult:
    """What a refusal means for a command: that it did not start, as a shell has it (126), for what ran in a machine
    before can have brought it about. Raises the `Unconfined` of a machine that is not `used`."""
    if isinstance(refusal, Unconfined) and not used:
        raise refusal
    words = refusal.facts if isinstance(refusal, Unconfined) else str(refusal)
    return ExecResult(
        exit_code=126, output=f"cannot start: {words}\n".encode(), timed_out=False, truncated=False, wall_s=0.0
    )


def _refusal(number: int, words: str) -> Exception:
    if words in _OF_USERS:
        return NoUser(words)
    return Unconfined("a command could not be confined", words, hint="see the machine's limits")


async def _feed(channel: Channel, number: int, stdin: bytes | AsyncIterable[bytes], heard: _Heard) -> None:
    try:
        if isinstance(stdin, bytes):
            await _pass(channel, number, stdin, heard)
        else:
            async for part in stdin:
                await _pass(channel, number, part, heard)
    finally:
        if not heard.ended.done():
            channel.send(protocol.frame(protocol.INPUT, number))


async def _pass(channel: Channel, number: int, data: bytes, heard: _Heard) -> None:
    """Ends with the command: whoever runs it cancels this."""
    view = memoryview(data)
    while view:
        await channel.room()
        while heard.window <= 0:
            heard.moved.clear()
            await heard.moved.wait()
        part = view[: min(_PART_BYTES, heard.window)]
        channel.send(protocol.frame(protocol.INPUT, number, bytes(part)))
        heard.window -= len(part)
        view = view[len(part) :]


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # its source's trouble: the command has met the end of its input


def _retrieve(future: asyncio.Future[Ended]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        future.exception()  # nobody may be waiting any more
