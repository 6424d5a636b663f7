"""The host's end of the channel to an agent: many requests at once, matched by their ids, on one or two descriptors.

Reading never blocks, so a flood of output cannot delay the answer to another request. Senders wait until the buffer has
space. A channel ends once, for one reason, and everything that waits for it gets `ChannelLost`. Ids start at a random
number, since an agent that was restored from a snapshot may still answer earlier requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from etude.environments.agent import protocol
from etude.environments.agent.protocol import Frame, ProtocolError
from etude.environments.command_registry import consume_exception

_READ_BYTES = 256 << 10
_MAX_UNSENT_BYTES = 1 << 20  # buffered for sending; beyond this, senders wait
_LONGEST_NUDGE_S = 1.0


class ChannelLost(Exception):
    """Raised when a request gets no answer, because the channel has ended or the request's deadline has passed (`late`
    is True)."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


class Handler(Protocol):
    """An object that receives the answers to one request. `Channel` calls its methods in the event loop."""

    def on_answer(self, kind: bytes, body: bytes) -> bool:
        """Handle one answer frame of kind `kind`, and return whether it was the last.

        The kinds are constants of `agent.protocol`. Raises `ProtocolError` for an invalid answer; this ends the
        channel.
        """
        ...

    def on_lost(self, why: str) -> None:
        """Handle that no further answer will come. `why`: the reason, as a clause such as "it was closed"."""
        ...


