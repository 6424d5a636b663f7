"""One command of a remote machine, heard to its end: by etude's server, or by another's.

With etude's server a command is asked for again after a broken connection, with its key and how much of it has been
told: it goes on where it was, or is answered from the record. With another's, the command that runs is looked for by
its tag and connected to; where it cannot be found any more, that is an error, and never a second run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from pathlib import PurePosixPath

from etude.environments.remote import messages as m
from etude.environments.remote.connect import Code, RpcError
from etude.environments.remote.foreign import Collected, as_result
from etude.environments.remote.service import Service
from etude.errors import MachineError
from etude.records.command import Command, ExecResult, Printed, Started, Tell

_PIECE = 1 << 20  # of standard input, in one call
_GRACE_S = 30.0  # after a command's deadline, for its result to come
_START, _CONNECT = "process.Process/Start", "process.Process/Connect"
_WAITS_S = (0.05, 0.2, 0.5, 1.0, 2.0)  # between two tries to hear of a command again
_NO_END = "the stream ended before the command"


async def run_exactly(service: Service, command: Command) -> ExecResult:
    """By etude's own server. Raises `MachineError`, `ValueError`."""
    end, heard, tries = time.monotonic() + command.deadline_s + _GRACE_S, 0, 0
    async with _fed(service, command) as feed:
        while True:
            left_s = max(end - time.monotonic(), 0.001)
            start = _exact_start(command, heard)
            try:
                async with service.stream(
                    _START, start, user=command.user, deadline_s=left_s, timeout_ms=None
                ) as events:
                    async for happened in events:
                        event = happened.event
                        if event.keepalive is not None:
                            continue
                        heard, tries = heard + 1, 0
                        _tell(event, command.tell)
                        feed()
                        if event.end is not None:
                            return _exact_result(event.end)
                raise RpcError(Code.UNAVAILABLE, _NO_END)
            except RpcError as error:
                if error.code is not Code.UNAVAILABLE or "was not found" in error.message:
                    raise _failed(service, command, error) from None
                tries = await _wait_again(service, command, tries, end, error)


async def run_abroad(service: Service, command: Command) -> ExecResult:
    """By another service: found by its tag if the connection breaks. Raises `MachineError`, `ValueError`."""
    began, tries = time.monotonic(), 0
    end = began + command.deadline_s
    got = Collected(command.output_bytes, command.tell, began=began)
    method: str = _START
    message: object = _placed_start(service, command)
    async with _fed(service, command) as feed:
        while (left_s := end - time.monotonic()) > 0:
            timeout_ms = max(1, round(left_s * 1000))
            try:
                async with service.stream(
                    method, message, user=command.user, deadline_s=left_s + 1.0, timeout_ms=timeout_ms
                ) as events:
                    async for happened in events:
                        got.add(happened.event)
                        feed()
                        if happened.event.end is not None:
                            return got.ended(happened.event.end)
                raise RpcError(Code.UNAVAILABLE, _NO_END)
            except RpcError as error:
                known = as_result(error, got)
                if known is not None:
                    return known
                if error.code is not Code.UNAVAILABLE:
                    raise _failed(service, command, error) from None
                tries = await _wait_again(service, command, tries, end, error)
                if error.hint != "unsent":
                    await _must_run(service, command)
                    got.missed()
                    method, message = _CONNECT, m.Selected(process=m.Selector(tag=_tag(command)))
    return got.result(137, timed_out=True)


def _exact_start(command: Command, heard: int) -> m.Start:
    exact = m.Exact(
        key=command.key,
        deadline_ms=max(1, round(command.deadline_s * 1000)),
        output_bytes=command.output_bytes,
        tell=command.tell is not None,
        after=heard,
    )
    process = _config(command, command.cwd or None)
    return m.Start(process=process, tag=_tag(command), stdin=command.has_input, etude=exact)


