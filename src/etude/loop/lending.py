"""Lends the idle engines of a gateway to the rollouts of the run whose weights it serves (`etude serve --lend`).

Each engine follows a branch of the run's weights of its own, which has its name (`serve-0`). While the engine serves
production, the branch is kept at the version of production; while it is lent, at the newest one, so that it follows the
run. The decisions and the order of the steps are `harvest.harvester`'s; lent engines join the run by its registry
(`harvest.registered`)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path

from etude.errors import EngineError, EtudeError, InputError
from etude.harvest.config import LendConfig
from etude.harvest.harvester import Harvester
from etude.harvest.leases import Lease, Leases
from etude.harvest.policies import LendingPolicy
from etude.harvest.registered import RegisteredEngines
from etude.inference import Fleet, HttpEngine
from etude.inference.registry_messages import environment_token
from etude.records import Version
from etude.seams import BlobStore
from etude.weights.chain import branches
from etude.weights.chain.history import head
from etude.weights.chain.signing import Signer

CHANNEL = "policy"
IDLE_POLL_S = 0.1  # between two looks at the requests of an engine that is to end
LOAD_S = 60.0  # longest wait for a version to be loaded
IDLE_S = 10.0  # longest wait, at the end, for rollouts that could go on beside production


class Lender:
    """Lends the engines of one served model. Enter `prepared` before its engines start, and `lending` afterwards.

    - `run`: the folder of the run whose weights are served, and `store` these weights. Only one process lends engines
      of a run.
    - `branch`: the branch that production is served from; "": the newest version.
    - `poll_s`: seconds between two looks at the versions of production and of rollouts. A look reads up to two
      pointers from the store.
    - `signer`: signs the pointers of the engines' branches, for a run that signs its weights.
    - `report`: called with a line for each change."""

    def __init__(
        self,
        config: LendConfig,
        run: Path,
        store: BlobStore,
        *,
        branch: str,
        signer: Signer | None,
        report: Callable[[str], None],
        poll_s: float,
    ) -> None:
        self.names = [f"serve-{i}" for i in range(config.engines)]  # of the engines, and of their branches
        self._config, self._run, self._store, self._branch = config, run, store, branch
        self._signer, self._print, self._poll_s = signer, report, poll_s
        self._at: dict[str, Version] = {}
        self._pointing = asyncio.Lock()
        self._leases: Leases | None = None
        self._rollouts = RegisteredEngines(
            config.registry,
            token=environment_token(),
            silence_s=config.silence_s,
            report=self._report,
        )

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Create the engines' branches while the block runs, and delete them afterwards.

        Raises `InputError` if another process lends engines of this run."""
        with (self._run / "lend.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(
                    f"another process lends engines of {self._run}",
                    "each engine has a branch of the run's weights",
                    hint="stop that etude serve, or serve without --lend",
                ) from None
            self._stable, self._newest = self._read()
            try:
                for name in self.names:
                    self._point(name, self._stable)
                yield
            finally:
                for name in self.names:
                    branches.drop(self._store, CHANNEL, name)

    @contextlib.asynccontextmanager
    async def lending(self, production: Fleet, engines: Mapping[str, HttpEngine], *, slots: int) -> AsyncIterator[None]:
        """Lend engines while the block runs; then take all back.

        `production` has all `engines`. `slots`: the number of sequences that one of them decodes together."""
        config, rollouts = self._config, self._rollouts
        harvester = Harvester(
            production,
            rollouts,
            engines,
            self._move,
            min_serving=config.min_serving,
            load_s=LOAD_S,
            report=self._report,
        )
        self._leases = harvester.leases
        policy = _WhileWanted(config.make_policy(slots), rollouts)
        beside = [asyncio.create_task(self._follow(), name="follow"), asyncio.create_task(rollouts.watch())]
        lending = asyncio.create_task(
            harvester.follow(
                policy,
                stable=lambda: self._stable,
                newest=lambda: self._newest,
                time_s=time.time,
                tick_s=config.tick_s,
            )
        )
        lending.add_done_callback(self._ended)
        try:
            yield
        finally:
            lending.cancel()
            await asyncio.gather(lending, return_exceptions=True)
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await _until_idle(engines.values())

    async def started(self, name: str, engine: HttpEngine, production: Fleet) -> None:
        """Use an engine whose process was started, or started again, for what the engine of this name is used for."""
        state = self._leases.states[name] if self._leases else Lease.SERVING
        if state is Lease.SERVING:
            production.add(name, engine)
        elif state is Lease.LENT:
            await self._rollouts.take(name)
            self._rollouts.add(name, engine)

    def _report(self, line: str) -> None:
        self._print(f"lending: {line}")

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(f"ended, all engines serve production: {str(error).splitlines()[0]}")

    async def _follow(self) -> None:
        """Keep the branches of engines at the versions that production and rollouts have now, until cancelled."""
        assert self._leases is not None
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                self._stable, self._newest = await asyncio.to_thread(self._read)
                for name in self.names:
                    async with self._pointing:
                        state = self._leases.states[name]
                        wanted = self._newest if state is Lease.LENT else self._stable
                        moving = state in (Lease.LOADING, Lease.RETURNING)  # the harvester points it
                        if not moving and self._at[name] != wanted:
                            await asyncio.to_thread(self._point, name, wanted)
            except EtudeError as error:  # the store is away: engines keep their versions
                self._report(str(error).replace("\n", "; "))
                await asyncio.sleep(1.0)

    async def _move(self, name: str, version: Version) -> None:
        async with self._pointing:
            await asyncio.to_thread(self._point, name, version)

    def _point(self, name: str, version: Version) -> None:
        branches.point(self._store, CHANNEL, version, branch=name, signer=self._signer)
        self._at[name] = version

    def _read(self) -> tuple[Version, Version]:
        """Return the versions of production and of rollouts."""
        newest = head(self._store, CHANNEL)
        stable = head(self._store, CHANNEL, self._branch) if self._branch else newest
        if stable is None or newest is None:
            missing = f"its branch {self._branch!r}" if newest is not None else "a published version"
            raise InputError(f"{self._run} lacks {missing}", hint="see etude weights log")
        return stable.head.version, newest.head.version


class _WhileWanted:
    """A policy that lends nothing while the run does not answer. It tells the other policy the load in any case."""

    def __init__(self, policy: LendingPolicy, rollouts: RegisteredEngines) -> None:
        self._policy, self._rollouts = policy, rollouts

    def away(self, time_s: float, load: float, away: int) -> int:
        number = self._policy.away(time_s, load, away)
        return number if self._rollouts.wanted else 0


async def _until_idle(engines: Iterable[HttpEngine]) -> None:
    """Wait until engines have no request, at most `IDLE_S` seconds."""
    with contextlib.suppress(TimeoutError, EngineError):
        async with asyncio.timeout(IDLE_S):
            for engine in list(engines):
                while (await engine.info()).num_running:  # noqa: ASYNC110  the state is in another process
                    await asyncio.sleep(IDLE_POLL_S)
