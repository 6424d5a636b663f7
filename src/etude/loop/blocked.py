"""Interrupts plug-ins that block the event loop of a worker or a grader, for example by `time.sleep` in a coroutine.

Meanwhile all rollouts of the process wait. After `fleet.hung_s` seconds the conductor kills a process that does not
answer, without knowing why. Before that, an exception is raised in the plug-in, so that the error that ends the run
names it."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from etude.config import plugins_in
from etude.loop.config import RunConfig

SHARE = 0.8
"""The share of `fleet.hung_s` (after which the conductor kills the process) that a plug-in may block the loop."""


class Blocked(Exception):
    """Raised in a plug-in that has blocked the event loop for too long. Its caller turns this into a `PluginError`."""


def interrupt_blocking(config: RunConfig) -> None:
    """Raise `Blocked` in the code of the config's plug-ins whenever they block the running event loop, from now on.

    Call it in the main thread. It works until the loop is closed, and uses the signal SIGUSR1. A plug-in is interrupted
    only if two checks, some time apart, find it in the same step of the loop. So a process that got no CPU time is left
    alone."""
    modules, limit_s = {plugin.path.partition(":")[0] for _, plugin in plugins_in(config)}, SHARE * config.fleet.hung_s
    if not modules:
        return
    loop, beat = asyncio.get_running_loop(), time.monotonic()
    found_at, found_in = 0.0, 0.0  # when this step of the loop was first found, and its beat

    def tick() -> None:
        nonlocal beat
        beat = time.monotonic()
        loop.call_later(limit_s / 8, tick)

    def look(_: int, frame: FrameType | None) -> None:
        nonlocal found_at, found_in
        now = time.monotonic()
        if found_in != beat:
            found_at, found_in = now, beat
        while now - found_at > limit_s / 2 and frame is not None:
            if frame.f_globals.get("__name__") in modules:
                place = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
                raise Blocked(f"{place} has blocked its process for {now - beat:.0f} s without `await`")
            frame = frame.f_back

    def watch() -> None:
        while not loop.is_closed():
            time.sleep(limit_s / 8)
            if time.monotonic() - beat > limit_s / 4:
                signal.pthread_kill(main.ident or 0, signal.SIGUSR1)

    main = threading.main_thread()
    tick()
    signal.signal(signal.SIGUSR1, look)
    threading.Thread(target=watch, name="blocked plug-ins", daemon=True).start()
