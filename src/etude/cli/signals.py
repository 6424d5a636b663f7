"""Handles Ctrl-C and SIGTERM for every command.

This module is imported first: a Ctrl-C while the other modules are being imported, before `main` can catch it, then
prints one word instead of a traceback."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType


def print_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print "interrupted" for Ctrl-C, and a traceback for anything else. It is the `sys.excepthook` of the command
    line."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = print_interrupted


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C inside the block.

    So the command cleans up, ends its child processes and returns the same exit code. Does nothing outside the main
    thread, or if the parent process set SIGTERM to be ignored."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise_sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise_sigint(_signum: int, _frame: FrameType | None) -> None:
    """Raise SIGINT in this process, so that the current handler of Ctrl-C (asyncio, a command) also handles SIGTERM. A
    background job of a shell ignores SIGINT, but must still end at SIGTERM."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)
