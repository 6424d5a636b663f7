"""The thread that steps an engine, and runs calls of other threads between two steps.

Only this thread uses the engine's model and state. Other threads pass it a call and get a future. So a pause, a swap or
a cancellation always happens between two tokens, without a lock around the model. A hanging thread is detected by the
time since its last loop iteration."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from etude.errors import EngineError
from etude.inference.errors import EngineBusy, EngineLate

T = TypeVar("T")

CONTROL_DEADLINE_S = 30.0  # for calls that only wait for the end of a step
REST_S = 0.05  # interval at which an idle thread checks for late and cancelled requests
SWITCH_S = 0.0005
"""The interpreter's switch interval. A step releases the GIL in each of its hundreds of operations and waits for it
while another thread prepares or checks a swap. With Python's default of 5 ms such a step takes up to 200 ms longer in a
model of 1 GB, with this value 100 ms (`benchmarks.weights.swap_client --model 1gb`)."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call to run between two steps, and the future that fails if the thread ends first."""

    run: Callable[[], None]
    future: Future[Any]


class StepThread:
    """A thread that computes the steps of an engine: it calls `step` until it is closed.

    - `name`: the engine's name.
    - `step`: computes one step, and returns whether there was anything to compute.
    - `on_end`: called last on the thread, with the error that all waiting calls get.
    - `max_calls`: the most calls of other threads that are queued."""

    def __init__(
        self, name: str, step: Callable[[], bool], on_end: Callable[[EngineError], None], *, max_calls: int
    ) -> None:
        self.name, self._step, self._on_end, self._max_calls = name, step, on_end, max_calls
        self._inbox: deque[_Call] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._end_error: EngineError | None = None
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"{name}-steps", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._beat = time.monotonic()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; queued calls fail. Further calls of `close` do nothing.

        Raises `EngineError` when the thread does not end."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(CONTROL_DEADLINE_S)
            if self._thread.is_alive():
                raise self.hang_error(f"{self.name} did not stop within {CONTROL_DEADLINE_S:g} s")

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and self._end_error is None

    @property
    def stalled_s(self) -> float:
        """Seconds since the last loop iteration started, normally at most `REST_S` plus the time of a step."""
        return time.monotonic() - self._beat

    def post(self, run: Callable[[], None], future: Future[Any]) -> None:
        """Queue `run` for the thread; it must set `future` then or later. May be called from any thread.

        Raises `EngineError` when the thread has ended or is closing, `EngineBusy` when the queue is full."""
        with self._wake:
            if self._end_error is not None or self._closing:
                raise self._end_error or _closing(self.name)
            if len(self._inbox) > self._max_calls:
                raise EngineBusy(
                    f"{self.name} does not process its queued calls",
                    f"{len(self._inbox)} calls wait",
                    hint="restart the engine if it hangs",
                )
            self._inbox.append(_Call(run, future))
            self._wake.notify()

    def between_steps(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` on the thread before its next step, and return a future of its result.

        May be called from any thread."""
        future: Future[T] = Future()

        def answer() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:  # noqa: BLE001 - passed on to the caller
                    future.set_exception(error)

        self.post(answer, future)
        return future

    async def call(self, call: Callable[[], T], what: str) -> T:
        """Run `call` on the thread and return its result.

        `what` names the call in the error. Raises `EngineError` when it is not run within `CONTROL_DEADLINE_S` seconds.
        """
        future = self.between_steps(call)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), CONTROL_DEADLINE_S)
        except TimeoutError:
            raise self.hang_error(f"{self.name} did not answer {what} within {CONTROL_DEADLINE_S:g} s") from None

    def hang_error(self, what: str) -> EngineLate:
        """Return the error of a call that the thread did not run in time. `what` describes the call and begins the
        message."""
        return EngineLate(
            what,
            f"the stepping thread of {self.name} has not moved for {self.stalled_s:.1f} s",
            hint="restart the engine; its requests can be sent again elsewhere",
        )

    # The methods from here on run on the thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._beat = time.monotonic()
                while self._inbox:
                    self._inbox.popleft().run()
                if not self._step():
                    self._rest()
            self._end(_closing(self.name))
        except Exception as error:  # noqa: BLE001 - everything that waits must fail
            self._end(
                EngineError(
                    f"{self.name} died",
                    f"{type(error).__name__}: {error}",
                    hint="restart the engine; see its log for the cause",
                )
            )

    def _rest(self) -> None:
        with self._wake:
            if not self._inbox and not self._closing:
                self._wake.wait(REST_S)

    def _end(self, error: EngineError) -> None:
        with self._wake:
            self._end_error = error
            futures = [call.future for call in self._inbox]
            self._inbox.clear()
        for future in futures:
            fail(future, error)
        self._on_end(error)


def fail(future: Future[Any], error: EngineError) -> None:
    """Set the exception of a future, unless it is done or was cancelled."""
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(error)


def _closing(name: str) -> EngineError:
    return EngineError(f"{name} is closing", hint="send the request to another engine")
