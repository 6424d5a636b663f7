"""The child processes of a run by role (learner, engines, workers, graders): starts them, and calls them.

Every call has a deadline. The supervisor starts a child that died or hangs again; calls that were under way
fail with `Lost` and the caller decides what that means (a rollout is requeued, a grade is asked again, training
resumes from its checkpoint).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from etude.errors import DeadlineExceeded
from etude.experience import RolloutFiles
from etude.inference import HttpEngine
from etude.inference.config import SERVERS, EngineKind
from etude.inference.external.environment import SERVER_KINDS, environment
from etude.inference.fleet import PATIENCE_S
from etude.inference.registry_messages import ListedEngine, Roster, State, environment_token
from etude.inference.registry_server import RegistryServer
from etude.loop.config import RunConfig, rollouts_on
from etude.loop.joining import first_engine, joining
from etude.loop.placement import ADDRESS, NOTHING
from etude.loop.places import poll_arguments, rollout_files, weights_place
from etude.loop.played import HandedOver, Played
from etude.loop.processes import KEEPS_MEMORY, READY_S, Child, Role, Supervisor
from etude.loop.room import Limit
from etude.loop.wire import Caller, Lost
from etude.records import Graded, Outcome, RolloutSpec, Version
from etude.run import RunFolder
from etude.telemetry import Telemetry
from etude.weights.chain.signing import read_signer

T = TypeVar("T")
GRADE_S = 7_200.0
"""Seconds for one grade. Longer than a grade may take (`MachineGrader`), so that work that is slow to grade still gets
a verdict. Time in the queue does not count: graders report the end of each grade. The supervisor notices a grader that
hangs."""
SCRIPT_S = 600.0
"""Seconds to make and end the machine of a scripted rollout, beside its commands: its image may be large."""
ENGINE_NICE = 5
"""Nice value of engines. On shared cores they give way to harness, machines and graders: tool calls are short, and
while they run requests gather, so that an engine's next step decodes more of them. They give way to the learner too:
the next version waits for it, and rollouts run ahead of it anyway."""
AnyOutcome: Any = Outcome  # a union is no `type` to a type checker, but it is to the decoder


class Pool:
    """The child processes of one role that take calls. A call goes to the member with the fewest calls under way; it
    waits while no member is up."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.members: dict[str, Caller] = {}
        self._load: dict[str, int] = {}
        self._up = asyncio.Event()

    def join(self, caller: Caller) -> None:
        self.members[caller.name] = caller
        self._load[caller.name] = 0
        self._up.set()

    async def call(self, method: str, kind: type[T], *args: object, deadline_s: float) -> T:
        caller = await self.pick(deadline_s=deadline_s)
        self._load[caller.name] += 1
        try:
            return await caller.call(method, kind, *args, deadline_s=deadline_s)
        finally:
            self._load[caller.name] -= 1

    async def pick(self, *, deadline_s: float) -> Caller:
        """A member that is up. Raises `DeadlineExceeded`."""
        if (found := self._least()) is not None:
            return found  # without a timer: this runs twice per rollout
        try:
            async with asyncio.timeout(deadline_s):
                while (found := self._least()) is None:
                    self._up.clear()
                    await self._up.wait()
                return found
        except TimeoutError:
            raise DeadlineExceeded(
                f"no {self.role} is up", f"waited {deadline_s:g} s", hint=f"see logs/{self.role}-0.log"
            ) from None

    def _least(self) -> Caller | None:
        """The member with the fewest calls under way; None when none is up."""
        for name in [n for n, c in self.members.items() if c.lost.is_set()]:
            del self.members[name]
        return min(self.members.values(), key=lambda c: (self._load[c.name], c.name), default=None)


