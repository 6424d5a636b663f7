"""Lends engines of a fleet to rollouts and takes them back, as a policy decides, by swapping their weights.

Each engine loads the weights of its own branch of the weight channel. To lend an engine, the harvester points that
branch at the version of the rollouts; to take it back, at the version of production. The engine loads a delta each
time. This is the tier of seconds (`etude.harvest`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from statistics import fmean
from typing import Protocol

from etude.errors import DeadlineExceeded, EngineError, EtudeError
from etude.harvest.leases import AWAY, Lease, Leases
from etude.harvest.policies import LendingPolicy
from etude.inference import Fleet
from etude.records.completion import Version
from etude.seams import Engine

POLL_S = 0.02
SAMPLES = 10  # of the load, per tick
Move = Callable[[str, Version], Awaitable[None]]
"""Points the branch of an engine, given by name, at a version."""


class Borrower(Protocol):
    """What gets lent engines, and must give them back: `pool.LentEngines` or `registered.RegisteredEngines`."""

    def add(self, name: str, engine: Engine) -> None:
        """Use an engine for rollouts from now on. It has the version of the rollouts."""
        ...

    async def take(self, name: str) -> None:
        """Send no more requests to an engine. Unknown names are ignored."""
        ...


class Harvester:
    """Lends engines of `production` to `rollouts`. Use it in one event loop.

    - `engines`: all engines by name. At first they are the members of `production`, with its version. The caller may
      replace one after a restart.
    - `move`: points the branch of an engine at a version, for example by `weights.chain.branches.point`.
    - `min_serving`: the number of engines that are never lent.
    - `drain_s`, `load_s`: the longest waits in seconds: for the requests of production of an engine that is to be lent,
      and for a version to be loaded.
    - `report`: called with a line for each engine that was lent or taken back, or could not be in time.

    `ended_s` and `served_s` have one number for each `take_back`: the seconds until the engine's rollouts had ended,
    and until it served production again."""

    def __init__(
        self,
        production: Fleet,
        rollouts: Borrower,
        engines: Mapping[str, Engine],
        move: Move,
        *,
        min_serving: int = 1,
        drain_s: float = 600.0,
        load_s: float = 300.0,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._production, self._rollouts, self._engines, self._move = production, rollouts, engines, move
        self._drain_s, self._load_s, self._report = drain_s, load_s, report
        self.leases = Leases(self._engines, min_serving=min_serving)
        self.ended_s: list[float] = []
        self.served_s: list[float] = []

    async def lend(self, name: str, version: Version) -> None:
        """Lend an engine: it completes its requests of production, loads `version`, and serves rollouts.

        Raises `EngineError` if its state does not allow that. Raises `DeadlineExceeded` if its requests did not end in
        time, and it serves production again; or if it did not load the version in time, and it serves nobody until the
        caller calls `take_back`."""
        self.leases.move(name, Lease.DRAINING)
        try:
            await self._production.drain(name, deadline_s=self._drain_s)
        except BaseException:
            self.leases.move(name, Lease.SERVING)
            raise
        self.leases.move(name, Lease.LOADING)
        await self._load(name, version)
        self.leases.move(name, Lease.LENT)
        self._rollouts.add(name, self._engines[name])
        self._report(f"{name} is lent, with {version}")

    async def take_back(self, name: str, version: Version) -> None:
        """Take an engine back: its rollouts end with the tokens that they have, it loads `version`, and serves
        production.

        Raises `DeadlineExceeded` if it did not load the version in time. The caller must then call this again."""
        began = asyncio.get_running_loop().time()
        if self.leases.states[name] is not Lease.RETURNING:
            self.leases.move(name, Lease.RETURNING)
        await self._rollouts.take(name)
        ended = asyncio.get_running_loop().time()
        await self._load(name, version)
        self.leases.move(name, Lease.SERVING)
        self._production.add(name, self._engines[name])
        self.ended_s.append(ended - began)
        self.served_s.append(asyncio.get_running_loop().time() - began)
        self._report(f"{name} serves production again, {self.served_s[-1]:.2f} s after it was taken back")

    async def follow(
        self,
        policy: LendingPolicy,
        *,
        stable: Callable[[], Version],
        newest: Callable[[], Version],
        time_s: Callable[[], float],
        tick_s: float = 5.0,
    ) -> None:
        """Lend and take back engines as a policy decides, until cancelled; then take all engines back.

        `stable` and `newest` return the versions of production and of rollouts, and `time_s` the time of day in seconds
        since a midnight. Changes that fail are reported and tried again, at intervals of `tick_s` seconds."""
        working: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                loads = []
                for _ in range(SAMPLES):
                    loads.append(self._production.load())
                    await asyncio.sleep(tick_s / SAMPLES)
                working = {name: task for name, task in working.items() if not task.done()}
                total = fmean(sum(load.values()) for load in loads)
                wanted = policy.away(time_s(), total, self.leases.count(*AWAY))
                lent, back = self.leases.changes(wanted, {name: loads[-1].get(name, 0) for name in self._engines})
                for name, state in self.leases.states.items():
                    if state is Lease.DRAINING and name in back:
                        working[name].cancel()
                    elif name in working:
                        continue
                    elif name in lent:
                        working[name] = self._start(self.lend(name, newest()))
                    elif name in back or state in (Lease.RETURNING, Lease.LOADING):  # the latter two have failed
                        working[name] = self._start(self.take_back(name, stable()))
        finally:
            for task in working.values():
                task.cancel()
            await asyncio.gather(*working.values(), return_exceptions=True)
            for name, state in list(self.leases.states.items()):
                if state is not Lease.SERVING:
                    await self.take_back(name, stable())

    def _start(self, change: Coroutine[object, object, None]) -> asyncio.Task[None]:
        async def reported() -> None:
            try:
                await change
            except EtudeError as error:
                self._report(str(error).replace("\n", "; "))

        return asyncio.ensure_future(reported())

    async def _load(self, name: str, version: Version) -> None:
        """Point the branch of an engine at a version, and wait until the engine has loaded it."""
        await self._move(name, version)
        engine, loaded = self._engines[name], "it did not answer"
        try:
            async with asyncio.timeout(self._load_s):
                while True:
                    try:
                        info = await engine.info()
                        if info.paused:
                            await engine.resume()
                    except EngineError as error:  # it restarts
                        loaded = str(error).splitlines()[0]
                    else:
                        if info.version == version and not info.paused:
                            return
                        loaded = f"it has {info.version}{'; ' + info.trouble if info.trouble else ''}"
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{name} did not load {version} within {self._load_s:g} s",
                loaded,
                hint=f"check in its log that it was started with its own branch (--branch {name}), and loads deltas",
            ) from None
