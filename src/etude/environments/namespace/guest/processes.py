"""Process trees, as the launcher's /proc shows them: of a command, or of a whole machine; and roles of forked
processes.

A command's first process adopts its orphans (`PR_SET_CHILD_SUBREAPER`), so everything it started stays below it,
however often it forked. A process with a pending SIGKILL or SIGSTOP cannot fork, so repeated rounds of signals reach
all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

_AGAIN_S = 0.0005
_GONE = "ZX"
_STOPPED = "TtZX"


def below(pid: int) -> list[int]:
    """Return the PIDs of all descendants of a process, zombies included.

    Raises `FileNotFoundError` on a kernel without `children` files in /proc.
    """
    found, at = list[int](), 0
    found += _children(pid)
    while at < len(found):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found += _children(found[at])
        at += 1
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
            found += map(int, file.read().split())
    return found


def _all_are(pid: int, states: str) -> bool:
    """Whether each thread of a process is in one of these states."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                if chr(file.read().rpartition(b")")[2].split()[0][0]) not in states:
                    return False
    except (FileNotFoundError, ProcessLookupError):
        return True
    return True


def end_tree(pid: int) -> None:
    """Kill a command's first process and all its descendants.

    The first process is killed last, as it adopts orphans.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        with contextlib.suppress(FileNotFoundError):
            while alive := [each for each in below(pid) if not _all_are(each, _GONE)]:
                for each in alive:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)
                time.sleep(_AGAIN_S)
        os.kill(pid, signal.SIGKILL)


def end_all() -> None:
    """Kill every process of this PID namespace except PID 1, until none is left."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(-1, signal.SIGKILL)
            time.sleep(_AGAIN_S)


def stop_all(roots: Iterable[int]) -> None:
    """Stop every process of this PID namespace except PID 1, and wait until all have stopped.

    `roots`: PID 1 and the first processes of running commands, as PIDs in this /proc.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGSTOP)
    init, *commands = roots
    everyone = [*below(init), *(each for pid in commands for each in (pid, *_below_if_there(pid)))]
    while not all(_all_are(each, _STOPPED) for each in everyone):
        time.sleep(_AGAIN_S)


def _below_if_there(pid: int) -> list[int]:
    try:
        return below(pid)
    except (FileNotFoundError, ProcessLookupError):
        return []


def continue_all() -> None:
    """Continue every process of this PID namespace."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGCONT)


def pid_in_namespace(pid: int) -> int:
    """Return the PID of a process in its innermost PID namespace; 0 if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/status", "rb") as file:
        return int(file.read().partition(b"\nNSpid:")[2].partition(b"\n")[0].split()[-1])
    return 0


class Become(BaseException):
    """Raised in a forked process to run `role` in its outermost frame, so that nothing of its parent's frames
    remains."""

    def __init__(self, role: Callable[[], object]) -> None:
        super().__init__()
        self.role = role