class Crew:
    """Starts the child processes of a run, keeps their addresses, and calls them."""

    def __init__(self, run: RunFolder, config: RunConfig, telemetry: Telemetry, supervisor: Supervisor) -> None:
        self.run, self.config, self.telemetry, self.supervisor = run, config, telemetry, supervisor
        self.workers, self.graders, self.learners = Pool("worker"), Pool("grader"), Pool("learner")
        self.max_running = Limit(config.max_running)  # rollouts under way; follows the live fleet
        self.registrar: RegistryServer | None = None  # where engines from elsewhere join
        self._own: dict[str, HttpEngine] = {}
        self._away: dict[str, EngineKind] = {}  # own engines that wait for a machine
        self._theirs = 0  # contexts of engines from elsewhere
        self._opened = contextlib.AsyncExitStack()

    @functools.cached_property
    def files(self) -> RolloutFiles:
        """The files in which workers stored rollouts."""
        return rollout_files(self.run)

    @property
    def engines(self) -> dict[str, HttpEngine]:
        """By name: the run's own engines, and the joined ones that serve."""
        return self._own | (self.registrar.serving() if self.registrar else {})

    @property
    def far(self) -> Collection[str]:
        """Names of the engines that joined from elsewhere."""
        return self.registrar.engines if self.registrar else ()

    def head(self, version: Version) -> None:
        """Set the newest published version. An engine that joins from elsewhere must reach it before it gets work."""
        if self.registrar is not None:
            self.registrar.set_head(version)

    async def some_engine(self) -> None:
        """Wait until at least one engine is there. Returns at once where the run has engines of its own."""
        if self.registrar is not None and not self._own:
            await first_engine(self.registrar, self.telemetry, self.config.fleet.listen)

    def wants_parity(self, learner_class: str) -> None:
        """Refuse from now on engines that join with another parity class than the learner's."""
        if self.registrar is not None:
            self.registrar.requirements = msgspec.structs.replace(self.registrar.requirements, parity=learner_class)

    async def start_sampling(self) -> None:
        """Start engines, workers and graders at once; returns when all are ready. Engines from elsewhere are not waited
        for."""
        if self.config.fleet.listen:
            failed = self.supervisor.failed
            door = joining(self.run, self.config, self.telemetry, self._beat, failed=failed)
            self.registrar = await self._opened.enter_async_context(door)
        engines = [self._engine(f"engine-{i}", kind) for i, kind in enumerate(self.config.fleet.engines)]
        await asyncio.gather(self.supervisor.add_all(engines), self.start_judged())

    async def start_judged(self) -> None:
        """Start workers and graders without engines: enough for scripted rollouts (`baseline`)."""
        fleet = self.config.fleet
        await asyncio.gather(
            self.supervisor.add_all(self._member("worker", i, self.workers) for i in range(fleet.num_workers)),
            self.supervisor.add_all(self._member("grader", i, self.graders) for i in range(fleet.num_graders)),
        )

    async def start_learner(self) -> None:
        """Start the learner and, where its ranks are spread over machines, the process that starts each other rank."""
        ranks = self.config.learner.ranks if self.supervisor.placement.spreads else 1
        brought = [self._rank_host(f"learner-host-{n}") for n in range(1, ranks)]
        added = (self.supervisor.add(*one) for one in [self._member("learner", 0, self.learners), *brought])
        await asyncio.gather(*added)

    async def close(self) -> None:
        await self._opened.aclose()
        await self.supervisor.close()  # first: its questions would open new connections
        for engine in self._own.values():
            await engine.close()

    async def rollout(self, spec: RolloutSpec, *, kept: bool = True) -> Played:
        """Have a worker run a rollout and store it. Worker and engines watch its progress and end it long before this
        call's deadline, which allows every turn its longest wait for an engine and for each of its tokens. `kept`: the
        rollout is for the ledger; else it has a transcript, and the caller must `files.drop` it."""
        limits = self.config.harness
        turn_s = PATIENCE_S + (1 + limits.turn_tokens) * limits.turn_deadline_s
        deadline_s = limits.rollout_deadline_s + limits.max_turns * turn_s
        return (await self.workers.call("rollout", HandedOver, spec, kept, deadline_s=deadline_s)).of(spec.task)

    async def baseline(self, spec: RolloutSpec, kind: str) -> Played:
        """Have a worker run a scripted agent, `kind` "oracle" or "random", on a task. It asks no engine, so its
        deadline covers machine and commands only. It has a transcript, and the caller must `files.drop` it."""
        deadline_s = SCRIPT_S + self.config.harness.rollout_deadline_s
        return (await self.workers.call("baseline", HandedOver, spec, kind, deadline_s=deadline_s)).of(spec.task)

    async def grade(self, rollout: Played) -> Outcome:
        graded: Outcome = await self.graders.call(
            "grade", AnyOutcome, rollout.task, rollout.summary, deadline_s=GRADE_S
        )
        return graded

    async def measure(self, rollout: Played, graded: Graded) -> Graded:
        """Have a grader measure the run's own reward terms of a judged rollout; returns the verdict with them."""
        return await self.graders.call("measure", Graded, rollout.summary, graded, deadline_s=GRADE_S)

    def _child(
        self, name: str, argv: list[str], *, nice: int = 0, env: Mapping[str, str] = NOTHING, devices: int = 0
    ) -> Child:
        placement = self.supervisor.placement
        return Child(
            name,
            argv,
            logs=self.run / "logs",
            telemetry=self.telemetry,
            nice=nice,
            env=env,
            placement=placement,
            devices=devices,
        )

    def _member(self, role: str, index: int, pool: Pool) -> tuple[Child, Role]:
        module = {"worker": "worker", "grader": "grading", "learner": "learning"}[role]
        name = f"{role}-{index}" if role != "learner" else role
        argv = ["-m", f"etude.loop.{module}", "--run", str(self.run.path), "--name", name]
        env = KEEPS_MEMORY if role == "learner" else NOTHING
        fleet, ranks, spreads = self.config.fleet, self.config.learner.ranks, self.supervisor.placement.spreads
        at, away = (ADDRESS, ranks - 1) if spreads else (fleet.ranks_at, fleet.ranks_away)
        argv += ["--ranks-at", at, "--ranks-away", str(away)] if role == "learner" and away else []

        async def on_up(child: Child) -> None:
            caller = child.caller
            assert caller is not None, "members are started with a socket"
            await caller.call("ready", bool, deadline_s=2 * READY_S)  # the supervisor's own deadline is earlier
            pool.join(caller)
            if role == "worker":
                await self._tell_workers()  # after joining the pool, so that no engine that starts now is missed

        async def answers(child: Child) -> None:
            assert child.caller is not None, "members are started with a socket"
            await child.caller.call("ready", bool, deadline_s=2 * self.supervisor.hung_s)

        return self._child(name, argv, env=env), Role(on_up, answers, with_socket=True)

    def _rank_host(self, name: str) -> tuple[Child, Role]:
        """The process that starts a rank on another machine. It has no health check here: the learner watches it."""

        async def passes(_: Child) -> None:
            """Nothing to do: its connection with the learner breaks when either dies."""

        argv = ["-m", "etude.loop.rank_hosts", "--run", str(self.run.path)]
        return self._child(name, argv), Role(passes, passes)

    def _engine(self, name: str, kind: EngineKind) -> tuple[Child, Role]:
        ready_file = self.run / "logs" / f"{name}.ready"
        argv = [*engine_argv(self.run, self.config, name, kind), "--host", ADDRESS, "--ready-file", str(ready_file)]

        async def waits(_: Child) -> None:
            self._away[name] = kind
            self._bound()
            if name in self._own:
                await self._own.pop(name).close()
                await self._tell_workers()

        async def on_up(child: Child) -> None:
            url = await read_url(ready_file, child.pid)
            old = self._own.get(name)
            self._own[name] = HttpEngine(url, token=environment_token())
            self._away.pop(name, None)
            self._bound()
            if old is not None:
                await old.close()
            await self._tell_workers()

        async def answers(_: Child) -> None:
            await self._own[name].info(deadline_s=2 * self.supervisor.hung_s)

        ready_file.unlink(missing_ok=True)
        child = self._child(name, argv, nice=ENGINE_NICE, devices=self.config.devices_of(kind))
        return child, Role(on_up, answers, waits=waits)

    async def _beat(self, joined: Roster) -> dict[str, int]:
        """Take over the list of joined engines: set how many rollouts may run, and send the list to the workers.
        Returns the number of sessions by engine."""
        self._theirs = sum(one.max_sequences for one in joined.values() if one.state is State.SERVING)
        self._bound()
        return await self._tell_workers()

    def _bound(self) -> None:
        """Set how many rollouts may run, from the contexts of the engines that are up."""
        away = sum(map(self.config.contexts_of, self._away.values()))
        self.max_running.set(rollouts_on(self.config.own_contexts - away + self._theirs))

    async def _tell_workers(self) -> dict[str, int]:
        """Send the list of engines to every worker. Returns the number of sessions by engine, over all workers."""
        region = "home" if self.registrar else ""
        sizes = {f"engine-{i}": self.config.contexts_of(kind) for i, kind in enumerate(self.config.fleet.engines)}
        own = {n: ListedEngine(url=e.url, region=region, max_sequences=sizes[n]) for n, e in self._own.items()}
        roster = own | (self.registrar.roster if self.registrar else {})

        async def tell(caller: Caller) -> dict[str, int]:
            with contextlib.suppress(DeadlineExceeded, Lost):
                return await caller.call("engines", dict[str, int], roster, deadline_s=10.0)
            return {}

        sessions: Counter[str] = Counter()
        for told in await asyncio.gather(*(tell(caller) for caller in self.workers.members.values())):
            sessions.update(told)
        return sessions