class Channel:
    """A channel to the agent (the program in a machine that serves requests) over file descriptors, which it closes at
    its end. For one event loop.

    `read_fd`, `write_fd`: descriptors to read from and to write to; `write_fd` None: `read_fd` is used in both
    directions.

    `after` is for an agent that was restored from a snapshot: bytes that mark the end of its old output. Everything up
    to this mark is skipped. Answers to unknown requests are ignored until the first answer to a known request.

    `nudge_s` is for transports over which an agent can miss a wake-up. If the agent has not confirmed the sent bytes
    within this many seconds, PING is sent again, at doubling intervals. None: never.
    """

    def __init__(
        self, read_fd: int, write_fd: int | None = None, *, after: bytes = b"", nudge_s: float | None = None
    ) -> None:
        self._in, self._out = read_fd, read_fd if write_fd is None else write_fd
        self._loop = asyncio.get_running_loop()
        self._parser = protocol.Parser()
        self._next = secrets.randbelow(1 << 31) + 1
        self._handlers: dict[int, Handler] = {}
        self._unsent = bytearray()
        self._queued: bytearray | None = None  # data to send after `paused`
        self._has_space = asyncio.Event()
        self._has_space.set()
        self._ready = asyncio.Event()
        self._after, self._stale = after, b""
        self._answered = self._is_agent_ready = False
        self._last: int | None = None  # id of the request sent last, 0 after a part of a request
        self._is_quiet = False  # whether the agent has received everything that was sent
        self._nudge_s, self._interval_s = nudge_s, nudge_s or _LONGEST_NUDGE_S
        self._nudging: asyncio.TimerHandle | None = None
        self.ended: str | None = None
        for fd in (self._in, self._out):
            os.set_blocking(fd, False)
        self._loop.add_reader(self._in, self._read)

    @property
    def is_up(self) -> bool:
        """Whether the agent has ever sent anything."""
        return self._answered or self._is_agent_ready

    async def ready(self, deadline_s: float) -> None:
        """Wait until a started agent reports that it is ready.

        Raises `ChannelLost` if the channel ends, or after `deadline_s` seconds.
        """
        if self.ended is None and not self._ready.is_set():
            self._read()  # the message may have arrived already
        with timeout_as_lost(deadline_s, "its agent to be ready"):
            if not self._ready.is_set():
                async with asyncio.timeout(deadline_s):
                    await self._ready.wait()
        self._require_open()

    def begin(self, handler: Handler) -> int:
        """Register the handler of a new request and return the request's id. Raises `ChannelLost` if the channel has
        ended."""
        self._require_open()
        self._next = self._next % 0xFFFF_FFFF + 1
        self._handlers[self._next] = handler
        return self._next

    def send(self, data: bytes) -> None:
        """Send bytes as soon as the channel accepts them, without waiting. `data`: one or more complete frames.

        Does nothing if the channel has ended.
        """
        if self.ended is not None:
            return
        if self._queued is not None:
            self._queued += data
            return
        self._put(data)
        if self._nudge_s is not None:
            self._interval_s = self._nudge_s
            self._nudge_later()

    def _put(self, data: bytes) -> None:
        self._last, self._is_quiet = protocol.request(data), False
        if not self._unsent:
            data = data[self._write(data) :]
        if data and self.ended is None:
            if not self._unsent:
                self._loop.add_writer(self._out, self._write_more)
            self._unsent += data
            if len(self._unsent) > _MAX_UNSENT_BYTES:
                self._has_space.clear()

    @contextlib.asynccontextmanager
    async def paused(self, deadline_s: float) -> AsyncIterator[None]:
        """Pause sending for a `with` block, which begins when the agent has processed everything that was sent before.

        So a snapshot of the agent can be taken between two frames. Calls of `send` during the block are queued until it
        ends. There can be only one such block at a time. Raises `ChannelLost` if the channel ends, or after
        `deadline_s` seconds.
        """
        self._require_open()
        self._queued = bytearray()
        self._has_space.clear()
        try:
            if not self._is_quiet:
                await self._drain(deadline_s)
            yield
        finally:
            paused, self._queued = self._queued, None
            self._has_space.set()
            if paused:
                self.send(bytes(paused))

    async def _drain(self, deadline_s: float) -> None:
        """Wait until the agent has processed everything that was sent. Raises `ChannelLost`."""
        until, wait_s = self._loop.time() + deadline_s, self._nudge_s or deadline_s
        while True:
            left_s = until - self._loop.time()
            try:
                await self._ping().wait(min(wait_s, left_s))
                return
            except ChannelLost as lost:
                if not lost.late or wait_s >= left_s:
                    raise
            wait_s *= 2

    def _ping(self) -> Reply:
        reply = Reply()
        self._put(protocol.frame(protocol.PING, self.begin(reply)))
        return reply

    def _nudge_later(self) -> None:
        if self._nudging is None:
            self._nudging = self._loop.call_later(self._interval_s, self._nudge)

    def _nudge(self) -> None:
        self._nudging = None
        if self.ended is None and self._handlers and not self._is_quiet:
            if self._queued is None:  # else `paused` sees to that
                self._ping()
            self._interval_s = min(2 * self._interval_s, _LONGEST_NUDGE_S)
            self._nudge_later()

    async def wait_for_space(self) -> None:
        """Wait until the send buffer has space, or the channel has ended."""
        await self._has_space.wait()

    async def request(self, kind: bytes, *parts: bytes, deadline_s: float, max_bytes: int = 0) -> bytes:
        """Send one request frame and return the data of its answer.

        `kind`: the frame's kind. `parts`: its body, in parts. `max_bytes`: the most data that the answer may have.
        Raises `ChannelLost` if no answer comes within `deadline_s` seconds, and `OSError` with the agent's error number
        if the agent refuses.
        """
        reply = Reply(max_bytes)
        self.send(protocol.frame(kind, self.begin(reply), *parts))
        return await reply.wait(deadline_s)

    async def renew(self, *, seed: bytes = b"", clock_ns: int | None = None, host_name: str = "") -> None:
        """Give the machine of a restored agent a new random seed, clock and host name.

        `clock_ns`: Unix time in nanoseconds. b"", None and "" leave the value as it is. Raises `ChannelLost` if no
        answer comes, `OSError` if the agent refuses.
        """
        clock = b"" if clock_ns is None else clock_ns.to_bytes(8, "little")
        await self.request(protocol.RENEW, protocol.fields(seed, clock, os.fsencode(host_name)), deadline_s=30.0)

    def close(self, why: str = "it was closed") -> None:
        """End the channel and close its descriptors. Idempotent.

        Everything that waits for an answer gets `ChannelLost` with the reason `why`.
        """
        if self.ended is not None:
            return
        self.ended = why
        if self._nudging is not None:
            self._nudging.cancel()
        self._loop.remove_reader(self._in)
        if self._unsent:
            self._loop.remove_writer(self._out)
            self._unsent.clear()
        for fd in {self._in, self._out}:
            os.close(fd)
        handlers, self._handlers = self._handlers, {}
        for handler in handlers.values():
            handler.on_lost(why)
        self._ready.set()
        self._has_space.set()

    def _require_open(self) -> None:
        if self.ended is not None:
            raise ChannelLost(self.ended)

    def _read(self) -> None:
        try:
            data = os.read(self._in, _READ_BYTES)
            if not data:
                self.close("its channel ended")
            for frame in self._parser.feed(self._skip_stale(data) if self._after else data):
                self._handle_frame(frame)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"its channel: {error.strerror}")
        except ProtocolError as error:
            self.close(f"its agent sent {error}")

    def _skip_stale(self, data: bytes) -> bytes:
        """Return the part of the data after the marker that ends the old output."""
        past, found, fresh = (self._stale + data).partition(self._after)
        if not found:
            self._stale = past[-len(self._after) + 1 :]
            return b""
        self._after, self._stale, self._answered, self._is_quiet = b"", b"", True, self._last is None
        self._ready.set()
        return fresh

    def _handle_frame(self, frame: Frame) -> None:
        self._is_quiet |= frame.id == self._last
        if frame.kind == protocol.READY and frame.id == 0:
            if protocol.number(frame.body) != protocol.VERSION:
                raise ProtocolError("an unknown version of the protocol")
            self._is_agent_ready = True
            self._ready.set()
            return
        handler = self._handlers.get(frame.id)
        if handler is None:
            if self._answered:
                raise ProtocolError(f"an answer of kind {frame.kind!r} that no request waits for")
            return
        self._answered = True
        if handler.on_answer(frame.kind, frame.body):
            del self._handlers[frame.id]

    def _write(self, data: bytes | bytearray) -> int:
        """Write to the channel. Returns how many bytes it accepted."""
        try:
            return os.write(self._out, data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.close(f"its channel: {error.strerror}")
            return 0

    def _write_more(self) -> None:
        sent = self._write(self._unsent)
        del self._unsent[:sent]
        if self.ended is None and not self._unsent:
            self._loop.remove_writer(self._out)
        if len(self._unsent) <= _MAX_UNSENT_BYTES and self._queued is None:
            self._has_space.set()


class Reply:
    """A `Handler` that collects the data of one request's answer, at most `max_bytes`."""

    def __init__(self, max_bytes: int = 0) -> None:
        self._left, self._parts = max_bytes, list[bytes]()
        self._future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._future.add_done_callback(consume_exception)

    async def wait(self, deadline_s: float) -> bytes:
        """Wait for the answer and return its data.

        Raises `ChannelLost` if no answer comes within `deadline_s` seconds, and `OSError` if the agent refused the
        request.
        """
        with timeout_as_lost(deadline_s, "its agent to answer"):
            async with asyncio.timeout(deadline_s):
                return await asyncio.shield(self._future)

    def on_answer(self, kind: bytes, body: bytes) -> bool:
        if kind == protocol.DATA:
            self._left -= len(body)
            if self._left < 0:
                raise ProtocolError("more data than requested")
            if body and not self._future.cancelled():
                self._parts.append(body)
            return False
        if kind == protocol.DONE:
            self._resolve(b"".join(self._parts))
        elif kind == protocol.REFUSED:
            number, text = protocol.refused(body)
            self._resolve(OSError(number, text))
        else:
            raise ProtocolError(f"an answer of kind {kind!r} to a request")
        return True

    def on_lost(self, why: str) -> None:
        self._resolve(ChannelLost(why))

    def _resolve(self, result: bytes | Exception) -> None:
        if self._future.done():
            return
        if isinstance(result, bytes):
            self._future.set_result(result)
        else:
            self._future.set_exception(result)


@contextlib.contextmanager
def timeout_as_lost(deadline_s: float, what: str) -> Iterator[None]:
    """Convert a `TimeoutError` in a `with` block to `ChannelLost`.

    `deadline_s` and `what` are for its message: how long the block waited, and for what, such as "its agent to answer".
    """
    try:
        yield
    except TimeoutError:
        raise ChannelLost(f"{deadline_s:g} s were too short for {what}", late=True) from None
