"""The child processes of a run by role (learner, engines, workers, graders): starts them and calls them.

Every call has a deadline. The supervisor restarts a child that died or hangs. Calls that were in flight raise
`ProcessLost`, and the caller decides what to do: requeue the rollout, repeat the grade, resume training from the
checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections import ChainMap, Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from etude.errors import DeadlineExceeded, EngineError, EtudeError
from etude.experience import RolloutFiles
from etude.inference import HttpEngine
from etude.inference.config import SERVERS, EngineConfig, EngineKind, ExternalEngineConfig
from etude.inference.external.environment import SERVER_KINDS, environment
from etude.inference.fleet import PATIENCE_S
from etude.inference.registry_messages import ListedEngine, Roster, State, environment_token
from etude.inference.registry_server import RegistryServer
from etude.loop.adjustable_semaphore import Limit
from etude.loop.config import RunConfig, rollouts_on
from etude.loop.engine_registry import open_registry, wait_for_first_engine
from etude.loop.locations import poll_arguments, rollout_files, weights_location
from etude.loop.placement import ADDRESS, NO_ENV
from etude.loop.processes import KEEP_MEMORY_ENV, READY_S, Child, Role, Supervisor
from etude.loop.rollout_result import RolloutReply, RolloutResult
from etude.loop.rpc import Caller, ProcessLost
from etude.numerics.config import NumericsConfig
from etude.records import Graded, Outcome, RolloutSpec, Version
from etude.records.reward import Measured
from etude.records.summary import RolloutSummary
from etude.rewards.config import TermConfig
from etude.run import RunFolder
from etude.telemetry import Telemetry
from etude.weights.chain.signing import read_signer

T = TypeVar("T")
ACCOUNTS_S = 20.0
"""Deadline in seconds of a grader's answer about the accounts of judges, which are in files."""
GRADE_S = 7_200.0
"""Deadline of one grade in seconds. It is longer than a grade may take (`MachineGrader`), so that slow programs are
still graded. Time in the queue does not count, since graders report the end of each grade. The supervisor finds graders
that hang."""
SCRIPT_S = 600.0
"""Seconds to create and remove the machine of a scripted rollout, in addition to its commands: its image may be
large."""
ADOPT_S, POLL_S = 30.0, 0.05
ENGINE_NICE = 5
"""Nice value of engines. On shared cores they yield to harness, machines and graders: tool calls are short, and
requests gather while they run, so that the engine's next step decodes a larger batch. They also yield to the learner:
the next version depends on it, and rollouts run ahead anyway."""
AnyOutcome: Any = Outcome  # a union is no `type` to a type checker, but it is to the decoder