def engine_argv(run: RunFolder, config: RunConfig, name: str, kind: EngineKind) -> list[str]:
    """The arguments of Python that start an engine's process."""
    argv = ["-m", SERVERS[kind], "--name", name, "--checkpoint", str(run / "checkpoints" / "mid")]
    place = weights_place(run)
    argv += ["--store", str(place), *poll_arguments(place)]
    signer = read_signer(config.stores.signing_key)
    argv += ["--public-key", signer.public_key.hex()] if signer else []
    argv += ["--telemetry", str(run / "events" / f"{name}.jsonl"), "--threads", "1"]
    argv += config.engine.arguments()
    if kind is EngineKind.REFERENCE:
        numerics = config.numerics
        return [*argv, "--mode", numerics.mode, "--quantise", numerics.quantise, "--degree", str(numerics.degree)]
    foreign = config.foreign(kind)
    argv += ["--kv-tokens", str(foreign.kv_capacity(config.engine))]
    argv += ["--environment", str(environment(foreign.environment, SERVER_KINDS[kind]).folder)]
    argv += ["--needs-routes"] if config.wants_routes else []
    return [*argv, *(f"--argument={argument}" for argument in foreign.arguments)]


async def read_url(ready_file: Path, pid: int | None) -> str:
    """Wait for the URL that the engine with this pid writes to `ready_file` when it serves, and remove the file: on
    another machine its successor may have the same pid. Has no deadline of its own: the supervisor bounds the wait."""
    while True:
        try:
            ready = json.loads(ready_file.read_text())
        except (FileNotFoundError, ValueError):
            ready = {}
        if ready.get("pid") == pid:
            ready_file.unlink(missing_ok=True)
            return str(ready["url"])
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def crew(run: RunFolder, config: RunConfig, telemetry: Telemetry, supervisor: Supervisor) -> AsyncIterator[Crew]:
    """A `Crew` for a block; its processes end with the block."""
    members = Crew(run, config, telemetry, supervisor)
    try:
        yield members
    finally:
        await members.close()