def _placed_start(service: Service, command: Command) -> m.Start:
    """In the working directory, which another service does not know of."""
    process = _config(command, str(PurePosixPath(service.config.workdir) / command.cwd))
    return m.Start(process=process, tag=_tag(command), stdin=command.has_input)


def _config(command: Command, cwd: str | None) -> m.Config:
    return m.Config(cmd=command.argv[0], args=[*command.argv[1:]], envs=dict(command.env), cwd=cwd)


def _tag(command: Command) -> str:
    """What it is known by to those who list processes."""
    return f"etude-{command.key}"


async def _must_run(service: Service, command: Command) -> None:
    """It runs still; else what became of it is not known, and it is not tried again."""
    running = await service.unary("process.Process/List", {}, m.ProcessList)
    if not any(process.tag == _tag(command) for process in running.processes):
        facts = "the connection broke, and it does not run any more; it is not run a second time"
        what = f"what became of command {command.key!r} is not known"
        raise MachineError(what, facts, hint="fork another machine")


async def _wait_again(service: Service, command: Command, tries: int, end: float, error: RpcError) -> int:
    if tries >= service.config.tries or time.monotonic() >= end:
        facts = f"command {command.key!r}, {tries} tries to hear of it: {error.message}"
        hint = "is the service up? ask again with the same key"
        raise MachineError(f"machine {service.id} cannot be reached", facts, hint=hint) from None
    await asyncio.sleep(_WAITS_S[min(tries, len(_WAITS_S) - 1)])
    return tries + 1


def _failed(service: Service, command: Command, error: RpcError) -> Exception:
    if error.code in (Code.INVALID_ARGUMENT, Code.UNAUTHENTICATED):
        return ValueError(error.message)
    facts = f"command {command.key!r}: {error.code}: {error.message}"
    return MachineError(f"machine {service.id} does not run commands", facts, hint=error.hint or "fork another one")


@contextlib.asynccontextmanager
async def _fed(service: Service, command: Command) -> AsyncIterator[Callable[[], None]]:
    """What begins to give the command its standard input, once; it is over with the block."""
    feeding: list[asyncio.Task[None]] = []

    def begin() -> None:
        if command.has_input and not feeding:
            feeding.append(asyncio.create_task(_feed(service, command)))

    try:
        yield begin
    finally:
        for task in feeding:
            task.cancel()
        await asyncio.gather(*feeding, return_exceptions=True)


async def _feed(service: Service, command: Command) -> None:
    """Standard input, piece by piece, then its end. Who does not read it any more is not a failure."""
    select, offset = m.Selector(tag=_tag(command)), 0
    with contextlib.suppress(RpcError):
        async for piece in _pieces(command.stdin):
            mark = offset if service.is_etude else None
            await _give(service, m.SendInput(process=select, input=m.Input(stdin=piece), etude_offset=mark))
            offset += len(piece)
        await service.unary("process.Process/CloseStdin", m.Selected(process=select), dict)


def _tell(event: m.Event, tell: Tell | None) -> None:
    if tell is None:
        return
    if event.start is not None and event.start.pid:
        tell(Started(event.start.pid))
    if event.data is not None:
        for stream, data in ((1, event.data.stdout), (2, event.data.stderr)):
            if data:
                tell(Printed(stream, data))


def _exact_result(ended: m.Ended) -> ExecResult:
    outcome = ended.etude or m.Outcome()
    return ExecResult(
        exit_code=ended.exit_code,
        output=outcome.output,
        timed_out=outcome.timed_out,
        truncated=outcome.truncated,
        wall_s=outcome.wall_s,
    )


async def _give(service: Service, sent: m.SendInput) -> None:
    """One piece; again and again, where its offset makes that safe, to a command that does not read it yet."""
    while True:
        try:
            await service.unary("process.Process/SendInput", sent, dict, again=service.is_etude)
            return
        except (MachineError, RpcError) as error:
            is_late = isinstance(error, MachineError) or error.code is Code.DEADLINE_EXCEEDED
            if not is_late or not service.is_etude:
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
