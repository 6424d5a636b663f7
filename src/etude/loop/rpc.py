"""Remote procedure calls between the conductor and its child processes, over an inherited socket pair.

A frame is a length (u32, little endian) and msgpack ``[call id, method or status, payload bytes]``. Payloads are
records; none has a step's tokens, which are in files that calls refer to. While a child makes progress
(`etude.progress`) it sends a message, so a deadline limits the time without progress, not the duration of the work.
Measured: 15 to 91 µs per call, against 1 ms through a cluster runtime.

When one end closes, the other sees end-of-file: pending calls raise `ProcessLost`, and a child exits, so that nothing
outlives the conductor."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import socket
import struct
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

from etude import errors, progress
from etude.errors import DeadlineExceeded, EtudeError
from etude.records.wire import pack, unpack

MAX_FRAME_BYTES = 1 << 30
CANCEL = "cancel"  # the method with which a caller cancels a call
PROGRESS = "gets on"  # the status of a message that the child makes progress; it belongs to no call
BEAT_S = 1.0  # interval of the check for progress
_LENGTH = struct.Struct("<I")
_frame = msgspec.msgpack.Decoder(tuple[int, str, bytes])
T = TypeVar("T")
LINK_S = 30.0  # for another machine to connect, and until the loss of one is noticed
_IDLE_S, _BETWEEN_S, _PROBES = 10, 5, 4  # of TCP keep-alive: together less than LINK_S


def enable_keepalive(sock: socket.socket) -> socket.socket:
    """Make a TCP connection fail when the peer is silent for `LINK_S` seconds, and disable Nagle's algorithm.

    Returns the socket. asyncio disables Nagle only for sockets that were created with the protocol number of TCP, and a
    call would wait 40 ms for the acknowledgement of the previous one."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _BETWEEN_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(LINK_S * 1000))
    return sock


class ProcessLost(EtudeError):
    """The process at the other end is gone. It is unknown whether it has finished the call."""


class CallFailed(EtudeError):
    """A call raised an exception that is not an `EtudeError`: a defect. Has the child's traceback."""


class MessageTooLarge(EtudeError):
    """A call or its result does not fit into a frame. Nothing of it was sent."""


class _Waiting(NamedTuple):
    answer: asyncio.Future[bytes]
    method: str
    began: float  # time of the event loop
    deadline_s: float


class Caller(asyncio.Protocol):
    """The end of a child's socket in the conductor (the main process of a run): calls methods of the child `name`.

    `max_frame_bytes` limits messages in both directions."""

    def __init__(self, sock: socket.socket, name: str, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.name = name
        self._sock, self._max_frame_bytes = sock, max_frame_bytes
        self._ids = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._transport: asyncio.WriteTransport | None = None
        self._received = bytearray()  # the first part of a frame
        self._progressed = -math.inf  # when the child made progress, in time of the event loop
        self._timer: asyncio.TimerHandle | None = None  # one for all calls: fires when the first could be overdue
        self.lost = asyncio.Event()

    async def open(self) -> None:
        """Start to read results from the socket. Call it before `call`."""
        self._loop = asyncio.get_running_loop()
        self._transport, _ = await self._loop.create_connection(lambda: self, sock=self._sock)

    async def call(self, method: str, kind: type[T], *args: object, deadline_s: float) -> T:
        """Call a method of the child and return its result, decoded as type `kind`.

        `deadline_s` is how long the child may send neither a result nor a progress message; then the call is cancelled.
        Raises `ProcessLost`, `CallFailed`, `DeadlineExceeded`, `MessageTooLarge`, or the error that the child raised.
        """
        if self._transport is None or self.lost.is_set():
            raise ProcessLost(f"{self.name} is gone", f"calling {method}", hint=f"see logs/{self.name}.log")
        number = next(self._ids)
        self._write(number, method, pack(args))
        waiting = _Waiting(self._loop.create_future(), method, self._loop.time(), deadline_s)
        self._waiting[number] = waiting
        self._watch(waiting.began + deadline_s)
        try:
            payload = await waiting.answer
        except asyncio.CancelledError:
            if not self.lost.is_set():  # otherwise its machine and slots would stay in use
                self._write(number, CANCEL, b"")
            raise
        finally:
            self._waiting.pop(number, None)
        return unpack(payload, kind)

    def _write(self, number: int, method: str, payload: bytes) -> None:
        assert self._transport is not None, "open comes first"
        self._transport.write(_framed(number, method, payload, self._max_frame_bytes))

    def _watch(self, due: float) -> None:
        """Look at the deadlines at this time, or earlier."""
        if self._timer is None or due < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due, self._end_overdue)

    def _end_overdue(self) -> None:
        """End the calls past their deadlines, and watch the others."""
        now, self._timer = self._loop.time(), None
        for number, (answer, method, began, deadline_s) in self._waiting.items():
            due = max(began, self._progressed) + deadline_s
            if answer.done():
                continue
            if due > now:
                self._watch(due)
                continue
            self._write(number, CANCEL, b"")
            facts = f"waited {deadline_s:g} s"
            if self._progressed > began:
                facts = f"silent for {deadline_s:g} s, after it made progress for {self._progressed - began:.0f} s"
            hint = f"see logs/{self.name}.log"
            answer.set_exception(DeadlineExceeded(f"{self.name} did not answer {method}", facts, hint=hint))

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = 0
        try:
            while len(self._received) >= (body := start + _LENGTH.size):
                end = body + _checked(_LENGTH.unpack_from(self._received, start)[0], self._max_frame_bytes)
                if len(self._received) < end:
                    break
                self._answer(*_frame.decode(self._received[body:end]))
                start = end
        except (ConnectionError, msgspec.DecodeError):
            self.abort()
        del self._received[:start]

    def _answer(self, number: int, status: str, payload: bytes) -> None:
        if status == PROGRESS:
            self._progressed = self._loop.time()
        elif (waiting := self._waiting.get(number)) is None or waiting.answer.done():
            return
        elif status == "ok":
            waiting.answer.set_result(payload)
        else:
            waiting.answer.set_exception(_raised(self.name, status, payload))

    def eof_received(self) -> None:
        self.abort()  # the child is gone, so what was not sent stays unsent

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        if self._timer is not None:
            self._timer.cancel()
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                hint = f"see logs/{self.name}.log"
                waiting.answer.set_exception(
                    ProcessLost(f"{self.name} ended", f"during the call {waiting.method}", hint=hint)
                )

    def close(self) -> None:
        """Close the socket. The child sees end-of-file and exits. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the socket without a handshake, when the peer is known to be gone. Idempotent."""
        if self._transport is not None:
            self._transport.abort()


