"""The end of a connection to a machine, which may never read what it is still owed."""

from __future__ import annotations

import asyncio
import contextlib


async def closed(writer: asyncio.StreamWriter, deadline_s: float) -> None:
    """Close a connection once what was written has gone, or break it off at the deadline."""
    writer.close()
    try:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(deadline_s):
                await writer.wait_closed()
    finally:
        writer.transport.abort()
