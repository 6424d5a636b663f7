"""Supervises the child processes of the conductor: start, health checks, restarts, shutdown.

A child is ``python -m MODULE ...`` in its own process group, with its output in ``logs/<name>.log``. The kernel kills
it when the conductor dies (PR_SET_PDEATHSIG), and it sees end-of-file on its socket, so there are no orphans. A child
that dies is restarted with back-off, up to `MAX_RESTARTS` times within `RESTART_WINDOW_S`; then the run ends with an
error that names it. A child that does not answer for `hung_s` is killed, which counts as a death. Time in which it, or
the conductor, waited for a core does not count: on a loaded host a child is slow, and not hung."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.environments.fair_time import MAX_EXTENSION
from etude.errors import DeadlineExceeded, EtudeError
from etude.loop.placement import NO_ENV, LocalPlacement, NoCapacity, Placement, Process, Program
from etude.loop.rpc import Caller, ProcessLost
from etude.telemetry import Telemetry

MAX_RESTARTS, RESTART_WINDOW_S = 8, 60.0
READY_S = 600.0
"""Seconds for a live child to become ready. On a host with ten processes per core `import torch` alone takes minutes. A
child that dies is noticed at once."""
BEAT_S = 2.0
PARTS = 8
"""So many times in `hung_s` the supervisor looks whether a child that does not answer waits for a core."""
EXIT_RESTART = 75
"""Exit code (EX_TEMPFAIL) of a program that lost one of its own processes and should be started again."""
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
"""Environment of children that train: glibc keeps memory that a step frees for the next step, in huge pages, instead of
returning it to the kernel, which would map and zero it again. Saves a fifth of a step's CPU time. Other C libraries
ignore it."""


async def _pass(_: Child) -> None:
    """The default `on_wait`: does nothing."""


class Child:
    """One supervised process of a run, which can be started again after it has ended.

    `argv` are arguments for the Python interpreter. Its log is ``<name>.log`` in the folder `logs`. `env` are
    environment variables, unless its machine itself sets them. `placement` decides on which machine it runs; None: on
    this one. `devices` is the number of accelerators that it uses, if its machine has any."""

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
        """Start the process, with a socket for RPC calls if `with_socket`.

        `on_wait` is awaited with this child when no machine has free resources now. Until one has, the child has no
        process."""
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
        """The RPC client of the current process; None if it has no socket."""
        return self.process.caller if self.process else None

    @property
    def pid(self) -> int | None:
        """The pid of the current process; None if it has ended."""
        return self.process.pid if self.process and self.process.returncode is None else None

    async def exited(self) -> int:
        """Wait for the process to end, and return its exit code (negative: the number of the signal that killed it)."""
        assert self.process is not None, "start comes first"
        code = await self.process.wait()
        self.telemetry.event("process", name=self.name, state="exit", pid=self.process.pid, exit_code=code)
        return code

    @property
    def was_killed(self) -> bool:
        """Whether the process was ended by SIGKILL."""
        return self.process is not None and self.process.returncode == -signal.SIGKILL

    @property
    def recent_starts(self) -> int:
        """Number of starts within the last `RESTART_WINDOW_S` seconds."""
        return sum(time.monotonic() - t < RESTART_WINDOW_S for t in self.starts)

    def can_restart(self) -> bool:
        """Return whether the process may be started again. It may not if it was started too often recently."""
        return self.recent_starts <= MAX_RESTARTS

    async def back_off(self) -> None:
        """Sleep before a restart. The more often the process was started recently, the longer the sleep."""
        await asyncio.sleep(min(2.0, 0.05 * 2**self.recent_starts))

    def kill(self) -> None:
        """Send SIGKILL to the process and its process group."""
        if self.process is not None:
            self.process.signal(signal.SIGKILL)

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """Send SIGTERM; if the process has not ended after `grace_s` seconds, kill its process group. Idempotent."""
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
        """Return a sentence for errors: whether the process is alive and how much CPU time it used."""
        if self.process is None or self.pid is None:
            return "it has ended"
        cpu_s = await self.process.cpu_s()
        return f"it is alive and has used {cpu_s:.1f} s of CPU time in {time.monotonic() - self.starts[-1]:.0f} s"

    async def queued_s(self) -> dict[int, float]:
        """Return how many seconds each of its threads has waited for a core, by thread id."""
        return {} if self.process is None else await self.process.queued_s()

    def log_tail(self, lines: int = 12) -> str:
        """Return the last lines of its log, for an error message."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""


