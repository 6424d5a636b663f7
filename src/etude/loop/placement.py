"""Where a component runs: the seam between who keeps components alive and the machines they run on.

A `Program` is what runs, a `Process` one that was started, a `Placement` who starts it: `LocalPlacement` as a child of this
process, `etude.loop.ray_placement` on a node of a cluster. A program is the same in both: it is called over a socket that it
inherits, its output goes to a log in the run folder, and it does not outlive its conductor. Knows nothing of restarts.
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
"""In a program's arguments: the address at which the machine that runs it is reached by the run's other machines."""
NO_ENV: Mapping[str, str] = MappingProxyType({})
OnWait = Callable[[str], Awaitable[object]]
"""Is told that a program waits for a machine, and why."""


class NoCapacity(EtudeError):
    """No machine has room for a program that the run cannot do without."""


@dataclass(frozen=True)
class Program:
    """``python *argv`` with its output appended to `log`. `env`: what its environment should hold where the machine's
    own says nothing. `with_socket`: it is called, over a socket whose number it is given as ``--socket N``."""

    name: str
    argv: Sequence[str]
    log: Path
    nice: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    with_socket: bool = False
    devices: int = 0  # accelerators that it computes on, where its machine has any

    def popen(self, address: str, sock: socket.socket | None) -> tuple[list[str], dict[str, Any]]:
        """(command line, options) for `subprocess` on the machine at `address`. Without the log, which is opened by who
        starts it."""
        env = {**self.env, **os.environ} | {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        argv = [sys.executable, *(word.replace(ADDRESS, address) for word in self.argv)]
        options = {
            "stdin": subprocess.DEVNULL,
            "env": env,
            "process_group": 0,  # Ctrl-C is the conductor's alone; no new session, or the kernel would ignore nice
            "pass_fds": [sock.fileno()] if sock else [],
            "preexec_fn": functools.partial(_begin, self.nice),
        }
        return argv + (["--socket", str(sock.fileno())] if sock else []), options


def _begin(nice: int) -> None:
    """Die with the parent's thread, by the kernel, be as nice as told, and block no signal: what Ray starts from within
    a program inherits a blocked Ctrl-C. Runs between fork and exec."""
    when_parent_dies()
    os.nice(nice)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class Process(Protocol):
    """A program that was started. `pid` counts on its own machine; `caller` is its socket where it has one."""

    pid: int
    caller: Caller | None

    @property
    def returncode(self) -> int | None:
        """Its exit code once it has ended (negative: the signal), also when its machine was lost."""

    async def wait(self) -> int: ...

    def signal(self, signum: int) -> None:
        """Send a signal to it and its process group, which a stopped process obeys too. Nothing where it has ended."""

    async def cpu_s(self) -> float:
        """CPU seconds that it and its descendants have used."""


class Placement(Protocol):
    """Starts programs. `spreads`: each rank of a learner is a program of its own, on whichever machine has room."""

    spreads: bool

    async def start(self, program: Program, waits: OnWait) -> Process:
        """Start a program; `waits` is awaited when there is no room for it now. Raises `NoCapacity` when there is none in
        time, `Lost` when it was lost meanwhile, `OSError`."""

    async def usage(self, running: Mapping[str, Process], *, with_memory: bool) -> dict[str, dict[str, Any]]:
        """CPU time and memory of this process ("conductor") and of those that run, as `usage.sample` has them."""

    async def close(self) -> None:
        """Let go of the machines. Idempotent."""


class LocalProcess:
    """A `Process` that is this one's child."""

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
    """Every program is a child of this process, on this machine."""

    spreads = False

    async def start(self, program: Program, waits: OnWait) -> Process:
        ours, theirs = socket.socketpair() if program.with_socket else (None, None)
        argv, options = program.popen("127.0.0.1", theirs)
        program.log.parent.mkdir(parents=True, exist_ok=True)
        with program.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log, **options)
        if ours is None or theirs is None:
            return LocalProcess(process, None)
        theirs.close()
        caller = Caller(ours, program.name)
        await caller.open()
        return LocalProcess(process, caller)

    async def usage(self, running: Mapping[str, Process], *, with_memory: bool) -> dict[str, dict[str, Any]]:
        pids = {name: process.pid for name, process in running.items()}
        return await asyncio.to_thread(usage.sample, pids, with_memory)

    async def close(self) -> None:
        """Nothing is held."""


def signal_group(pid: int, signum: int) -> None:
    """Send a signal to a process and its process group; nothing where there is none."""
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        return
