"""`Runtime` in front of another: machines that will be asked for are forked ahead, callers wait in line.

What is kept ready follows a forecast of each snapshot's demand (`forecast`), within a budget and only while the host
is idle enough (`pressure`). A caller takes what is ready at once and has the rest forked; where there is no room, or
the host is pressed, callers wait in the order they came. Nobody overtakes, so a large group is not starved by small
ones; a machine that nobody has asked for always gives way to one that somebody waits for.

Knows nothing of what stands behind it, which is assumed to serve nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.environments.burst.forecast import Forecast
from etude.environments.burst.lent import Lent, answers, closed, portable
from etude.environments.burst.pressure import AHEAD_OF_CALLERS, FOR_CALLERS, Ceilings, Read, admit, read_pressure
from etude.errors import MachineError
from etude.records.command import check_count
from etude.records.image import Image
from etude.seams import Holding, Machine, Runtime, RuntimeInfo


@dataclass
class WarmCounts:
    """What happened so far, in machines; `spare`, `alive` and `waiting` are of now."""

    warm: int = 0  # given out ready
    cold: int = 0  # forked while the caller waited
    let_go: int = 0  # made ahead and not used
    dead: int = 0  # made ahead and found dead
    spare: int = 0
    alive: int = 0  # with callers, or on their way to them
    waiting: int = 0  # callers in line


@dataclass(eq=False)
class _Waiter:
    snapshot: str
    n: int
    turn: asyncio.Future[None]
    ready: list[Machine] = field(default_factory=list)  # spares that are its own once it is its turn


class WarmRuntime:
    """Hands out warm forks of `runtime`. At most `max_machines` are alive, `spares` of them not asked for yet.

    `read` reads the host's pressure, once in `tick_s` at most. Where callers wait and why is in `counts` and in the
    error of those whose deadline passes.

    >>> from etude.testing import MemoryRuntime
    >>> async def main():
    ...     runtime = WarmRuntime(MemoryRuntime(), max_machines=2)
    ...     snapshot = await runtime.prepare({"hi.py": b""})
    ...     first = await runtime.fork(snapshot, 2)
    ...     second = asyncio.create_task(runtime.fork(snapshot, 1, deadline_s=10))
    ...     await first[0].close()  # makes room
    ...     await second
    ...     await runtime.close()
    ...     return runtime.counts.cold
    >>> asyncio.run(main())
    3
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        max_machines: int = 512,
        spares: int = 64,
        max_waiting: int = 4096,
        forecast: Forecast | None = None,
        for_callers: Ceilings = FOR_CALLERS,
        ahead: Ceilings = AHEAD_OF_CALLERS,
        read: Read = read_pressure,
        clock: Callable[[], float] = time.monotonic,
        tick_s: float = 0.25,
    ) -> None:
        self._runtime, self._max_machines, self._spares = runtime, max_machines, min(spares, max_machines)
        self._max_waiting, self._forecast = max_waiting, forecast if forecast is not None else Forecast()
        self._for_callers, self._ahead, self._read = for_callers, ahead, read
        self._clock, self._tick_s = clock, tick_s
        self._ready: dict[str, deque[Machine]] = {}
        self._making: dict[str, int] = {}
        self._refused: set[str] = set()  # snapshots that could not be forked ahead since they were last asked for
        self._waiting: deque[_Waiter] = deque()
        self._blocked = ""  # what the first in line waits for
        self._reading, self._read_at, self._started = read(), clock(), 0
        self._counts = WarmCounts()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._tending: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def info(self) -> RuntimeInfo:
        """That of the runtime behind."""
        return self._runtime.info

    @property
    def counts(self) -> WarmCounts:
        """A copy of the counters."""
        spare = sum(map(len, self._ready.values()))
        return WarmCounts(**{**vars(self._counts), "spare": spare, "waiting": len(self._waiting)})

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        """See `Runtime.prepare`."""
        return await self._runtime.prepare(files, image=image)

    async def pack(self, snapshot: str, *, max_bytes: int) -> bytes:
        """See `Portable.pack`. `MachineError` where the runtime behind is not `Portable`."""
        return await portable(self._runtime).pack(snapshot, max_bytes=max_bytes)

    async def unpack(self, packed: bytes) -> str:
        """See `Portable.unpack`."""
        return await portable(self._runtime).unpack(packed)

    def hold(self, snapshot: str) -> int:
        """See `Holding.hold`; 0 where the runtime behind holds nothing."""
        return self._runtime.hold(snapshot) if isinstance(self._runtime, Holding) else 0

    def release(self, snapshot: str) -> None:
        """See `Holding.release`."""
        if isinstance(self._runtime, Holding):
            self._runtime.release(snapshot)

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        """See `Runtime.fork`. Waits in line where there is no room, or the host is pressed."""
        check_count(n)
        self._must_be_open()
        if n > self._max_machines:
            raise MachineError(f"{n} machines asked for", f"at most {self._max_machines}", hint="raise max_machines")
        if len(self._waiting) >= self._max_waiting:
            facts = f"{len(self._waiting)} callers wait for {self._blocked}"
            raise MachineError("the line for machines is full", facts, hint="ask again later, or for fewer at once")
        self._forecast.asked(snapshot, self._clock(), n)
        self._refused.discard(snapshot)
        if self._tending is None:
            self._tending = self._spawn(self._tend_always())
        deadline = asyncio.get_running_loop().time() + deadline_s
        waiter = _Waiter(snapshot, n, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn_of(waiter)
                return await self._given(waiter, deadline)
        except TimeoutError:
            what = "machines to start" if waiter.turn.done() and not waiter.turn.cancelled() else self._blocked
            facts = f"waited {deadline_s:g} s for {what}; {self._counts.alive} are alive"
            raise MachineError(
                f"{n} machines could not be forked", facts, hint="close machines, or wait longer"
            ) from None

    async def _turn_of(self, waiter: _Waiter) -> None:
        self._waiting.append(waiter)
        self._pump()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled():
                self._give_up(waiter.ready, waiter.n)
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(waiter)
                self._pump()  # the next in line may be content with less
            raise

    async def _given(self, waiter: _Waiter, deadline: float) -> list[Machine]:
        """The waiter's machines: those that were ready and answer, and new ones."""
        taken = list(waiter.ready)
        try:
            alive = await asyncio.gather(*map(answers, taken))
            dead = [machine for machine, answered in zip(taken, alive, strict=True) if not answered]
            taken = [machine for machine in taken if machine not in dead]
            self._let_go(dead)
            self._counts.dead += len(dead)
            missing, warm = waiter.n - len(taken), len(taken)
            if missing:
                left_s = max(0.001, deadline - asyncio.get_running_loop().time())
                taken += await self._runtime.fork(waiter.snapshot, missing, deadline_s=left_s)
        except BaseException:
            self._give_up(taken, waiter.n)
            raise
        self._counts.warm += warm
        self._counts.cold += missing
        return [Lent(machine, self._returned) for machine in taken]

    def _give_up(self, machines: list[Machine], n: int) -> None:
        self._let_go(machines)
        self._counts.alive -= n
        self._pump()

    def _returned(self) -> None:
        self._counts.alive -= 1
        self._pump()

    def _pump(self) -> None:
        """Whose turn it is, goes; the first who cannot, and all behind, wait."""
        while self._waiting and not self._closed:
            waiter = self._waiting[0]
            if waiter.turn.done():  # cancelled, and about to leave the line
                self._waiting.popleft()
                continue
            self._blocked = self._why_not(waiter)
            if self._blocked:
                return
            ready = self._ready.get(waiter.snapshot, deque())
            waiter.ready = [ready.popleft() for _ in range(min(waiter.n, len(ready)))]
            self._waiting.popleft()
            self._counts.alive += waiter.n
            self._started += waiter.n - len(waiter.ready)
            waiter.turn.set_result(None)

    def _why_not(self, waiter: _Waiter) -> str:
        """What the first in line has to wait for; "" when it may go. Spares of others make room for it."""
        fresh = max(0, waiter.n - len(self._ready.get(waiter.snapshot, ())))
        missing = fresh - (self._max_machines - self._counts.alive - self._num_ahead())
        if missing > 0:
            missing -= self._evict(missing, but=waiter.snapshot)
        if missing > 0:
            return f"room among {self._max_machines} machines"
        allowed, why = self._allowed(self._for_callers)
        if fresh > allowed:
            self._evict(self._max_machines, but=waiter.snapshot)
            return f"the host to be less pressed ({why})"
        return ""

    def _num_ahead(self) -> int:
        return sum(map(len, self._ready.values())) + sum(self._making.values())

    def _allowed(self, ceilings: Ceilings) -> tuple[int, str]:
        if self._clock() - self._read_at >= self._tick_s:
            self._reading, self._read_at, self._started = self._read(), self._clock(), 0
        allowed, why = admit(self._reading, ceilings)
        return max(0, allowed - self._started), why

    def _evict(self, n: int, *, but: str = "") -> int:
        """Let up to n spares go, those of one snapshot spared; how many went."""
        gone: list[Machine] = []
        for snapshot, ready in self._ready.items():
            while snapshot != but and ready and len(gone) < n:
                gone.append(ready.pop())
        self._let_go(gone)
        self._counts.let_go += len(gone)
        return len(gone)

    def _let_go(self, machines: list[Machine]) -> None:
        for machine in machines:
            self._spawn(closed(machine))

    async def _tend_always(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self._spawn(self.tend())  # beside the last round, whose forks may still be under way

    async def tend(self) -> None:
        """One round of care, as it is made every `tick_s`: who waits is looked after, spares follow the forecast."""
        self._pump()
        allowed, _ = self._allowed(self._for_callers)
        planned = self._forecast.plan(self._clock(), budget=self._spares) if allowed else {}
        for snapshot, ready in list(self._ready.items()):
            surplus = [ready.pop() for _ in range(max(0, len(ready) - planned.get(snapshot, 0)))]
            self._let_go(surplus)
            self._counts.let_go += len(surplus)
            if not ready:
                del self._ready[snapshot]
        if not self._waiting:
            await self._stock(planned)

    async def _stock(self, planned: Mapping[str, int]) -> None:
        """Fork what is planned and not there yet, as far as there is room and the host is idle."""
        making = []
        for snapshot, wanted in planned.items():
            allowed, _ = self._allowed(self._ahead)
            room = self._max_machines - self._counts.alive - self._num_ahead()
            have = len(self._ready.get(snapshot, ())) + self._making.get(snapshot, 0)
            n = min(wanted - have, allowed, room, self._spares - self._num_ahead())
            if n > 0 and snapshot not in self._refused:
                self._started += n
                self._making[snapshot] = self._making.get(snapshot, 0) + n
                making.append(self._spawn(self._make(snapshot, n)))
        if making:
            await asyncio.wait(making)

    async def _make(self, snapshot: str, n: int) -> None:
        try:
            made = await self._runtime.fork(snapshot, n)
        except MachineError:
            self._refused.add(snapshot)  # whoever asks for it is told why
            made = []
        finally:
            self._making[snapshot] -= n
            if not self._making[snapshot]:
                del self._making[snapshot]
        if self._closed:
            self._let_go(made)
        else:
            self._ready.setdefault(snapshot, deque()).extend(made)
        self._pump()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _must_be_open(self) -> None:
        if self._closed:
            raise MachineError("the runtime is closed", hint="make a new runtime")

    async def close(self) -> None:
        """See `Runtime.close`. Who waits in line is told."""
        self._closed = True
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.turn.done():
                waiter.turn.set_exception(MachineError("the runtime was closed", hint="make a new runtime"))
        if self._tending is not None:
            self._tending.cancel()
        self._ready.clear()
        await self._runtime.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
