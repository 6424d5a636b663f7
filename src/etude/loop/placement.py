"""Decides on which machine a program of a run is started.

A `Program` describes what to run, a `Process` is one that was started, and a `Placement` starts it: `LocalPlacement` as
a child of this process, `etude.loop.ray_placement` on a node of a Ray cluster. A program is the same in both cases: it
is called over a socket that it inherits, its output goes to a log in the run folder, and it does not outlive the
conductor, the main process of the run. Restarts are up to the caller."""

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
    """A command ``python *argv`` to be started on some machine. Its output is appended to the file `log`.

    `env` are environment variables, unless the machine itself sets them. With `with_socket` the program answers RPC
    calls over a socket, whose file descriptor it gets as ``--socket N``. `devices` is the number of accelerators that
    it uses, if its machine has any."""

    name: str
    argv: Sequence[str]
    log: Path
    nice: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    with_socket: bool = False
    devices: int = 0

    def popen(self, address: str, sock: socket.socket | None) -> tuple[list[str], dict[str, Any]]:
        """Return the arguments and the options for `subprocess.Popen` on a machine. The caller opens the log.

        `address` is the machine's own, which replaces `ADDRESS` in the arguments. `sock` is the socket that the program
        inherits."""
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
    """A started `Program`. `pid` is its process id on its own machine. `caller` is the RPC client; None without a
    socket."""

    pid: int
    caller: Caller | None

    @property
    def returncode(self) -> int | None:
        """The exit code (negative: the signal); None while it runs. A process whose machine was lost has one, too."""

    async def wait(self) -> int:
        """Wait until the process has ended and return the exit code."""

    def signal(self, signum: int) -> None:
        """Send a signal to the process and its process group, even if it is stopped. Does nothing when it has ended."""

    async def cpu_s(self) -> float:
        """Return the CPU seconds of the process and its descendants."""

    async def queued_s(self) -> dict[int, float]:
        """Return for each thread of the process how many seconds it has waited for a core, by thread id (see
        `usage.queued_s`)."""


class Placement(Protocol):
    """Starts programs on machines.

    If `spreads` is True each rank of the learner must be started as a program of its own; it may be on any machine."""

    spreads: bool

    async def start(self, program: Program, waits: OnWait) -> Process:
        """Start a program. `waits` is awaited with the reason when no machine has free resources now.

        Raises `NoCapacity` when none is free in time, `ProcessLost` when the program was lost while starting, and
        `OSError`."""

    async def usage(self, running: Mapping[str, Process], *, with_memory: bool) -> dict[str, dict[str, Any]]:
        """Return the CPU time and memory of this process ("conductor") and of the `running` ones.

        The result is that of `usage.sample`: a dict for each process, by the name of the process."""

    async def close(self) -> None:
        """Release all machines. Idempotent."""


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

    async def queued_s(self) -> dict[int, float]:
        return usage.queued_s(self.pid)


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
        """Do nothing, since this machine need not be released."""


def signal_group(pid: int, signum: int) -> None:
    """Send a signal to a process and its process group. Does nothing when there is none."""
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        return
