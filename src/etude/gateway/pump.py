"""Streaming to a client: events while tokens are sampled, keep-alive events, and an error as the last event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from etude.errors import EtudeError
from etude.gateway.access_log import Record, logger
from etude.gateway.answers import Answer
from etude.gateway.dialects.dialect import EventStream
from etude.gateway.errors import RequestRefused, from_error, stopping
from etude.gateway.http import run_until_disconnect
from etude.records.wire import I32

_MAX_QUEUED = 64  # parts of a stream that wait for a client that reads slowly


class EventPump:
    """Samples the answers to one request in an asyncio task, and queues a bounded number of events.

    - `parts`: what `ServedModel.stream` returns.
    - `stream`: turns the parts into events.
    - `record`: the request's record for log and metrics."""

    def __init__(
        self, parts: AsyncGenerator[I32 | tuple[int, list[int] | Answer]], stream: EventStream, record: Record
    ) -> None:
        self.stream = stream
        self._parts, self._record = parts, record
        self._begun = b""  # events before the first token
        self._waiting: list[bytes] = []  # events from then on that were not taken
        self._is_over = False  # whether no more events will come
        self._error: Exception | None = None  # what the sampling raised
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def first(self, ping_s: float) -> bytes:
        """Wait for the first sampled token, at most `ping_s` seconds, and return the events up to it.

        If no token is sampled in this time, return the events that come before the first token, or a keep-alive event.
        Raises the errors of the sampling."""
        events = await self._take(ping_s)
        if events is None:
            return self._take_begun() or self.stream.ping
        self._record.first_s = time.perf_counter() - self._record.began
        return self._take_begun() + events

    async def events(self, end: float, ping_s: float, late: RequestRefused) -> AsyncIterator[bytes]:
        """Yield the events that follow those that the method `first` returned, until the response is complete.

        `end`: the latest time of the end, as `time.perf_counter` counts. If it is reached, the error `late` is sent as
        the last event. `ping_s`: after so many seconds without an event, a keep-alive event is sent. Errors of the
        sampling are not raised, but sent as the last event."""
        while True:
            wait_s = min(ping_s, end - time.perf_counter())
            try:
                if wait_s <= 0:
                    raise late
                events = await self._take(wait_s)
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
            if events is None:
                yield self._take_begun() or self.stream.ping
                continue
            if self._record.first_s is None:
                self._record.first_s = time.perf_counter() - self._record.began
            if not events:
                return
            yield self._take_begun() + events

    async def close(self) -> None:
        """Stop sampling, and wait until it has stopped. Idempotent."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(self._task, return_exceptions=True)

    def _take_begun(self) -> bytes:
        begun, self._begun = self._begun, b""
        return begun

    async def _take(self, wait_s: float) -> bytes | None:
        """Return all events that wait, or wait for some. Return b"" if none will follow, and None if none came in time.

        Raises after the last events what the sampling raised."""
        if not self._waiting and not self._is_over:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
        if not self._waiting and not self._is_over:
            return None
        if not self._waiting and self._error is not None:
            raise self._error
        events, self._waiting = b"".join(self._waiting), []
        self._room.set()
        return events

    async def _run(self) -> None:
        try:
            async with aclosing(self._parts) as parts:
                async for part in parts:
                    if not isinstance(part, tuple):
                        self._begun += b"".join(self.stream.start(part))
                        continue
                    index, said = part
                    if isinstance(said, Answer):
                        events = b"".join(self.stream.finish(said, index))
                    else:
                        events = b"".join(self.stream.tokens(said, index))
                    if events:
                        await self._put(events)
            await self._put(b"".join(self.stream.end()))
        except Exception as error:  # noqa: BLE001  whoever takes the events raises it
            self._error = error
        self._is_over = True
        self._news.set()

    async def _put(self, events: bytes) -> None:
        while len(self._waiting) >= _MAX_QUEUED:
            self._room.clear()
            await self._room.wait()
        self._waiting.append(events)
        self._news.set()


class EventResponse(StreamingResponse):
    """The HTTP response that sends the events of a pump. At its end it closes the pump, even if it fails before the
    first event.

    `first` are the events that `EventPump.first` has returned. `end`, `ping_s` and `late` are those of
    `EventPump.events`. When the server cancels the response, it ends with an error. The attribute `at_end` is a
    function that is called when the response has ended and the sampling has stopped. Its argument is the status to log:
    499 if the client disconnected before the last event."""

    def __init__(self, pump: EventPump, first: bytes, *, end: float, ping_s: float, late: RequestRefused) -> None:
        self._pump = pump
        self.at_end: Callable[[int], None] = lambda status: None
        self._is_whole = False

        async def body() -> AsyncIterator[bytes]:
            if first:
                yield first
            async for part in pump.events(end, ping_s, late):
                yield part
            self._is_whole = True

        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(body(), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(Request(scope, receive), self.stream_response(send))
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:  # by the server, which waits no longer for running requests
            error = self._pump.stream.error(stopping())
            with contextlib.suppress(RuntimeError):  # it has not begun, or has just ended
                await send({"type": "http.response.body", "body": error, "more_body": False})
        finally:
            try:
                await self._pump.close()
            finally:
                self.at_end(self.status_code if self._is_whole else 499)
