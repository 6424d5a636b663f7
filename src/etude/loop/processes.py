"""Children of the conductor: started, watched, restarted, and never left behind.

A child is ``python -m MODULE ...`` in its own process group with its output in ``logs/<name>.log``. It gets a
SIGKILL from the kernel when the conductor dies (PR_SET_PDEATHSIG) and sees end-of-file on its socket, so there are
no orphans. A child that dies is restarted with back-off, up to `MAX_RESTARTS` times within `RESTART_WINDOW_S`;
then the run ends by name. One that lives and stays silent for `hung_s` is as good as dead: it is killed, by name.
Knows nothing of what the children do.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from etude.errors import DeadlineExceeded, EtudeError
from etude.loop.usage import Processes
from etude.loop.wire import Caller, Lost
from etude.telemetry import Telemetry

MAX_RESTARTS, RESTART_WINDOW_S = 8, 60.0
READY_S = 600.0
"""For a child that lives to be ready: on a host with ten processes a core `import torch` alone takes minutes. One that
dies is seen at once."""
BEAT_S = 2.0
AGAIN = 75
"""Exit code of a program that lost a process of its own and should simply be started again (EX_TEMPFAIL)."""
NOTHING: Mapping[str, str] = MappingProxyType({})
KEEPS_MEMORY = {
    "GLIBC_TUNABLES": ":".join(
        f"glibc.malloc.{key}={value}"
        for key, value in {
            "hugetlb": 1,
            "mmap_threshold": 1 << 30,
            "trim_threshold": 1 << 30,
            "top_pad": 1 << 26,
        }.items()
    )
}
"""For children that train: what a step frees is kept for the next one, in huge pages, instead of going back to the
kernel to be mapped and zeroed again. A fifth of a step's CPU time; glibc only, others ignore it."""
_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent's thread ends. Runs between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _begin(nice: int) -> None:
    """Die with the parent, and be as nice as told."""
    die_with_parent()
    os.nice(nice)


