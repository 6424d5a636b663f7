"""Ends a child process when its parent ends, so that killing the conductor stops everything.

There are three mechanisms, since each one alone can fail: the kernel's parent-death signal (lost when the parent died
before it was requested), polling the parent's pid once a second, and the end of standard input (for a parent without a
process id on this host). Imports no torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)  # before any fork
_PR_SET_PDEATHSIG = 1
POLL_S = 1.0


def die_with_parent(*, watch_stdin: bool = False) -> None:
    """Have this process killed with SIGKILL when its parent ends.

    With `watch_stdin`, it is also killed at the end of standard input."""
    parent = os.getppid()
    if sys.platform == "linux":
        when_parent_dies()
    _watch("parent", lambda: _until_orphaned(parent))
    if watch_stdin:
        _watch("stdin", _until_stdin_ends)


def when_parent_dies() -> None:
    """Have the kernel kill this process when the thread that started it ends. Can be called between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _watch(what: str, until: Callable[[], None]) -> None:
    def wait_and_end() -> None:
        until()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_and_end, name=f"watch-{what}", daemon=True).start()


def _until_orphaned(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)


def _until_stdin_ends() -> None:
    while os.read(0, 4096):
        pass
