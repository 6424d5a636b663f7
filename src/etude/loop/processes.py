"""Children of the conductor: started, watched, restarted, and never left behind.

A child is ``python -m MODULE ...`` in its own process group with its output in ``logs/<name>.log``. It gets a
SIGKILL from the kernel when the conductor dies (PR_SET_PDEATHSIG) and sees end-of-file on its socket, so there are
no orphans. A child that dies is restarted with back-off, up to `MAX_RESTARTS` times within `RESTART_WINDOW_S`;
then the run ends by name. One that lives and stays silent for `hung_s` is as good as dead: it is killed, by name.
Knows nothing of what the children do.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.errors import DeadlineExceeded, EtudeError
from etude.loop.placement import NO_ENV, LocalPlacement, NoCapacity, Placement, Process, Program
from etude.loop.rpc import Caller, ProcessLost
from etude.telemetry import Telemetry

MAX_RESTARTS, RESTART_WINDOW_S = 8, 60.0
READY_S = 600.0
"""For a child that lives to be ready: on a host with ten processes a core `import torch` alone takes minutes. One that
dies is seen at once."""
BEAT_S = 2.0
EXIT_RESTART = 75
"""Exit code of a program that lost a process of its own and should simply be started again (EX_TEMPFAIL)."""
KEEP_MEMORY_ENV = {
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


async def _pass(_: Child) -> None:
    """For a child whose waiting matters to nobody."""


class Child:
    """One supervised process of a run. `caller`: its socket when it was started with one. `env`: environment variables,
    set where its machine does not set them. `placement`: decides where it runs; None: on this machine. `devices`: the
    number of accelerators that it computes on, where its machine has any."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        logs: Path,
        telemetry: Telemetry,
        nice: int = 0,
        env: Mapping[str, str] = NO_ENV,
        placement: Placement | None = None,
        devices: int = 0,
    ) -> None:
        self.name, self.argv, self.nice, self.env, self.devices = name, list(argv), nice, env, devices
        self.log_path = logs / f"{name}.log"
        self.telemetry = telemetry
        self.placement = placement or LocalPlacement()
        self.process: Process | None = None
        self.is_waiting = False  # for a machine that has room
        self.starts: list[float] = []

    async def start(self, *, with_socket: bool, on_wait: Callable[[Child], Awaitable[object]] = _pass) -> None:
        """Start it; `waits` is awaited where there is no room for it now. Until that is done it has no process."""
        self.process = None
        program = Program(self.name, self.argv, self.log_path, self.nice, self.env, with_socket, self.devices)

        async def wait(reason: str) -> None:
            self.is_waiting = True
            self.telemetry.event("process", name=self.name, state="waiting", reason=reason)
            await on_wait(self)

        try:
            self.process = await self.placement.start(program, wait)
        finally:
            self.is_waiting = False
            self.starts.append(time.monotonic())
        self.telemetry.event("process", name=self.name, state="start", pid=self.process.pid)

    @property
    def caller(self) -> Caller | None:
        return self.process.caller if self.process else None

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

    def can_restart(self) -> bool:
        return self.recent_starts <= MAX_RESTARTS

    async def back_off(self) -> None:
        """Wait before it is started again: the longer, the more often it was started lately."""
        await asyncio.sleep(min(2.0, 0.05 * 2**self.recent_starts))

    def kill(self) -> None:
        """Kill it and its process group."""
        if self.process is not None:
            self.process.signal(signal.SIGKILL)

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """End it: terminate, then kill its whole process group. Idempotent."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            process.signal(signal.SIGKILL)
            await process.wait()

    async def state(self) -> str:
        """Whether it lives and what it has done so far, for an error message."""
        if self.process is None or self.pid is None:
            return "it has ended"
        cpu_s = await self.process.cpu_s()
        return f"it is alive and has used {cpu_s:.1f} s of CPU time in {time.monotonic() - self.starts[-1]:.0f} s"

    def log_tail(self, lines: int = 12) -> str:
        """The end of its log, for an error message."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""


@dataclass(frozen=True)
class Role:
    """How a child is treated."""

    on_up: Callable[[Child], Awaitable[object]]  # after each start: makes it ready, or raises
    health_check: Callable[[Child], Awaitable[object]]  # a question that any healthy one answers at once; or raises
    with_socket: bool = False
    ready_s: float = READY_S
    on_wait: Callable[[Child], Awaitable[object]] = _pass  # there is no room for it now