@dataclass(frozen=True)
class Role:
    """How the supervisor starts and checks one kind of child process.

    - `on_up` is awaited after each start; it returns when the child is ready, or raises, within `ready_s` seconds.
    - `health_check` is awaited regularly; it raises when the child is not healthy.
    - `with_socket`: whether the child answers RPC calls.
    - `on_wait` is awaited when no machine has free resources for the child."""

    on_up: Callable[[Child], Awaitable[object]]
    health_check: Callable[[Child], Awaitable[object]]
    with_socket: bool = False
    ready_s: float = READY_S
    on_wait: Callable[[Child], Awaitable[object]] = _pass


class Supervisor:
    """Keeps named children alive and healthy.

    A child that gives no answer for `hung_s` seconds is restarted. `placement` decides where children run, and is
    closed with the supervisor. The future `failed` gets the error of a child that cannot be kept alive."""

    def __init__(self, telemetry: Telemetry, *, hung_s: float = 30.0, placement: Placement | None = None) -> None:
        self.telemetry, self.hung_s = telemetry, hung_s
        self.placement = placement or LocalPlacement()
        self.children: dict[str, Child] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._joining: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Future[EtudeError] = asyncio.get_running_loop().create_future()

    @property
    def call_s(self) -> float:
        """The deadline in seconds for the call of a health check. It is longer than the supervisor waits for the check
        on any host."""
        return 2 * MAX_EXTENSION * self.hung_s

    async def add(self, child: Child, role: Role) -> None:
        """Start a child, wait until it is ready, and supervise it from then on.

        A child that is killed or lost meanwhile is started again. Raises the error of a child that cannot start."""
        self.children[child.name] = child
        while True:
            try:
                await self._start(child, role)
                break
            except EtudeError as error:
                if not ((child.was_killed or isinstance(error, ProcessLost)) and child.can_restart()):
                    raise
        self._watchers[child.name] = asyncio.create_task(self._watch(child, role), name=f"watch {child.name}")

    async def add_all(self, members: Iterable[tuple[Child, Role]]) -> None:
        """Start children of the same kind concurrently. Returns at once when there are none.

        Returns when at least one is ready and all others are ready or wait for a machine; those are added later."""
        changed = asyncio.Event()

        def reporting(role: Role) -> Role:
            async def waits(child: Child) -> None:
                changed.set()
                await role.on_wait(child)

            return replace(role, on_wait=waits)

        adding = {asyncio.create_task(self.add(child, reporting(role))): child for child, role in members}
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
                task.add_done_callback(self._on_joined)

    def _on_joined(self, task: asyncio.Task[None]) -> None:
        self._joining.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            hint = "see the logs of the run"
            self._fail(
                error
                if isinstance(error, EtudeError)
                else EtudeError("a child process could not be started", repr(error), hint=hint)
            )

    async def _start(self, child: Child, role: Role) -> None:
        await child.start(with_socket=role.with_socket, on_wait=role.on_wait)
        assert child.process is not None, "just started"
        up = asyncio.create_task(_with_deadline(role.on_up(child), role.ready_s, child, "to be ready"))
        gone = asyncio.create_task(child.process.wait())
        try:
            await asyncio.wait({up, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            up.cancel()  # its error would be lost
            gone.cancel()
            raise
        lost = up.done() and isinstance(up.exception(), ProcessLost)
        if lost or not up.done():  # the socket may close shortly before the process can be reaped
            up.cancel()
            await asyncio.wait({gone}, timeout=2.0)
            await child.stop(grace_s=1.0)
            facts = child.log_tail() or f"its log is empty; exit code {child.process.returncode}"
            raise EtudeError(f"{child.name} ended while starting", facts, hint=f"the full log is {child.log_path}")
        gone.cancel()
        await up
        self.telemetry.event("process", name=child.name, state="ready", pid=child.pid)

    async def _watch(self, child: Child, role: Role) -> None:
        while True:
            code = await self._wait_for_exit(child, role)
            if not child.can_restart():
                self._fail(
                    EtudeError(
                        f"{child.name} keeps dying",
                        f"exit code {code}; the end of its log:\n{child.log_tail()}",
                        hint=f"the full log is {child.log_path}; fix the cause, then resume the run",
                    )
                )
                return
            await child.back_off()
            self.telemetry.event("process", name=child.name, state="restart")
            try:
                await self._restart(child, role)
            except EtudeError as error:
                self._fail(error)
                return
            except OSError as error:
                hint = "check the host's memory, disk and process limits, then resume the run"
                self._fail(EtudeError(f"{child.name} cannot be restarted", str(error), hint=hint))
                return

    async def _restart(self, child: Child, role: Role) -> None:
        """Restart a lost child until it has a process. Raises the error that ends the run. A start that fails before
        there is a process, because its machine is lost too, belongs to the same loss: no exit and no restart is
        reported for it."""
        while True:
            try:
                await self._start(child, role)
                return
            except EtudeError as error:
                if isinstance(error, NoCapacity) or not child.can_restart():
                    raise
            if child.process is not None:  # it was started and did not become ready: a new loss
                await child.stop(grace_s=0.1)
                return
            await child.back_off()

    async def _wait_for_exit(self, child: Child, role: Role) -> int:
        """Wait for the exit code. A child that does not answer for `hung_s` is killed first. That is reported once,
        however long its end takes."""
        exited, is_killed = asyncio.create_task(child.exited()), False
        try:
            while not (await asyncio.wait({exited}, timeout=BEAT_S))[0]:
                try:
                    await _wait_for_answer(role.health_check(child), self.hung_s, child)
                except DeadlineExceeded as error:
                    if not is_killed:
                        self.telemetry.event("process", name=child.name, state="hung", pid=child.pid, reason=error.what)
                    is_killed = True
                    child.kill()
                except EtudeError:
                    continue  # it is about to end
            return exited.result()
        finally:
            exited.cancel()

    def _fail(self, error: EtudeError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    def pids(self) -> dict[str, int]:
        """Return the pids of the running children, by name."""
        return {name: child.pid for name, child in self.children.items() if child.pid is not None}

    async def remove(self, name: str) -> None:
        """Stop a child and no longer supervise it."""
        watcher = self._watchers.pop(name, None)
        if watcher:
            watcher.cancel()
        child = self.children.pop(name, None)
        if child:
            await child.stop()

    async def usage(self, with_memory: bool) -> dict[str, dict[str, Any]]:
        """Return the CPU time and memory of this process and of its running children, as `usage.sample` does."""
        running = {name: child.process for name, child in self.children.items() if child.process and child.pid}
        return await self.placement.usage(running, with_memory=with_memory)

    async def close(self) -> None:
        """Stop every child and close the placement."""
        for task in [*self._watchers.values(), *self._joining]:
            task.cancel()
        self._watchers.clear()
        await asyncio.gather(*(c.stop() for c in self.children.values()))
        self.children.clear()
        await self.placement.close()


async def _wait_for_answer(check: Awaitable[object], hung_s: float, child: Child) -> None:
    """Wait for the end of a health check. Raises `DeadlineExceeded` after `hung_s` seconds in which the child could
    run: it was not in the kernel's run queue, and this process could look. All together at most `MAX_EXTENSION` times
    as long."""
    part_s, could_run_s = hung_s / PARTS, 0.0
    began = time.monotonic()
    queued: dict[int, float] = {}
    answer = asyncio.ensure_future(check)
    try:
        for _ in range(round(PARTS * MAX_EXTENSION)):
            if (await asyncio.wait({answer}, timeout=part_s))[0]:
                answer.result()
                return
            before, queued = queued, await child.queued_s()
            waited_s = max((queued[one] - before[one] for one in queued.keys() & before.keys()), default=0.0)
            could_run_s += max(0.0, part_s - waited_s)  # a late look counts as one part
            if could_run_s > hung_s - part_s / 2:
                break
    finally:
        answer.cancel()
    raise await _overdue(child, "to answer", time.monotonic() - began)


async def _with_deadline(work: Awaitable[object], seconds: float, child: Child, what: str) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        raise await _overdue(child, what, seconds) from None


async def _overdue(child: Child, what: str, seconds: float) -> DeadlineExceeded:
    hint = f"its log is {child.log_path}; if that is empty the host is overloaded: run fewer processes on it"
    return DeadlineExceeded(f"waited for {child.name} {what}", f"for {seconds:.3g} s; {await child.state()}", hint=hint)


@contextlib.asynccontextmanager
async def unless_failed(supervisor: Supervisor) -> AsyncIterator[None]:
    """Run the block; cancel it and raise the error when a child cannot be kept alive."""
    block = asyncio.current_task()
    assert block is not None, "runs in a task"

    def give_up(_: asyncio.Future[EtudeError]) -> None:
        block.cancel()

    supervisor.failed.add_done_callback(give_up)
    try:
        yield
    except asyncio.CancelledError:
        if supervisor.failed.done():
            block.uncancel()
            raise supervisor.failed.result() from None
        raise
    finally:
        supervisor.failed.remove_done_callback(give_up)
