"""Work in a thread, to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def apart(work: Callable[[], T]) -> T:
    """What work returns; the loop goes on meanwhile. Who is cancelled waits for the end of the work, so that it never
    runs beside what comes after.

    >>> asyncio.run(apart(lambda: 2 + 2))
    4
    """
    doing = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(doing)
    finally:
        await asyncio.wait([doing])