class Supervisor:
    """Keeps named children alive and answering. `hung_s`: how long one may stay silent. `placement`: where they run;
    closed with this."""

    def __init__(self, telemetry: Telemetry, *, hung_s: float = 30.0, placement: Placement | None = None) -> None:
        self.telemetry, self.hung_s = telemetry, hung_s
        self.placement = placement or LocalPlacement()
        self.children: dict[str, Child] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._joining: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Future[EtudeError] = asyncio.get_running_loop().create_future()

    async def add(self, child: Child, role: Role) -> None:
        """Start a child, wait until it is ready, and keep it so. One that says why it cannot start ends the wait; one
        that is killed or lost meanwhile is started again."""
        self.children[child.name] = child
        while True:
            try:
                await self._bring_up(child, role)
                break
            except EtudeError as error:
                if not ((child.was_killed or isinstance(error, ProcessLost)) and child.can_restart()):
                    raise
        self._watchers[child.name] = asyncio.create_task(self._watch(child, role), name=f"watch {child.name}")

    async def add_all(self, members: Iterable[tuple[Child, Role]]) -> None:
        """`add` children that do the same, at once. Those that wait for room join when there is some: this returns when
        all others are ready, and one at least; where there are none at all, at once."""
        changed = asyncio.Event()

        def told(role: Role) -> Role:
            async def waits(child: Child) -> None:
                changed.set()
                await role.on_wait(child)

            return replace(role, on_wait=waits)

        adding = {asyncio.create_task(self.add(child, told(role))): child for child, role in members}
        if not adding:
            return
        for task in adding:
            task.add_done_callback(lambda _: changed.set())
        try:
            while not (any(t.done() for t in adding) and all(t.done() or c.is_waiting for t, c in adding.items())):
                changed.clear()
                await changed.wait()  # each has deadlines of its own
                for task in adding:
                    if task.done():
                        task.result()
        except BaseException:
            for task in adding:
                task.cancel()
            raise
        for task in adding:
            if not task.done():
                self._joining.add(task)
                task.add_done_callback(self._joined)

    def _joined(self, task: asyncio.Task[None]) -> None:
        self._joining.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            hint = "see the logs of the run"
            self._fail(error if isinstance(error, EtudeError) else EtudeError("a child failed", repr(error), hint=hint))

    async def _bring_up(self, child: Child, role: Role) -> None:
        await child.start(with_socket=role.with_socket, on_wait=role.on_wait)
        assert child.process is not None, "just started"
        up = asyncio.create_task(_within(role.on_up(child), role.ready_s, child, "to be ready"))
        gone = asyncio.create_task(child.process.wait())
        try:
            await asyncio.wait({up, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            up.cancel()  # else it would end with its child, and nobody hear of it
            gone.cancel()
            raise
        lost = up.done() and isinstance(up.exception(), ProcessLost)
        if lost or not up.done():  # its socket may close a moment before it can be waited for
            up.cancel()
            await asyncio.wait({gone}, timeout=2.0)
            await child.stop(grace_s=1.0)
            facts = child.log_tail() or f"without a word; exit code {child.process.returncode}"
            raise EtudeError(f"{child.name} ended while starting", facts, hint=f"the whole log is {child.log_path}")
        gone.cancel()
        await up
        self.telemetry.event("process", name=child.name, state="ready", pid=child.pid)

    async def _watch(self, child: Child, role: Role) -> None:
        while True:
            code = await self._until_exit(child, role)
            if not child.can_restart():
                self._fail(
                    EtudeError(
                        f"{child.name} keeps dying",
                        f"exit code {code}; its last words:\n{child.log_tail()}",
                        hint=f"the whole log is {child.log_path}; mend the cause, then resume the run",
                    )
                )
                return
            await child.back_off()
            self.telemetry.event("process", name=child.name, state="restart")
            try:
                await self._start_again(child, role)
            except EtudeError as error:
                self._fail(error)
                return
            except OSError as error:
                hint = "the host refused: see its memory, disk and process limits, then resume the run"
                self._fail(EtudeError(f"{child.name} cannot be started again", str(error), hint=hint))
                return

    async def _start_again(self, child: Child, role: Role) -> None:
        """Start a lost child until it has a process again. Raises what ends the run. A start that fails before there is
        a process (its machine is lost, too) belongs to the same loss: no exit and no restart is reported for it."""
        while True:
            try:
                await self._bring_up(child, role)
                return
            except EtudeError as error:
                if isinstance(error, NoCapacity) or not child.can_restart():
                    raise
            if child.process is not None:  # it did not become ready: its end is a loss of its own
                await child.stop(grace_s=0.1)
                return
            await child.back_off()

    async def _until_exit(self, child: Child, role: Role) -> int:
        """Its exit code. One that stays silent for `hung_s` is killed first, and reported once however long its end
        takes to be seen."""
        exited, is_killed = asyncio.create_task(child.exited()), False
        try:
            while not (await asyncio.wait({exited}, timeout=BEAT_S))[0]:
                try:
                    await _within(role.health_check(child), self.hung_s, child, "to answer")
                except DeadlineExceeded as error:
                    if not is_killed:
                        self.telemetry.event("process", name=child.name, state="hung", pid=child.pid, reason=error.what)
                    is_killed = True
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

    async def usage(self, with_memory: bool) -> dict[str, dict[str, Any]]:
        """CPU time and memory of this process and of its running children, as `usage.sample` has them."""
        running = {name: child.process for name, child in self.children.items() if child.process and child.pid}
        return await self.placement.usage(running, with_memory=with_memory)

    async def close(self) -> None:
        """Stop every child, and let go of where they ran."""
        for task in [*self._watchers.values(), *self._joining]:
            task.cancel()
        self._watchers.clear()
        await asyncio.gather(*(c.stop() for c in self.children.values()))
        self.children.clear()
        await self.placement.close()


async def _within(work: Awaitable[object], seconds: float, child: Child, what: str) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        raise DeadlineExceeded(
            f"waited for {child.name} {what}",
            f"for {seconds:g} s; {await child.state()}",
            hint=f"its log is {child.log_path}; where that is empty the host is too busy: run less beside it",
        ) from None