def _raised(name: str, status: str, payload: bytes) -> EtudeError:
    if status == "error":
        kind, what, facts, hint = unpack(payload, tuple[str, str, str, str])
        known = getattr(errors, kind, EtudeError)
        return (known if issubclass(known, EtudeError) else EtudeError)(what, facts, hint=hint)
    return CallFailed(f"{name} failed", payload.decode(errors="replace"), hint="this is a defect of etude: report it")


Handler = Callable[..., Awaitable[object]]


async def serve(
    sock: socket.socket,
    handlers: dict[str, tuple[tuple[Any, ...], Handler]],
    *,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    beat_s: float = BEAT_S,
) -> None:
    """Answer calls until the other end closes. `handlers`: method → (argument types, coroutine function).

    Calls run concurrently, each in its own task, which is cancelled when the caller cancels the call. Every `beat_s`
    seconds, one message is sent to the caller if this process has made progress, so that its deadlines start again."""
    reader, writer = await asyncio.open_connection(sock=sock)
    tasks: dict[int, asyncio.Task[None]] = {}
    beats = asyncio.create_task(_beat(writer, beat_s), name="report progress")
    try:
        while True:
            number, method, payload = await _read(reader, max_frame_bytes)
            if method == CANCEL:
                if number in tasks:
                    tasks[number].cancel()
                continue
            kinds, handler = handlers[method]
            kind: Any = tuple.__class_getitem__(kinds)
            tasks[number] = asyncio.create_task(
                _answer(writer, number, handler, unpack(payload, kind), max_frame_bytes)
            )
            tasks[number].add_done_callback(functools.partial(_forget, tasks, number))
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    finally:
        for task in (beats, *tasks.values()):
            task.cancel()
        await asyncio.gather(beats, *tasks.values(), return_exceptions=True)
        writer.close()


def _forget(tasks: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del tasks[number]


async def _beat(writer: asyncio.StreamWriter, beat_s: float) -> None:
    seen = progress.count()
    while True:
        await asyncio.sleep(beat_s)
        if seen != (seen := progress.count()):
            writer.write(_framed(0, PROGRESS, b"", MAX_FRAME_BYTES))


async def _answer(
    writer: asyncio.StreamWriter, number: int, handler: Handler, arguments: tuple[Any, ...], max_frame_bytes: int
) -> None:
    try:
        status, payload = "ok", pack(await handler(*arguments))
    except EtudeError as error:
        status, payload = "error", pack((type(error).__name__, error.what, error.facts, error.hint))
    except Exception:  # noqa: BLE001  the boundary: it is reported to the caller with its traceback
        status, payload = "failed", traceback.format_exc().encode()
    try:
        writer.write(_framed(number, status, payload, max_frame_bytes))
    except MessageTooLarge as error:
        payload = pack((type(error).__name__, error.what, error.facts, error.hint))
        writer.write(_framed(number, "error", payload, MAX_FRAME_BYTES))
    await writer.drain()


def _framed(number: int, word: str, payload: bytes, max_bytes: int) -> bytes:
    """A frame. Raises `MessageTooLarge`: the other end would treat a larger frame as damage and close the
    connection."""
    frame = msgspec.msgpack.encode((number, word, payload))
    if len(frame) > max_bytes:
        what = f"{'the answer of a call' if word in ('ok', 'error', 'failed') else f'a call of {word}'} is too large"
        hint = "lower experience.groups_per_step or experience.group_size, or use smaller tasks"
        raise MessageTooLarge(what, f"it has {len(frame)} bytes, at most {max_bytes} are allowed", hint=hint)
    return _LENGTH.pack(len(frame)) + frame


async def _read(reader: asyncio.StreamReader, max_bytes: int) -> tuple[int, str, bytes]:
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return _frame.decode(await reader.readexactly(_checked(size, max_bytes)))


def _checked(size: int, max_bytes: int) -> int:
    if size > max_bytes:
        raise ConnectionError(f"a frame of {size} bytes")
    return size
