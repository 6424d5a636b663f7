"""Work in a thread, which is awaited even when its caller is cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest

from etude.loop.run_in_thread import run_in_thread


def test_a_cancelled_caller_waits_until_the_work_has_ended() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert may_end.wait(20)
        ended.set()

    async def main() -> None:
        doing = asyncio.create_task(run_in_thread(work))
        assert await asyncio.to_thread(begun.wait, 20)
        doing.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not doing.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await doing
        assert ended.is_set()

    asyncio.run(main())


def test_an_error_of_the_work_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_in_thread(lambda: 1 // 0))
