"""An event loop whose clock jumps: minutes of waiting pass in no time, in the order in which they would have passed.

Whoever takes the time from the loop (`asyncio.sleep`, deadlines, `loop.time()`) sees hours go by. While work runs in a
thread (a ledger's transaction) the clock stands still.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
POLL_S = 0.001  # for the end of what runs in a thread


class _Selector(selectors.DefaultSelector):
    """Waits for no timer: it tells the loop's clock that it is over."""

    loop: JumpingLoop

    def select(self, timeout: float | None = None) -> Any:
        busy = self.loop.num_in_threads > 0
        ready = super().select(POLL_S if busy or timeout is None else 0)
        if not ready and not busy and timeout:
            self.loop.jumped_s += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock stands still except where everybody waits for it."""

    def __init__(self) -> None:
        self.jumped_s, self.num_in_threads = 0.0, 0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.jumped_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        self.num_in_threads += 1
        doing = super().run_in_executor(executor, func, *args)
        doing.add_done_callback(self._came_back)
        return doing

    def _came_back(self, _: object) -> None:
        self.num_in_threads -= 1


def run_at_once(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a clock that jumps."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work)
