"""Interrupts plug-ins that hold the event loop of a worker or a grader, for example by `time.sleep` or a call without
`await`.

All rollouts of the process wait then, and the conductor would kill it for not answering (`fleet.hung_s`), without
knowing why. The exception is raised where the plug-in is, so the error that ends the run names it."""

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
"""Of `fleet.hung_s`, after which the conductor kills the process."""


class Blocked(Exception):
    """A plug-in held the event loop for too long. Its caller turns this into a `PluginError`."""


def interrupt_blocking(config: RunConfig) -> None:
    """From now on, interrupt code of the config's plug-ins that does not let the running event loop go on.

    Call it in the main thread. It works until the loop is closed, and uses the signal SIGUSR1. The main thread must be
    found in the same step of the loop twice, some time apart, so a process that got no CPU is left alone."""
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
                raise Blocked(f"{place} has held the only thread of its process for {now - beat:.0f} s without `await`")
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
