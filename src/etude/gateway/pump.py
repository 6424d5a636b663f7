"""Streaming to a client: events while tokens are sampled, keep-alive events, and an error as the last event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from itertools import groupby
from typing import cast

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from etude.errors import EtudeError
from etude.gateway.access_log import Record, logger
from etude.gateway.answers import Answer
from etude.gateway.dialects.dialect import EventStream
from etude.gateway.errors import RequestRefused, broken, from_error, stopping
from etude.gateway.http import run_until
from etude.records.wire import I32

_MAX_QUEUED = 64  # parts of a stream that wait for a client that reads slowly


class EventPump:
    """Samples the answers to one request in an asyncio task, and puts their parts into a bounded queue.

    The response turns the queued parts into events: tokens that arrived since the last event are sent as one.

    - `parts`: what `ServedModel.stream` returns.
    - `stream`: turns the parts into events.
    - `record`: the request's record for log and metrics."""

    def __init__(
        self, parts: AsyncGenerator[I32 | tuple[int, list[int] | Answer]], stream: EventStream, record: Record
    ) -> None:
        self.stream = stream
        self._parts, self._record = parts, record
        self._begun = b""  # events before the first token
        self._waiting: list[tuple[int, list[int] | Answer]] = []  # parts from then on that were not taken
        self._is_over = False  # whether no more parts will come
        self._has_end = True  # whether the last events were not taken
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

        `end`: the deadline, on the clock `time.perf_counter`. If it is reached, the error `late` is sent as
        the last event. `ping_s`: seconds without an event after which a keep-alive event is sent. Errors of the
        sampling are not raised, but sent as the last event."""
        while True:
            wait_s = min(ping_s, end - time.perf_counter())
            try:
                if wait_s <= 0:
                    raise late
                events = await self._take(wait_s)
            except EtudeError as error:
                yield self._take_begun() + self.error(from_error(error))
                return
            except Exception:  # noqa: BLE001
                logger.exception("a stream failed")
                yield self._take_begun() + self.error(broken())
                return
            if events is None:
                yield self._take_begun() or self.stream.ping
                continue
            if self._record.first_s is None:
                self._record.first_s = time.perf_counter() - self._record.began
            if not events:
                return
            yield self._take_begun() + events

    def error(self, refused: RequestRefused) -> bytes:
        """Return the event of an error, the last of the stream."""
        refused.request_id = self._record.request_id
        return self.stream.error(refused)

    async def close(self) -> None:
        """Stop sampling, and wait until it has stopped. Idempotent."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(self._task, return_exceptions=True)

    def _take_begun(self) -> bytes:
        begun, self._begun = self._begun, b""
        return begun

    async def _take(self, wait_s: float) -> bytes | None:
        """Return all queued events, or wait for some. Return b"" if none will follow, and None after `wait_s` seconds.

        After the last events, the error of the sampling is raised."""
        end = time.perf_counter() + wait_s
        while True:
            if self._waiting and (events := self._taken()):
                return events
            if self._error is not None:
                raise self._error
            if self._is_over:
                return self._taken()
            if (left_s := end - time.perf_counter()) <= 0:
                return None
            self._news.clear()
            timer = asyncio.get_running_loop().call_later(left_s, self._news.set)  # cheaper than `asyncio.timeout`
            try:
                await self._news.wait()
            finally:
                timer.cancel()

    def _taken(self) -> bytes:
        """Empty the queue, and return the events of its parts. There may be none, when text is held back."""
        waiting, self._waiting = self._waiting, []
        self._room.set()
        events: list[bytes] = []
        for (index, is_whole), parts in groupby(waiting, lambda part: (part[0], isinstance(part[1], Answer))):
            if is_whole:
                events += (event for _, answer in parts for event in self.stream.finish(cast(Answer, answer), index))
            else:
                ids = [token for _, said in parts for token in cast(list[int], said)]
                events += self.stream.tokens(ids, index)
        if self._is_over and self._error is None and self._has_end:
            self._has_end = False
            events += self.stream.end()
        return b"".join(events)

    async def _run(self) -> None:
        try:
            async with aclosing(self._parts) as parts:
                async for part in parts:
                    if not isinstance(part, tuple):
                        self._begun += b"".join(self.stream.start(part))
                        continue
                    while len(self._waiting) >= _MAX_QUEUED:
                        self._room.clear()
                        await self._room.wait()
                    self._waiting.append(part)
                    self._news.set()
        except Exception as error:  # noqa: BLE001  whoever takes the events raises it
            self._error = error
        self._is_over = True
        self._news.set()


class EventResponse(StreamingResponse):
    """The HTTP response that sends the events of a pump. At its end it closes the pump, even if it fails before the
    first event.

    `first` are the events that `EventPump.first` has returned. `gone` ends when the client disconnects. `end`, `ping_s`
    and `late` are those of `EventPump.events`. When the server cancels the response, it ends with an error. The
    attribute `at_end` is a function that is called when the response has ended and the sampling has stopped. Its
    argument is the status to log: 499 if the client disconnected before the last event."""

    def __init__(
        self,
        pump: EventPump,
        first: bytes,
        gone: asyncio.Task[None],
        *,
        end: float,
        ping_s: float,
        late: RequestRefused,
    ) -> None:
        self._pump, self._gone = pump, gone
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
            await run_until(self._gone, self.stream_response(send))
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:  # by the server, which waits no longer for running requests
            error = self._pump.error(stopping())
            with contextlib.suppress(RuntimeError):  # it has not begun, or has just ended
                await send({"type": "http.response.body", "body": error, "more_body": False})
        finally:
            self._gone.cancel()
            try:
                await self._pump.close()
            finally:
                self.at_end(self.status_code if self._is_whole else 499)
