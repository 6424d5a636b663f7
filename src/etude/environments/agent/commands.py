"""Run one command over a channel: send its standard input, collect its output, report how it ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Callable
from dataclasses import replace

from etude.environments.agent import protocol
from etude.environments.agent.channel import Channel, ChannelLost
from etude.environments.agent.protocol import Ended, ProtocolError
from etude.environments.command_registry import cancel_and_wait, consume_exception
from etude.environments.fair_time import MAX_EXTENSION, FairClock, wait_until_deadline
from etude.environments.output import OutputBuffer
from etude.errors import MachineError
from etude.records.command import Command, ExecResult, OutputChunk, ProcessStarted

SLACK_S = 5.0  # for the agent to end a command after its deadline
_PART_BYTES = 64 << 10  # of standard input in one frame
_MAX_KEPT_BYTES = 512 << 10  # the agent keeps half of this for the end of the output; above it, all output is sent
_USER_ERRORS = ("no such user", "becoming the command's user")  # the agent's messages about users


async def run(channel: Channel, command: Command, clock: FairClock | None = None) -> ExecResult:
    """Run a command in the machine behind `channel` and return its result.

    `clock` measures the command's deadline on the host; None: the agent measures it by its own clock.

    Raises `ChannelLost` if no answer comes, `ConfinementFailed` if the agent cannot confine the command, and
    `UnknownUser` if the agent cannot switch to the command's user. An exception of the command's `on_output` callback
    kills the command and is raised here.
    """
    began = time.perf_counter()
    handler = _CommandHandler(command, lambda: channel.send(protocol.frame(protocol.KILL, number)))
    number = channel.begin(handler)
    longest_s = command.deadline_s * (MAX_EXTENSION if clock is not None else 1.0)
    channel.send(protocol.run(number, replace(command, deadline_s=longest_s), _flags(command)))
    feeding = asyncio.create_task(_feed(channel, number, command.stdin, handler)) if command.has_input else None
    late, lost_s = False, 0.0
    try:
        if clock is not None:
            late, lost_s = await wait_until_deadline(handler.ended, clock, command.deadline_s, handler.kill)
        async with asyncio.timeout(SLACK_S if clock is not None else command.deadline_s + SLACK_S):
            ended = await handler.ended
    except TimeoutError:
        raise ChannelLost(f"a command did not end {SLACK_S:g} s after its deadline", late=True) from None
    finally:
        if feeding is not None:
            await cancel_and_wait(feeding)
    return ExecResult(
        exit_code=ended.exit_code,
        output=handler.output.value(),
        timed_out=ended.late or late,
        truncated=handler.output.truncated,
        wall_s=time.perf_counter() - began,
        lost_s=lost_s,
    )


def _flags(command: Command) -> int:
    given = protocol.STDIN if command.has_input else 0
    if command.on_output is not None:
        return given | protocol.SEPARATE_STREAMS
    return given | (protocol.ALL_OUTPUT if command.output_bytes > _MAX_KEPT_BYTES else 0)


class _CommandHandler:
    def __init__(self, command: Command, kill: Callable[[], None]) -> None:
        self.output, self._tell, self.kill = OutputBuffer(command.output_bytes), command.on_output, kill
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.ended.add_done_callback(consume_exception)
        self.window = protocol.INPUT_WINDOW
        self.window_moved = asyncio.Event()

    def on_answer(self, kind: bytes, body: bytes) -> bool:
        if kind == protocol.OUTPUT and body:
            self.output.add(body[1:])
            self._report(OutputChunk(1 if body[0] == 0 else body[0], body[1:]))
        elif kind == protocol.STARTED:
            self._report(ProcessStarted(protocol.number(body)))
        elif kind == protocol.TAKEN:
            self.window = min(self.window + protocol.number(body), protocol.INPUT_WINDOW)
            self.window_moved.set()
        elif kind == protocol.ENDED:
            ended = protocol.ended(body)
            self.output.total = max(self.output.total, ended.printed)
            self._resolve(ended)
            return True
        elif kind == protocol.REFUSED:
            self._resolve(_refusal(*protocol.refused(body)))
            return True
        else:
            raise ProtocolError(f"an answer of kind {kind!r} to a command")
        return False

    def _report(self, event: ProcessStarted | OutputChunk) -> None:
        if self._tell is not None:
            try:
                self._tell(event)
            except Exception as error:  # noqa: BLE001 - the caller's own; others of the channel must not suffer
                self._tell = None
                self._resolve(error)
                self.kill()

    def on_lost(self, why: str) -> None:
        self._resolve(ChannelLost(why))

    def _resolve(self, result: Ended | Exception) -> None:
        if self.ended.done():
            return
        if isinstance(result, Ended):
            self.ended.set_result(result)
        else:
            self.ended.set_exception(result)


class UnknownUser(ValueError):
    """Raised when the machine does not have a command's user, or its agent cannot switch to that user."""


class ConfinementFailed(MachineError):
    """Raised when an agent reports that it could not confine a command."""


def as_outcome(refusal: UnknownUser | ConfinementFailed, *, used: bool) -> ExecResult:
    """Return the result of a command that the agent refused to start: exit code 126, as in a shell.

    `used`: whether commands have run in the machine before, since these may have caused the refusal. Otherwise the host
    must have caused a `ConfinementFailed`, which is then raised.
    """
    if isinstance(refusal, ConfinementFailed) and not used:
        raise refusal
    text = refusal.facts if isinstance(refusal, ConfinementFailed) else str(refusal)
    return ExecResult(
        exit_code=126, output=f"cannot start: {text}\n".encode(), timed_out=False, truncated=False, wall_s=0.0
    )


def _refusal(number: int, text: str) -> Exception:
    if text in _USER_ERRORS:
        return UnknownUser(text)
    return ConfinementFailed(
        "the limits of a command could not be set",
        text,
        hint="raise the machine's limits ([machines] in a config), or check those of the host (ulimit -a)",
    )


async def _feed(channel: Channel, number: int, stdin: bytes | AsyncIterable[bytes], handler: _CommandHandler) -> None:
    try:
        if isinstance(stdin, bytes):
            await _send_input(channel, number, stdin, handler)
        else:
            async for part in stdin:
                await _send_input(channel, number, part, handler)
    finally:
        if not handler.ended.done():
            channel.send(protocol.frame(protocol.INPUT, number))


async def _send_input(channel: Channel, number: int, data: bytes, handler: _CommandHandler) -> None:
    """Send data as the agent accepts it. No deadline of its own: it is cancelled when the command ends."""
    view = memoryview(data)
    while view:
        await channel.wait_for_space()
        while handler.window <= 0:
            handler.window_moved.clear()
            await handler.window_moved.wait()
        part = view[: min(_PART_BYTES, handler.window)]
        channel.send(protocol.frame(protocol.INPUT, number, bytes(part)))
        handler.window -= len(part)
        view = view[len(part) :]
