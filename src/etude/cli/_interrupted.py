"""Ctrl-C and SIGTERM for every command. Loaded first: Ctrl-C while modules are loaded, before `main` is there to catch
it, is a word instead of a traceback."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType


def interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The `sys.excepthook` of the command line."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = interrupted


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C within the block: the command cleans up, ends its children and returns the same code.
    Does nothing outside the main thread, and where whoever started the process had SIGTERM ignored."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _as_ctrl_c(_signum: int, _frame: FrameType | None) -> None:
    """Raise SIGINT in this process, so that whoever handles Ctrl-C now (asyncio, a command) handles this, too. A
    background job of a shell ignores SIGINT, and still has to end at a SIGTERM."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)
