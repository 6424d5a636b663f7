"""Run a command on a remote machine and get its result, even if the connection breaks.

On etude's server the command is requested again with its key and the number of events received so far. The stream of
events continues there, or the server returns the recorded result. On other services the running command is found by its
tag, and its stream is joined. If it has ended meanwhile, its result is lost: this is an error, and the command is not
run twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from pathlib import PurePosixPath

from etude.environments.remote import messages as m
from etude.environments.remote.connect import Code, RpcError
from etude.environments.remote.external_service import OutputCollector, result_of_error
from etude.environments.remote.machine_client import MachineClient
from etude.errors import MachineError
from etude.records.command import Command, ExecResult, OutputCallback, OutputChunk, ProcessStarted

_PIECE = 1 << 20  # of standard input in one call
_GRACE_S = 30.0  # to receive the result after the command's deadline
_START, _CONNECT = "process.Process/Start", "process.Process/Connect"
_WAITS_S = (0.05, 0.2, 0.5, 1.0, 2.0)  # between two attempts to reconnect
_NO_END = "the stream ended before the command"


async def run_on_etude(client: MachineClient, command: Command) -> ExecResult:
    """Run a command on etude's server and return its result.

    Broken connections are opened again, up to `ClientConfig.tries` times in a row. Raises `MachineError` if the machine
    cannot be reached or has ended, `ValueError` if the server refuses the arguments."""
    end, received, tries = time.monotonic() + command.deadline_s + _GRACE_S, 0, 0
    async with _input_feeder(client, command) as feed:
        while True:
            left_s = max(end - time.monotonic(), 0.001)
            start = _etude_start(command, received)
            try:
                async with client.stream(
                    _START, start, user=command.user, deadline_s=left_s, timeout_ms=None
                ) as events:
                    async for update in events:
                        event = update.event
                        if event.keepalive is not None:
                            continue
                        received, tries = received + 1, 0
                        _report(event, command.on_output)
                        feed()
                        if event.end is not None:
                            return _etude_result(event.end)
                raise RpcError(Code.UNAVAILABLE, _NO_END)
            except RpcError as error:
                if error.code is not Code.UNAVAILABLE or "was not found" in error.message:
                    raise _failed(client, command, error) from None
                tries = await _wait_again(client, command, tries, end, error)


async def run_on_external(client: MachineClient, command: Command) -> ExecResult:
    """Run a command on another service with E2B's API and return its result.

    Broken connections are opened again, up to `ClientConfig.tries` times in a row. Raises `MachineError` if the machine
    cannot be reached or the result is lost, `ValueError` if the service refuses the arguments."""
    began, tries = time.monotonic(), 0
    end = began + command.deadline_s
    output = OutputCollector(command.output_bytes, command.on_output, began=began)
    method: str = _START
    message: object = _external_start(client, command)
    async with _input_feeder(client, command) as feed:
        while (left_s := end - time.monotonic()) > 0:
            timeout_ms = max(1, round(left_s * 1000))
            try:
                async with client.stream(
                    method, message, user=command.user, deadline_s=left_s + 1.0, timeout_ms=timeout_ms
                ) as events:
                    async for update in events:
                        output.add(update.event)
                        feed()
                        if update.event.end is not None:
                            return output.ended(update.event.end)
                raise RpcError(Code.UNAVAILABLE, _NO_END)
            except RpcError as error:
                known = result_of_error(error, output)
                if known is not None:
                    return known
                if error.code is not Code.UNAVAILABLE:
                    raise _failed(client, command, error) from None
                tries = await _wait_again(client, command, tries, end, error)
                if error.hint != "unsent":
                    await _must_run(client, command)
                    output.mark_incomplete()
                    method, message = _CONNECT, m.Selected(process=m.Selector(tag=_tag(command)))
    return output.result(137, timed_out=True)


def _etude_start(command: Command, received: int) -> m.Start:
    exact = m.Exact(
        key=command.key,
        deadline_ms=max(1, round(command.deadline_s * 1000)),
        output_bytes=command.output_bytes,
        tell=command.on_output is not None,
        after=received,
    )
    process = _config(command, command.cwd or None)
    return m.Start(process=process, tag=_tag(command), stdin=command.has_input, etude=exact)


def _external_start(client: MachineClient, command: Command) -> m.Start:
    """The request with an absolute working directory, for external services."""
    process = _config(command, str(PurePosixPath(client.config.workdir) / command.cwd))
    return m.Start(process=process, tag=_tag(command), stdin=command.has_input)


def _config(command: Command, cwd: str | None) -> m.Config:
    return m.Config(cmd=command.argv[0], args=[*command.argv[1:]], envs=dict(command.env), cwd=cwd)


def _tag(command: Command) -> str:
    return f"etude-{command.key}"


async def _must_run(client: MachineClient, command: Command) -> None:
    """Raise `MachineError` if the command does not run any more, since its result is lost."""
    running = await client.unary("process.Process/List", {}, m.ProcessList)
    if not any(process.tag == _tag(command) for process in running.processes):
        facts = "the connection broke, and the command has ended since; it is not run a second time"
        what = f"the result of command {command.key!r} is lost"
        raise MachineError(what, facts, hint="fork another machine")


async def _wait_again(client: MachineClient, command: Command, tries: int, end: float, error: RpcError) -> int:
    if tries >= client.config.tries or time.monotonic() >= end:
        facts = f"command {command.key!r}, {tries} attempts: {error.message}"
        hint = "check that the service runs, and call again with the same key"
        raise MachineError(f"machine {client.id} cannot be reached", facts, hint=hint) from None
    await asyncio.sleep(_WAITS_S[min(tries, len(_WAITS_S) - 1)])
    return tries + 1


def _failed(client: MachineClient, command: Command, error: RpcError) -> Exception:
    if error.code in (Code.INVALID_ARGUMENT, Code.UNAUTHENTICATED):
        return ValueError(error.message)
    facts = f"command {command.key!r}: {error.code}: {error.message}"
    return MachineError(f"machine {client.id} cannot run the command", facts, hint=error.hint or "fork another one")


@contextlib.asynccontextmanager
async def _input_feeder(client: MachineClient, command: Command) -> AsyncIterator[Callable[[], None]]:
    """Yield a function that starts to send standard input, once. Sending stops at the end of the `with` block."""
    feeding: list[asyncio.Task[None]] = []

    def begin() -> None:
        if command.has_input and not feeding:
            feeding.append(asyncio.create_task(_feed(client, command)))

    try:
        yield begin
    finally:
        for task in feeding:
            task.cancel()
        await asyncio.gather(*feeding, return_exceptions=True)


async def _feed(client: MachineClient, command: Command) -> None:
    """Send standard input in pieces, then close it. Errors are ignored: the command may not read it any more."""
    select, offset = m.Selector(tag=_tag(command)), 0
    with contextlib.suppress(RpcError):
        async for piece in _pieces(command.stdin):
            mark = offset if client.is_etude else None
            await _send(client, m.SendInput(process=select, input=m.Input(stdin=piece), etude_offset=mark))
            offset += len(piece)
        await client.unary("process.Process/CloseStdin", m.Selected(process=select), dict)


def _report(event: m.Event, on_event: OutputCallback | None) -> None:
    if on_event is None:
        return
    if event.start is not None and event.start.pid:
        on_event(ProcessStarted(event.start.pid))
    if event.data is not None:
        for stream, data in ((1, event.data.stdout), (2, event.data.stderr)):
            if data:
                on_event(OutputChunk(stream, data))


def _etude_result(ended: m.Ended) -> ExecResult:
    outcome = ended.etude or m.Outcome()
    return ExecResult(
        exit_code=ended.exit_code,
        output=outcome.output,
        timed_out=outcome.timed_out,
        truncated=outcome.truncated,
        wall_s=outcome.wall_s,
    )


async def _send(client: MachineClient, sent: m.SendInput) -> None:
    """Send one piece of input. If the command does not read yet, retry; the offset makes that safe on etude's
    server."""
    while True:
        try:
            await client.unary("process.Process/SendInput", sent, dict, idempotent=client.is_etude)
            return
        except (MachineError, RpcError) as error:
            is_late = isinstance(error, MachineError) or error.code is Code.DEADLINE_EXCEEDED
            if not is_late or not client.is_etude:
                raise
        await asyncio.sleep(_WAITS_S[-1])


async def _pieces(stdin: bytes | AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    if isinstance(stdin, bytes):
        for start in range(0, len(stdin), _PIECE):
            yield stdin[start : start + _PIECE]
        return
    async for part in stdin:
        for start in range(0, len(part), _PIECE):
            yield part[start : start + _PIECE]
