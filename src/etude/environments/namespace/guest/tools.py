"""Run one command as children of PID 1: its output capped with head and tail, its whole tree dead at the end.

Everything a command started dies with it, at the deadline or when its first process ends: between two commands
nothing runs, so what is read then cannot change. One `kill(-1)` is enough, because a process with SIGKILL pending
cannot fork.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, NoReturn

from . import confine, python
from .root import PYTHON_BIN, WORK

ENVIRONMENT = {
    "PATH": f"{PYTHON_BIN}:/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "PWD": WORK,
    "USER": "user",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same command prints the same thing in every machine
    "PYTHONDONTWRITEBYTECODE": "1",
}
_CHUNK_BYTES = 65_536
_REAP_EVERY_S = 0.1


class Become(BaseException):
    """Unwind a forked process to its outermost frame and be `role` there: nothing of its parent's frames remains."""

    def __init__(self, role: Callable[[], object]) -> None:
        super().__init__()
        self.role = role


class Ended(NamedTuple):
    """How a command ended. `exit_code` is 128 + signal when killed."""

    exit_code: int
    timed_out: bool
    truncated: bool
    output: bytes


class Capped:
    """Bytes of which at most `limit` are kept: the first half, the last half, and between them how many are missing."""

    def __init__(self, limit: int) -> None:
        self._head, self._tail, self._limit = bytearray(), bytearray(), limit
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._limit // 2 - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._limit:
            del self._tail[: -self._limit]

    @property
    def truncated(self) -> bool:
        return self.total > self._limit

    def value(self) -> bytes:
        """At most `limit` bytes."""
        if not self.truncated:
            return bytes(self._head + self._tail)
        mark = f"\n[... {self.total - self._limit} bytes and this line's left out ...]\n".encode()
        keep = self._limit - len(self._head) - len(mark)
        return bytes(self._head + mark + self._tail[-keep:]) if keep > 0 else bytes(self._head)


def run(argv: list[str], stdin: bytes, deadline_s: float, output_bytes: int, identity: confine.Identity) -> Ended:
    """Run a command to its end or its deadline. In the child this raises `Become`."""
    end = time.monotonic() + deadline_s
    out, out_child = os.pipe2(os.O_CLOEXEC)
    stdin_child = _input(stdin)
    pid = os.fork()
    if pid == 0:
        cpu_s = int(deadline_s * (os.cpu_count() or 1)) + 2
        raise Become(partial(_tool, argv, stdin_child, out_child, cpu_s, identity))
    os.close(out_child)
    os.close(stdin_child)
    output = Capped(output_bytes)
    try:
        status = _watch(pid, out, output, end)
        timed_out = status is None
        statuses = kill_everything()
        _drain(out, output)
    finally:
        os.close(out)
    status = statuses.get(pid, 9) if status is None else status
    code = os.waitstatus_to_exitcode(status)
    return Ended(code if code >= 0 else 128 - code, timed_out, output.truncated, output.value())


def _input(data: bytes) -> int:
    if not data:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("stdin")
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _watch(pid: int, out: int, output: Capped, end: float) -> int | None:
    """Collect output until process `pid` ends; its wait status, or None at the deadline."""
    os.set_blocking(out, False)
    ended = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(out, select.POLLIN)
    poller.register(ended, select.POLLIN)
    try:
        while (left_s := end - time.monotonic()) > 0:
            for fd, _ in poller.poll(min(left_s, _REAP_EVERY_S) * 1000 + 1):
                if fd == out and not _read_once(out, output):
                    poller.unregister(out)
            status = _reap().get(pid)
            if status is not None:
                return status
        return None
    finally:
        os.close(ended)


def _read_once(out: int, output: Capped) -> bool:
    """Whether more may come."""
    try:
        data = os.read(out, _CHUNK_BYTES)
    except BlockingIOError:
        return True
    output.add(data)
    return bool(data)


def _drain(out: int, output: Capped) -> None:
    """What is left in the pipe; nobody holds its other end any more."""
    with contextlib.suppress(BlockingIOError):
        while data := os.read(out, _CHUNK_BYTES):
            output.add(data)


def _reap() -> dict[int, int]:
    """Wait statuses of every child that has ended: the command's, and orphans handed to PID 1."""
    statuses: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[found[0]] = found[1]
    return statuses


def kill_everything() -> dict[int, int]:
    """Kill every process of this PID namespace but PID 1 and wait until none is left."""
    statuses: dict[int, int] = {}
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, 0)
            statuses[pid] = status
    return statuses


def _tool(argv: list[str], stdin: int, out: int, cpu_s: int, identity: confine.Identity) -> NoReturn:
    """The outermost frame of a command's process."""
    os.setsid()
    os.dup2(stdin, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.closerange(3, 1 << 20)
    confine.become_tool(identity, cpu_s)
    if python.serves(argv):
        raise Become(partial(python.run, argv))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, ENVIRONMENT)
    except FileNotFoundError:
        _fail(f"{argv[0]}: not found", 127)
    except (OSError, ValueError) as error:
        _fail(f"{argv[0]}: {getattr(error, 'strerror', None) or error}", 126)


def _fail(text: str, code: int) -> NoReturn:
    os.write(2, f"{text}\n".encode(errors="replace"))
    os._exit(code)
