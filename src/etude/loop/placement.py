"""Decides on which machine a component of a run is started.

A `Program` describes what to run, a `Process` is one that was started, and a `Placement` starts it: `LocalPlacement` as
a child of this process, `etude.loop.ray_placement` on a node of a Ray cluster. A program is the same in both cases: it
is called over a socket that it inherits, its output goes to a log in the run folder, and it does not outlive its
conductor. This module knows nothing of restarts.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from etude.errors import EtudeError
from etude.inference.lifetime import when_parent_dies
from etude.loop import usage
from etude.loop.rpc import Caller

ADDRESS = "{address}"
"""Placeholder in a program's arguments: the address at which the other machines of the run reach its machine."""
NO_ENV: Mapping[str, str] = MappingProxyType({})
OnWait = Callable[[str], Awaitable[object]]
"""Called with the reason when a program has to wait for a machine."""


class NoCapacity(EtudeError):
    """No machine has free resources for a program that the run needs."""


@dataclass(frozen=True)
class Program:
    """The command ``python *argv``, with its output appended to `log`. `env`: environment variables; one that the
    machine sets itself keeps the machine's value. `with_socket`: the program answers calls over a socket, whose file
    descriptor it gets as ``--socket N``."""

    name: str
    argv: Sequence[str]
    log: Path
    nice: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    with_socket: bool = False
    devices: int = 0  # number of accelerators that it uses, if its machine has any

    def popen(self, address: str, sock: socket.socket | None) -> tuple[list[str], dict[str, Any]]:
        """Arguments and options for `subprocess.Popen` on the machine at `address`. The caller opens the log."""
        env = {**self.env, **os.environ} | {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        argv = [sys.executable, *(word.replace(ADDRESS, address) for word in self.argv)]
        options = {
            "stdin": subprocess.DEVNULL,
            "env": env,
            "pass_fds": [sock.fileno()] if sock else [],
            "preexec_fn": functools.partial(_begin, self.nice),
        }
        return argv + (["--socket", str(sock.fileno())] if sock else []), options


def _begin(nice: int) -> None:
    """Have the kernel kill this process when the parent's thread ends, set its nice value, and unblock all signals:
    processes that Ray starts from a program inherit a blocked Ctrl-C. Runs between fork and exec."""
    os.setpgid(0, 0)  # only the conductor gets Ctrl-C; in a new session nice would be ignored
    when_parent_dies()
    os.nice(nice)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class Process(Protocol):
    """A started program. `pid` is its pid on its own machine; `caller` is the RPC client if it has a socket."""

    pid: int
    caller: Caller | None

    @property
    def returncode(self) -> int | None:
        """The exit code once it has ended (negative: the signal), also when its machine was lost."""

    async def wait(self) -> int:
        """Wait for its end and return the exit code."""

    def signal(self, signum: int) -> None:
        """Send a signal to the process and its process group, even if it is stopped. Does nothing when it has ended."""

    async def cpu_s(self) -> float:
        """CPU seconds of the process and its descendants."""


class Placement(Protocol):
    """Starts programs. `spreads`: each rank of the learner is a program of its own, on any machine with free
    resources."""

    spreads: bool

    async def start(self, program: Program, waits: OnWait) -> Process:
        """Start a program. `waits` is awaited when no machine has free resources now. Raises `NoCapacity` when none is
        free in time, `ProcessLost` when the program was lost while starting, and `OSError`."""

    async def usage(self, running: Mapping[str, Process], *, with_memory: bool) -> dict[str, dict[str, Any]]:
        """CPU time and memory of this process ("conductor") and of the running ones, in the form of `usage.sample`."""

    async def close(self) -> None:
        """Release the machines. Idempotent."""


class LocalProcess:
    """A `Process` that is a child of this process."""

    def __init__(self, process: asyncio.subprocess.Process, caller: Caller | None) -> None:
        self._process, self.pid, self.caller = process, process.pid, caller

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def signal(self, signum: int) -> None:
        if self.returncode is None:
            signal_group(self.pid, signum)

    async def cpu_s(self) -> float:
        return usage.Processes().cpu_s(self.pid)


class LocalPlacement:
    """Starts every program as a child of this process, on this machine."""

    spreads = False

    async def start(self, program: Program, waits: OnWait) -> Process:
        own_end, child_end = socket.socketpair() if program.with_socket else (None, None)
        argv, options = program.popen("127.0.0.1", child_end)
        program.log.parent.mkdir(parents=True, exist_ok=True)
        with program.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log, **options)
        if own_end is None or child_end is None:
            return LocalProcess(process, None)
        child_end.close()
        caller = Caller(own_end, program.name)
        await caller.open()
        return LocalProcess(process, caller)

    async def usage(self, running: Mapping[str, Process], *, with_memory: bool) -> dict[str, dict[str, Any]]:
        pids = {name: process.pid for name, process in running.items()}
        return await asyncio.to_thread(usage.sample, pids, with_memory)

    async def close(self) -> None:
        """Nothing to release."""


def signal_group(pid: int, signum: int) -> None:
    """Send a signal to a process and its process group. Does nothing when there is none."""
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        return
