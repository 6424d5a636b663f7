"""A component for the tests of placements: it answers, refuses, breaks, hangs and ends, as it is asked.

Run as ``python placed.py WORD... --socket N``: `said` gives the words back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

from etude.errors import WeightsError
from etude.loop.rpc import serve
from etude.records import Version

cancelled = asyncio.Event()


async def echo(version: Version, number: int) -> Version:
    return Version(version.step + number, version.incarnation, version.digest)


async def refuse() -> None:
    raise WeightsError("delta v2", "does not fit", hint="fetch the anchor")


async def fail() -> None:
    raise KeyError("oops")


async def hang() -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        cancelled.set()
        raise


async def until_cancelled() -> None:
    await cancelled.wait()


async def end(code: int) -> None:
    print(f"asked to end with {code}", flush=True)
    os._exit(code)


async def said() -> list[str]:
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "a component blocks no signal"
    return [*sys.argv[1:-2], os.environ.get("A_WORD", ""), os.environ["OMP_NUM_THREADS"], str(os.nice(0))]


async def pids() -> tuple[int, int]:
    return os.getpid(), os.getppid()


async def ready() -> bool:
    return True


HANDLERS = {
    "echo": ((Version, int), echo),
    "refuse": ((), refuse),
    "fail": ((), fail),
    "hang": ((), hang),
    "until_cancelled": ((), until_cancelled),
    "end": ((int,), end),
    "said": ((), said),
    "pids": ((), pids),
    "ready": ((), ready),
}


if __name__ == "__main__":
    if "--broken" in sys.argv:
        sys.exit("no luck")

    async def main() -> None:
        await serve(socket.socket(fileno=int(sys.argv[-1])), HANDLERS)

    asyncio.run(main())
