"""Streaming to a client: events while tokens are sampled, keep-alive events, and an error as the last event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from etude.errors import EtudeError
from etude.gateway.access_log import Record, logger
from etude.gateway.answers import Answer
from etude.gateway.dialects.dialect import EventStream
from etude.gateway.errors import RequestRefused, from_error
from etude.records.wire import I32

_MAX_QUEUED = 64  # parts of a stream that wait for a client that reads slowly


class EventPump:
    """Samples the answers to one request in an asyncio task, which puts their events into a bounded queue.

    - `parts`: what `ServedModel.stream` returns.
    - `stream`: turns the parts into events.
    - `record`: the request's record for log and metrics."""

    def __init__(
        self, parts: AsyncGenerator[I32 | tuple[int, list[int] | Answer]], stream: EventStream, record: Record
    ) -> None:
        self.stream = stream
        self._parts, self._record = parts, record
        self._queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(_MAX_QUEUED)
        self._begun = b""  # events before the first token
        self._task = asyncio.create_task(self._run())

    async def first(self, ping_s: float) -> bytes:
        """Wait for the first sampled token, at most `ping_s` seconds, and return the events up to it.

        Without a token, return the events that come before one, or a keep-alive event. Raises what the sampling
        raises."""
        try:
            async with asyncio.timeout(ping_s):
                part = await self._queue.get()
        except TimeoutError:
            return self._take_begun() or self.stream.ping
        if isinstance(part, Exception):
            raise part
        self._record.first_s = time.perf_counter() - self._record.began
        return self._take_begun() + (part or b"")

    async def events(self, end: float, ping_s: float, late: RequestRefused) -> AsyncIterator[bytes]:
        """Yield the events after those of `first`, until the response is complete or the time `end` (`perf_counter`) is
        reached.

        After `ping_s` seconds without an event, a keep-alive event is sent. `late` is the error to send at the time
        `end`. Errors are not raised: the last event reports them."""
        while True:
            wait_s = min(ping_s, end - time.perf_counter())
            try:
                if wait_s <= 0:
                    raise late
                async with asyncio.timeout(wait_s):
                    part = await self._queue.get()
                if isinstance(part, Exception):
                    raise part
            except TimeoutError:
                yield self._take_begun() or self.stream.ping
                continue
            except RequestRefused as refused:
                yield self._take_begun() + self.stream.error(refused)
                return
            except EtudeError as error:
                yield self._take_begun() + self.stream.error(from_error(error))
                return
            except Exception:  # noqa: BLE001
                logger.exception("a stream failed")
                failed = RequestRefused(500, "the gateway failed; its log says why", code="internal_error")
                yield self._take_begun() + self.stream.error(failed)
                return
            if self._record.first_s is None:
                self._record.first_s = time.perf_counter() - self._record.began
            if part is None:
                return
            yield self._take_begun() + part

    async def close(self) -> None:
        """Stop sampling, and wait until it has stopped. Idempotent."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(self._task, return_exceptions=True)

    def _take_begun(self) -> bytes:
        begun, self._begun = self._begun, b""
        return begun

    async def _run(self) -> None:
        try:
            async with aclosing(self._parts) as parts:
                async for part in parts:
                    if not isinstance(part, tuple):
                        self._begun += b"".join(self.stream.start(part))
                        continue
                    index, said = part
                    if isinstance(said, Answer):
                        self._record.add([said])
                        events = b"".join(self.stream.finish(said, index))
                    else:
                        events = b"".join(self.stream.tokens(said, index))
                    if events:
                        await self._queue.put(events)
            await self._queue.put(b"".join(self.stream.end()))
            await self._queue.put(None)
        except Exception as error:  # noqa: BLE001  whoever reads the queue raises it
            await self._queue.put(error)


class EventResponse(StreamingResponse):
    """The HTTP response that sends the events of a pump. It closes the pump however it ends, even before its first
    byte.

    `first` are the events that `EventPump.first` has returned. `end`, `ping_s` and `late` are those of
    `EventPump.events`. The attribute `at_end` is a function without arguments that is called when the response has
    ended."""

    def __init__(self, pump: EventPump, first: bytes, *, end: float, ping_s: float, late: RequestRefused) -> None:
        self._pump = pump
        self.at_end: Callable[[], None] = lambda: None

        async def body() -> AsyncIterator[bytes]:
            if first:
                yield first
            async for part in pump.events(end, ping_s, late):
                yield part

        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(body(), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.at_end()
            await self._pump.close()