class Pool:
    """The child processes of one role that answer calls.

    A call goes to the process with the fewest calls in flight, and waits while none is up."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.members: dict[str, Caller] = {}
        self._load: dict[str, int] = {}
        self._up = asyncio.Event()

    def join(self, caller: Caller) -> None:
        """Add the RPC client of a process that is ready. It is removed when the process is lost."""
        self.members[caller.name] = caller
        self._load[caller.name] = 0
        self._up.set()

    async def call(self, method: str, kind: type[T], *args: object, deadline_s: float) -> T:
        """Call a method on one of the processes and return its result, decoded as type `kind`.

        Raises `ProcessLost` when the process dies, the error of the method, and `DeadlineExceeded` when no process is
        up within `deadline_s` seconds or the call takes longer."""
        caller = await self.pick(deadline_s=deadline_s)
        self._load[caller.name] += 1
        try:
            return await caller.call(method, kind, *args, deadline_s=deadline_s)
        finally:
            self._load[caller.name] -= 1

    async def pick(self, *, deadline_s: float) -> Caller:
        """Wait until a process is up, and return the one with the fewest calls in flight.

        Raises `DeadlineExceeded` when none is up within `deadline_s` seconds."""
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
                f"no {self.role} process is up",
                f"waited {deadline_s:g} s",
                hint=f"see the run's logs/{self.role}-0.log",
            ) from None

    def _least(self) -> Caller | None:
        for name in [n for n, c in self.members.items() if c.lost.is_set()]:
            del self.members[name]
        return min(self.members.values(), key=lambda c: (self._load[c.name], c.name), default=None)


class RunProcesses:
    """Starts the child processes of a run, tracks their addresses, and calls them."""

    def __init__(self, run: RunFolder, config: RunConfig, telemetry: Telemetry, supervisor: Supervisor) -> None:
        self.run, self.config, self.telemetry, self.supervisor = run, config, telemetry, supervisor
        self.workers, self.graders, self.learners = Pool("worker"), Pool("grader"), Pool("learner")
        self.max_running = Limit(config.max_running)  # concurrent rollouts; follows the engines that are up
        self.registrar: RegistryServer | None = None  # where remote engines join
        self._own: dict[str, HttpEngine] = {}
        self._waiting: dict[str, EngineKind] = {}  # own engines that wait for a machine
        self._lent: frozenset[str] = frozenset()  # own engines that an evaluation has borrowed
        self.head: Version | None = None  # the newest published version
        self._joined_contexts = 0  # contexts of remote engines
        self._opened = contextlib.AsyncExitStack()

    @functools.cached_property
    def files(self) -> RolloutFiles:
        """The files of finished rollouts, which workers write and the conductor and graders read."""
        return rollout_files(self.run)

    @property
    def engines(self) -> dict[str, HttpEngine]:
        """Clients of the engines that serve training, by name.

        They are the run's own engines, except those that are lent to an evaluation, and remote engines that are
        ready."""
        return self.lendable | (self.registrar.serving() if self.registrar else {})

    @property
    def lendable(self) -> dict[str, HttpEngine]:
        """Clients of the run's own engines that run and are not lent to an evaluation, by name."""
        return {name: engine for name, engine in self._own.items() if name not in self._lent}

    async def lend(self, names: Collection[str]) -> dict[str, HttpEngine]:
        """Set which of the run's engines are lent to an evaluation, and return clients of those that run, by name.

        Lent engines get no new sessions of training, are not probed, and do not count in `max_running`. Engines that
        are not in `names` serve training again."""
        if self._lent != frozenset(names):
            self._lent = frozenset(names)
            self._update_limit()
            await self._send_engines()
        return {name: self._own[name] for name in names if name in self._own}

    async def borrow(self, urls: Mapping[str, str]) -> None:
        """Use the engines of another run, given as URLs by name, in place of own ones. Start the workers first."""
        self._own = {name: HttpEngine(url, token=environment_token()) for name, url in urls.items()}
        self.max_running.set(rollouts_on(sum(self._sizes()[name] for name in urls)))
        await self._send_engines()

    @property
    def remote(self) -> Collection[str]:
        """Names of the engines on other machines that have joined the run."""
        return self.registrar.engines if self.registrar else ()

    def set_head(self, version: Version) -> None:
        """Set the newest published version of the weights. A remote engine must load it before it gets work."""
        self.head = version
        if self.registrar is not None:
            self.registrar.set_head(version)

    async def wait_for_engine(self) -> None:
        """Wait until at least one engine is ready. Returns at once when the run has engines of its own."""
        if self.registrar is not None and not self._own:
            await wait_for_first_engine(self.registrar, self.telemetry, self.config.fleet.listen)

    async def wait_for_adoption(self, version: Version) -> None:
        """Wait until every engine that answers has loaded exactly this version, at most `ADOPT_S` seconds.

        Comparing step numbers would not suffice: an engine could still have its starting weights or those of a lost
        lineage. Lost or late engines get no work until they adopt it."""

        async def adopted(engine: HttpEngine) -> None:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(ADOPT_S):
                    while (await engine.info()).version != version:  # noqa: ASYNC110  the state is in another process
                        await asyncio.sleep(POLL_S)

        await asyncio.gather(*(adopted(engine) for engine in self.engines.values()))

    def require_parity(self, learner_class: str) -> None:
        """From now on, refuse remote engines that may compute other bits than the learner does.

        `learner_class` is the learner's parity class: processes of one class compute the same bits from the same
        weights."""
        if self.registrar is not None:
            self.registrar.requirements = msgspec.structs.replace(self.registrar.requirements, parity=learner_class)

    async def start_sampling(self) -> None:
        """Start engines, workers and graders concurrently, and wait until they are ready, except for remote engines."""
        if self.config.fleet.listen:
            failed = self.supervisor.failed
            registry = open_registry(self.run, self.config, self.telemetry, self._on_roster, failed=failed)
            self.registrar = await self._opened.enter_async_context(registry)
        engines = [self._engine(f"engine-{i}", kind) for i, kind in enumerate(self.config.fleet.engines)]
        await asyncio.gather(self.supervisor.add_all(engines), self.start_workers_and_graders())

    async def start_workers_and_graders(self) -> None:
        """Start workers and graders without engines, which is enough for scripted rollouts (`baseline`)."""
        fleet = self.config.fleet
        await asyncio.gather(
            self.supervisor.add_all(self._member("worker", i, self.workers) for i in range(fleet.num_workers)),
            self.supervisor.add_all(self._member("grader", i, self.graders) for i in range(fleet.num_graders)),
        )

    async def start_learner(self) -> None:
        """Start the learner and wait until it is ready.

        When its ranks are spread over machines, also start the process that hosts each other rank."""
        learner = self.supervisor.add(*self._member("learner", 0, self.learners))
        await asyncio.gather(learner, start_rank_hosts(self.run, self.config, self.telemetry, self.supervisor))

    async def close(self) -> None:
        """Stop all processes and close all connections."""
        await self._opened.aclose()
        await self.supervisor.close()  # first: its health checks would open new connections
        for engine in self._own.values():
            await engine.close()

    async def rollout(self, spec: RolloutSpec, *, kept: bool = True) -> RolloutResult:
        """Have a worker run a rollout and store it in a file.

        If its machine was forked, its continuations have ended, too. With `kept` the ledger (database of rollouts)
        refers to it. Otherwise the result has its turns as text, and the caller must delete the file (`files.drop`).
        Worker and engines end a rollout that makes no progress long before the deadline of this call. Raises
        `ProcessLost` when the worker dies."""
        limits = self.config.harness
        turn_s = PATIENCE_S + (1 + limits.turn_tokens) * limits.turn_deadline_s
        deadline_s = spec.forks * (limits.rollout_deadline_s + limits.max_turns * turn_s)
        reply = await self.workers.call("rollout", RolloutReply, spec, kept, deadline_s=deadline_s)
        return reply.with_task(spec.task)

    async def baseline(self, spec: RolloutSpec, kind: str) -> RolloutResult:
        """Have a worker run a scripted agent on a task; `kind` is "oracle" (writes the reference solution) or "random"
        (makes random edits).

        It uses no engine. The result has its turns as text, and the caller must delete its file (`files.drop`)."""
        deadline_s = SCRIPT_S + self.config.harness.rollout_deadline_s
        reply = await self.workers.call("baseline", RolloutReply, spec, kind, deadline_s=deadline_s)
        return reply.with_task(spec.task)

    async def grade(self, rollout: RolloutResult) -> Outcome:
        """Have a grader process grade a finished rollout, and return the outcome.

        Raises `ProcessLost` when the grader dies."""
        graded: Outcome = await self.graders.call(
            "grade", AnyOutcome, rollout.task, rollout.summary, deadline_s=GRADE_S
        )
        return graded

    async def measure(
        self, terms: Sequence[TermConfig], summaries: Sequence[RolloutSummary], graded: Sequence[Graded]
    ) -> list[list[Measured]]:
        """Have a grader process measure those of these reward terms that the rollouts of a group do not have yet.

        Returns the new values of each rollout. If the grader dies, another one repeats the work. Raises `PluginError`
        for a term that fails, `LedgerError` for a rollout that cannot be read, and `EtudeError` when too many graders
        died."""
        attempts, error = self.config.experience.max_attempts, ""
        for _ in range(attempts):
            try:
                return await self.graders.call(
                    "measure", list[list[Measured]], terms, summaries, graded, deadline_s=GRADE_S
                )
            except (ProcessLost, DeadlineExceeded) as lost:
                error = str(lost)
        names = ", ".join(one.name for one in terms)
        hint = "see logs/grader-0.log; then resume the run: graded rollouts are not lost"
        raise EtudeError(f"{attempts} graders were lost while they measured {names}", error, hint=hint)

    async def judge_accounts(self, terms: Sequence[TermConfig]) -> dict[str, float | None] | None:
        """Return what the judges among these terms have cost on all hosts, by account, as `grader.judge_accounts` does.

        Each host whose graders asked a judge has an account of its own. Returns None if a grader is not up, or fails or
        does not answer within `ACCOUNTS_S` seconds."""
        callers = [one for one in self.graders.members.values() if not one.lost.is_set()]
        if len(callers) < self.config.fleet.num_graders:
            return None
        try:
            calls = [
                one.call("judge_accounts", dict[str, float | None], terms, deadline_s=ACCOUNTS_S) for one in callers
            ]
            return dict(ChainMap(*await asyncio.gather(*calls)))
        except EtudeError:  # what judges cost is not worth the end of a run
            return None

    def _child(
        self, name: str, argv: list[str], *, nice: int = 0, env: Mapping[str, str] = NO_ENV, devices: int = 0
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
        module = {"worker": "worker", "grader": "grader", "learner": "learner"}[role]
        name = f"{role}-{index}" if role != "learner" else role
        argv = ["-m", f"etude.loop.{module}", "--run", str(self.run.path), "--name", name]
        env = KEEP_MEMORY_ENV if role == "learner" else NO_ENV
        argv += rank_arguments(self.config, self.supervisor) if role == "learner" else []

        async def on_up(child: Child) -> None:
            caller = child.caller
            assert caller is not None, "members are started with a socket"
            await caller.call("ready", bool, deadline_s=2 * READY_S)  # the supervisor's own deadline is earlier
            pool.join(caller)
            if role == "worker":
                await self._send_engines()  # after joining the pool, so that no engine that starts now is missed

        async def answers(child: Child) -> None:
            assert child.caller is not None, "members are started with a socket"
            await child.caller.call("ready", bool, deadline_s=self.supervisor.call_s)

        return self._child(name, argv, env=env), Role(on_up, answers, with_socket=True)

    def _engine(self, name: str, kind: EngineKind) -> tuple[Child, Role]:
        ready_file = self.run / "logs" / f"{name}.ready"
        argv = [*engine_argv(self.run, self.config, name, kind), "--host", ADDRESS, "--ready-file", str(ready_file)]

        async def waits(_: Child) -> None:
            self._waiting[name] = kind
            self._update_limit()
            if name in self._own:
                await self._own.pop(name).close()
                await self._send_engines()

        async def on_up(child: Child) -> None:
            url = await read_url(ready_file, child.pid)
            old = self._own.get(name)
            self._own[name] = HttpEngine(url, token=environment_token())
            self._waiting.pop(name, None)
            self._update_limit()
            if old is not None:
                await old.close()
            await self._send_engines()

        async def answers(_: Child) -> None:
            await self._own[name].info(deadline_s=self.supervisor.call_s)

        ready_file.unlink(missing_ok=True)
        child = self._child(name, argv, nice=ENGINE_NICE, devices=self.config.devices_of(kind))
        return child, Role(on_up, answers, on_wait=waits)

    async def _on_roster(self, joined: Roster) -> dict[str, int]:
        """Store the list of remote engines, update the number of concurrent rollouts, and send the list to the workers.
        Returns the number of sessions by engine."""
        self._joined_contexts = sum(one.max_sequences for one in joined.values() if one.state is State.SERVING)
        self._update_limit()
        return await self._send_engines()

    def _update_limit(self) -> None:
        sizes = self._sizes()
        away = sum(sizes[name] for name in {*self._waiting, *self._lent})
        self.max_running.set(rollouts_on(self.config.own_contexts - away + self._joined_contexts))

    def _sizes(self) -> dict[str, int]:
        """Return how many full contexts each own engine can hold, by name."""
        return {f"engine-{i}": self.config.contexts_of(kind) for i, kind in enumerate(self.config.fleet.engines)}

    async def _send_engines(self) -> dict[str, int]:
        """Send the list of engines to every worker. Returns the number of sessions by engine, summed over workers."""
        region = "home" if self.registrar else ""
        sizes, states = self._sizes(), {name: State.DRAINING for name in self._lent}
        own = {
            n: ListedEngine(url=e.url, state=states.get(n, State.SERVING), region=region, max_sequences=sizes[n])
            for n, e in self._own.items()
        }
        roster = own | (self.registrar.roster if self.registrar else {})

        async def send(caller: Caller) -> dict[str, int]:
            with contextlib.suppress(DeadlineExceeded, ProcessLost):
                return await caller.call("engines", dict[str, int], roster, deadline_s=10.0)
            return {}

        sessions: Counter[str] = Counter()
        for counts in await asyncio.gather(*(send(caller) for caller in self.workers.members.values())):
            sessions.update(counts)
        return sessions


def engine_argv(run: RunFolder, config: RunConfig, name: str, kind: EngineKind) -> list[str]:
    """Return the arguments of the Python interpreter that start an engine of this kind for a run."""
    argv = ["-m", SERVERS[kind], "--name", name, "--checkpoint", str(run / "checkpoints" / "mid")]
    place = weights_location(run)
    argv += ["--store", str(place), *poll_arguments(place)]
    signer = read_signer(config.stores.signing_key)
    argv += ["--public-key", signer.public_key.hex()] if signer else []
    argv += ["--telemetry", str(run / "events" / f"{name}.jsonl"), "--threads", "1"]
    argv += setting_arguments(kind, config.engine, config.numerics, config.foreign(kind))
    return [*argv, "--needs-routes"] if config.wants_routes and kind is not EngineKind.REFERENCE else argv


def setting_arguments(
    kind: EngineKind, engine: EngineConfig, numerics: NumericsConfig, foreign: ExternalEngineConfig
) -> list[str]:
    """Return the arguments of an engine's process for its settings.

    `numerics` is used for a reference engine, `foreign` for an engine of another kind."""
    argv = engine.arguments()
    if kind is EngineKind.REFERENCE:
        return [*argv, "--mode", numerics.mode, "--quantise", numerics.quantise, "--degree", str(numerics.degree)]
    argv += ["--kv-tokens", str(foreign.kv_capacity(engine))]
    argv += ["--environment", str(environment(foreign.environment, SERVER_KINDS[kind]).folder)]
    return [*argv, *(f"--argument={argument}" for argument in foreign.arguments)]


async def read_url(ready_file: Path, pid: int | None) -> str:
    """Wait for the URL that the engine with this pid writes to `ready_file`, delete the file, and return the URL.

    The file is deleted because on another machine the next engine may have the same pid. Has no deadline; the
    supervisor limits the wait."""
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
async def open_processes(
    run: RunFolder, config: RunConfig, telemetry: Telemetry, supervisor: Supervisor
) -> AsyncIterator[RunProcesses]:
    """Yield the `RunProcesses` of a run, with no process started yet. All of them end with the block."""
    members = RunProcesses(run, config, telemetry, supervisor)
    try:
        yield members
    finally:
        await members.close()


def rank_arguments(config: RunConfig, supervisor: Supervisor) -> list[str]:
    """Return the command-line arguments of rank 0 that say which ranks connect from other machines."""
    fleet = config.fleet
    spread = (ADDRESS, config.learner.ranks - 1) if supervisor.placement.spreads else (fleet.ranks_at, fleet.ranks_away)
    return ["--ranks-at", spread[0], "--ranks-away", str(spread[1])] if spread[1] else []


async def start_rank_hosts(run: RunFolder, config: RunConfig, telemetry: Telemetry, supervisor: Supervisor) -> None:
    """Start the processes that host the learner's other ranks where these are spread over machines, if they are not up.

    They serve mid-training and the learner, and end when the run needs no learner any more. They have no health check
    here: rank 0 watches them."""

    async def passes(_: Child) -> None:
        """Do nothing: the connection to rank 0 breaks when either side dies."""

    placement, ranks = supervisor.placement, config.learner.ranks if supervisor.placement.spreads else 1
    argv, logs = ["-m", "etude.loop.rank_hosts", "--run", str(run.path)], run / "logs"
    names = [name for n in range(1, ranks) if (name := f"learner-host-{n}") not in supervisor.children]
    hosts = [Child(name, argv, logs=logs, telemetry=telemetry, env=NO_ENV, placement=placement) for name in names]
    await asyncio.gather(*(supervisor.add(host, Role(passes, passes)) for host in hosts))