class Child:
    """One supervised process. `caller` is its socket when it was started with ``socket=True``; `env` is what its
    environment should hold where ours says nothing."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        logs: Path,
        telemetry: Telemetry,
        nice: int = 0,
        env: Mapping[str, str] = NOTHING,
    ) -> None:
        self.name, self.argv, self.nice, self.env = name, list(argv), nice, env
        self.log_path = logs / f"{name}.log"
        self.telemetry = telemetry
        self.process: asyncio.subprocess.Process | None = None
        self.caller: Caller | None = None
        self.starts: list[float] = []

    async def start(self, *, with_socket: bool) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        env = {**self.env, **os.environ} | {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        argv, ours, theirs = [sys.executable, *self.argv], None, None
        if with_socket:
            ours, theirs = socket.socketpair()
            argv += ["--socket", str(theirs.fileno())]
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                process_group=0,  # Ctrl-C is the conductor's alone; no new session, or the kernel would ignore nice
                pass_fds=[theirs.fileno()] if theirs else [],
                preexec_fn=functools.partial(_begin, self.nice),
            )
        self.starts.append(time.monotonic())
        self.telemetry.event("process", name=self.name, state="start", pid=self.process.pid)
        if ours and theirs:
            theirs.close()
            self.caller = Caller(ours, self.name)
            await self.caller.open()

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process and self.process.returncode is None else None

    async def exited(self) -> int:
        """Wait for the process to end; its exit code (negative: the signal)."""
        assert self.process is not None, "a child is awaited after it was started"
        code = await self.process.wait()
        self.telemetry.event("process", name=self.name, state="exit", pid=self.process.pid, exit_code=code)
        return code

    @property
    def was_killed(self) -> bool:
        """Whether a SIGKILL ended it."""
        return self.process is not None and self.process.returncode == -signal.SIGKILL

    @property
    def recent_starts(self) -> int:
        return sum(time.monotonic() - t < RESTART_WINDOW_S for t in self.starts)

    def may_restart(self) -> bool:
        return self.recent_starts <= MAX_RESTARTS

    def kill(self) -> None:
        """Kill it and its process group, which a stopped process obeys too."""
        if self.pid is not None:
            _signal_group(self.pid, signal.SIGKILL)

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """End it: terminate, then kill its whole process group. Idempotent."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            _signal_group(process.pid, signal.SIGKILL)
            await process.wait()

    @property
    def state(self) -> str:
        """Whether it lives and what it has done so far, for an error message."""
        if self.pid is None:
            return "it has ended"
        cpu_s = Processes().cpu_s(self.pid)
        return f"it is alive and has used {cpu_s:.1f} s of CPU time in {time.monotonic() - self.starts[-1]:.0f} s"

    def last_words(self, lines: int = 12) -> str:
        """The end of its log, for an error message."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""


def _signal_group(pid: int, signum: int) -> None:
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        return


@dataclass(frozen=True)
class Role:
    """How a child is treated."""

    on_up: Callable[[Child], Awaitable[object]]  # after each start: makes it ready, or raises
    answers: Callable[[Child], Awaitable[object]]  # a question that any healthy one answers at once; or raises
    with_socket: bool = False
    ready_s: float = READY_S


class Supervisor:
    """Keeps named children alive and answering. `hung_s`: how long one may stay silent."""

    def __init__(self, telemetry: Telemetry, *, hung_s: float = 30.0) -> None:
        self.telemetry, self.hung_s = telemetry, hung_s
        self.children: dict[str, Child] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self.failed: asyncio.Future[EtudeError] = asyncio.get_running_loop().create_future()

    async def add(self, child: Child, role: Role) -> None:
        """Start a child, wait until it is ready, and keep it so. One that says why it cannot start ends the wait; one
        that is killed meanwhile is started again."""
        self.children[child.name] = child
        while True:
            try:
                await self._bring_up(child, role)
                break
            except EtudeError:
                if not (child.was_killed and child.may_restart()):
                    raise
        self._watchers[child.name] = asyncio.create_task(self._watch(child, role), name=f"watch {child.name}")

    async def _bring_up(self, child: Child, role: Role) -> None:
        await child.start(with_socket=role.with_socket)
        assert child.process is not None, "just started"
        up = asyncio.create_task(_within(role.on_up(child), role.ready_s, child, "to be ready"))
        gone = asyncio.create_task(child.process.wait())
        try:
            await asyncio.wait({up, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            up.cancel()  # else it would end with its child, and nobody hear of it
            gone.cancel()
            raise
        lost = up.done() and isinstance(up.exception(), Lost)
        if lost or not up.done():  # its socket may close a moment before it can be waited for
            up.cancel()
            await asyncio.wait({gone}, timeout=2.0)
            await child.stop(grace_s=1.0)
            facts = child.last_words() or f"without a word; exit code {child.process.returncode}"
            raise EtudeError(f"{child.name} ended while starting", facts, hint=f"the whole log is {child.log_path}")
        gone.cancel()
        await up
        self.telemetry.event("process", name=child.name, state="ready", pid=child.pid)

    async def _watch(self, child: Child, role: Role) -> None:
        while True:
            code = await self._until_exit(child, role)
            if not child.may_restart():
                self._fail(
                    EtudeError(
                        f"{child.name} keeps dying",
                        f"exit code {code}; its last words:\n{child.last_words()}",
                        hint=f"the whole log is {child.log_path}; mend the cause, then resume the run",
                    )
                )
                return
            await asyncio.sleep(min(2.0, 0.05 * 2**child.recent_starts))  # back-off, not synchronisation
            self.telemetry.event("process", name=child.name, state="restart")
            try:
                await self._bring_up(child, role)
            except EtudeError as error:
                if not child.may_restart():
                    self._fail(error)
                    return
                await child.stop(grace_s=0.1)
            except OSError as error:
                hint = "the host refused: see its memory, disk and process limits, then resume the run"
                self._fail(EtudeError(f"{child.name} cannot be started again", str(error), hint=hint))
                return

    async def _until_exit(self, child: Child, role: Role) -> int:
        """Its exit code. One that stays silent for `hung_s` is killed first."""
        exited = asyncio.create_task(child.exited())
        try:
            while not (await asyncio.wait({exited}, timeout=BEAT_S))[0]:
                try:
                    await _within(role.answers(child), self.hung_s, child, "to answer")
                except DeadlineExceeded as error:
                    self.telemetry.event("process", name=child.name, state="hung", pid=child.pid, reason=error.what)
                    child.kill()
                except EtudeError:
                    continue  # it is going: its end will tell
            return exited.result()
        finally:
            exited.cancel()

    def _fail(self, error: EtudeError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    def pids(self) -> dict[str, int]:
        """Children that run now: name → pid."""
        return {name: child.pid for name, child in self.children.items() if child.pid is not None}

    async def remove(self, name: str) -> None:
        """Stop a child and stop watching it."""
        watcher = self._watchers.pop(name, None)
        if watcher:
            watcher.cancel()
        child = self.children.pop(name, None)
        if child:
            await child.stop()

    async def close(self) -> None:
        """Stop every child."""
        for watcher in self._watchers.values():
            watcher.cancel()
        self._watchers.clear()
        await asyncio.gather(*(c.stop() for c in self.children.values()))
        self.children.clear()


async def _within(work: Awaitable[object], seconds: float, child: Child, what: str) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        raise DeadlineExceeded(
            f"waited for {child.name} {what}",
            f"for {seconds:g} s; {child.state}",
            hint=f"its log is {child.log_path}; where that is empty the host is too busy: run less beside it",
        ) from None
