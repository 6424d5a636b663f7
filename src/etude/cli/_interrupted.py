"""Ctrl-C while modules are loaded, before `main` is there to catch it: a word instead of a traceback. Loaded first."""

from __future__ import annotations

import sys
from types import TracebackType


def interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The `sys.excepthook` of the command line."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = interrupted
