"""The one loop: batches in order of admission → learner → version → engines, on one screen (`_train`).

Beside it run `_admit` (tasks → admitted groups), `Rolling.run` (admitted → graded) and the probes of each new version,
all in one task group: what fails, fails the loop by name. Synchronous RL is `max_lag = 0` of the same code.

| | consumes | produces | waits for | unblocked by |
| --- | --- | --- | --- | --- |
| `_admit` | task cursor | admitted groups, at most the window's | room in the window | a version, a batch |
| `Rolling.run` | admitted rollouts | graded rollouts in the ledger | a place to run | a finished rollout |
| `_batches` | ready groups, strictly in order | one batch | its slowest group | `Rolling` |
| `_train` | a batch | live weights, offered | the learner, the commit before | `_commit` |
| `_commit` | what was offered | a version | the pointer's move | the learner |

The commit is the move of the pointer by the learner. It happens in the background, one version at a time: the next
batch's forward and backward pass may run beside it, the next optimiser step comes after it, and so does whatever is to
hold of the version (the ledger's `trained`, a checkpoint, an evaluation). At `max_lag = 0` nothing runs beside it.
A learner that dies ends its lineage with `Lost`, whether it was at work or idle: its successor holds no weights, so
every call goes to the very process that `begin` was called in.
The successor starts from the last checkpoint, publishes it under a new incarnation, and the ledger reconciles to that.
The same mends a chain that no engine can follow: a writer that finds its head damaged publishes a whole anchor.
Two ways out: the last step (everything in flight is cancelled: its groups were not needed), or a stop (the same, and
the ledger keeps them for `--resume`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from etude.config import Plugin
from etude.errors import EngineError, EtudeError, LedgerError, NotFinite
from etude.evals import EvalResult
from etude.experience import SCHEMES, Group, Ledger, plan_batch, step_facts
from etude.experience.admission import LittleSignal
from etude.experience.curriculum import Curriculum, Signals
from etude.experience.packing import teaches
from etude.experience.transitions import State
from etude.harness import ChatFormat
from etude.inference import HttpEngine
from etude.loop.apart import InOrder, apart
from etude.loop.config import RunConfig
from etude.loop.crew import Crew
from etude.loop.evaluating import evaluate, file_name
from etude.loop.parity import Defence, Watch
from etude.loop.places import ledger_place, traces_folder, weights_store
from etude.loop.probing import Probe, Unreachable
from etude.loop.retention import goes_back_to, keep_within, kept_from
from etude.loop.rolling import Rolling, keyed_seed, siblings
from etude.loop.wire import Caller, Lost
from etude.numerics.config import Mode
from etude.plugins import Kind, make
from etude.records import RolloutSpec, Task
from etude.records.sample import Published, StepReport
from etude.records.summary import BatchPlan, BatchRef
from etude.records.task import Split
from etude.run import RunFolder
from etude.seams import TaskSource
from etude.telemetry import Telemetry
from etude.weights.chain.history import LineageSteps

STEP_S, ADOPT_S, POLL_S = 600.0, 30.0, 0.05
BEGIN_S = 2 * STEP_S  # what a lost lineage still publishes is waited for first
AT_ONCE = 8  # groups that one transaction admits
UNREAD = "its stored rollout cannot be read"
DURING = "during"  # the name of evaluations between steps
MAX_FRUITLESS = 6  # lineages in a row that end without one step
T = TypeVar("T")


MENDABLE = (Lost, Unreachable)


class Conductor:
    """Reinforcement learning over a crew, a ledger and a task source."""

    def __init__(
        self, run: RunFolder, config: RunConfig, telemetry: Telemetry, crew: Crew, source: TaskSource, chat: ChatFormat
    ) -> None:
        self.run_folder, self.config, self.telemetry = run, config, telemetry
        self.crew, self.source = crew, source
        self.traces = traces_folder(run)
        self._scales = config.experience.little_signal is LittleSignal.SCALE
        credit = config.experience.credit
        self._scheme = make(Kind.CREDIT, credit) if isinstance(credit, Plugin) else SCHEMES[credit]
        self.window = config.experience.window
        capacity = self.window.num_groups * config.experience.group_size
        self.ledger = Ledger(
            ledger_place(run), capacity=capacity, composition=config.composition, said=self._ledger_said
        )
        self.books = InOrder("ledger")  # a server may be away for seconds: engines and children are heard meanwhile
        self.rolling = Rolling(self.ledger, self.books, crew, telemetry)
        self.signals = Signals(self.ledger.recall("signals"))
        self.step = 0  # of the version committed last
        self.trained = 0  # of the live weights: one ahead while their version is on its way
        self._batched = 0  # of the batch that was formed last
        self._taken = 0  # groups that batches of this lineage took
        self._size = 0  # groups that the step being formed takes, as far as is known
        self._on_its_way: asyncio.Task[None] | None = None
        self._learner: Caller | None = None  # the process that holds the lineage's weights
        exact, taken = config.numerics.mode is Mode.EXACT, self.ledger.recall("defence")
        defence = None if taken is None else Defence(taken)
        watch = Watch(config.parity, exact=exact, dtype=config.engine.dtype, defence=defence)
        self.probe = Probe(chat, config.parity, watch, telemetry, self._defend)
        self._defence_due: Defence | None = None
        self._room = asyncio.Event()  # there may be room in the window
        self._admitted = asyncio.Event()  # rollouts may be there that can start
        self.rolling.demand = lambda place: self.window.demand(place, self._batched, self._size)

    def close(self) -> None:
        """Let the ledger go, after what it was given to write. Idempotent."""
        self.books.close()
        self.ledger.close()

    async def reinforce(self) -> None:
        """Train until the last step, and keep the result. Raises what ended the loop, by name."""
        await self._keeping(self._lineage)
        result = str(self.run_folder / "checkpoints" / "final")
        await self._keeping(lambda: self._call("save", type(None), result))
        await self._forget(self.step)

    async def resume(self) -> None:
        """Have a learner hold the newest checkpoint and publish it, and agree with the ledger about what is trained."""
        await self._keeping(_nothing)

    async def _keeping(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do work that needs a learner. When one is lost, its successor goes on from the newest checkpoint and the work
        is done again; a task group's failure is raised as the one error that it is."""
        fruitless = 0
        while True:
            first = self.step
            try:
                if self._learner is None or self._learner.lost.is_set():
                    await self._begin()
                first = self.step
                return await work()
            except BaseExceptionGroup as group:
                error = _cause(group)
                if not isinstance(error, MENDABLE):
                    raise error from None
            except MENDABLE as alone:
                error = alone
            self._learner = None
            self.telemetry.event("lineage", state="lost", step=self.step, reason=error.what)
            fruitless = 0 if self.step > first else fruitless + 1
            if fruitless > MAX_FRUITLESS:
                facts = f"{fruitless} times in a row; the last time: {error.what}: {error.facts}"
                raise EtudeError(f"training does not get past step {self.step}", facts, hint=error.hint) from None

    async def _begin(self) -> None:
        learner = self._learner = await self.crew.learners.pick(deadline_s=STEP_S)
        self._on_its_way = None  # of a lost lineage: the learner sees to what it still publishes
        checkpoint = str(self._newest_checkpoint())
        self.step = self.trained = self._batched = await learner.call("begin", int, checkpoint, deadline_s=BEGIN_S)
        self._size = 0
        self.probe.learner_class = await self._call("parity", str)
        if self.config.numerics.mode is Mode.EXACT:
            self.crew.wants_parity(self.probe.learner_class)
        if (taken := await self.books(self.ledger.recall, "defence")) is not None:
            await self._call("defend", type(None), taken)
        mine, _ = await self._offer(())
        published = await self._call("published", Published)
        steps = LineageSteps(weights_store(self.run_folder))
        reconciled = functools.partial(
            self.ledger.reconcile, steps, believed=steps.unread_up_to, head=published.version
        )
        mended = await self.books(reconciled)  # no lineage goes on from a step it lacks
        self._taken = await self.books(lambda: self.ledger.num_groups() - len(self.ledger.open_groups()))
        if steps.damaged is not None:
            reason = f"the manifest of {steps.damaged.version} is damaged: the ledger says what was trained up to it"
            self.telemetry.event("weights.mend", step=self.step, reason=reason)
        self.telemetry.event("lineage", state="begin", step=self.step, version=str(published.version), **vars(mended))
        self._is_published(published)
        await self._drop_files()
        await self._adopted(published)
        await self.crew.some_engine()
        await self.probe.ask(dict(self.crew.engines), published, mine, far=self.crew.far)

    def _ledger_said(self, words: str) -> None:
        self.telemetry.event("ledger", reason=words)

    async def _adopted(self, published: Published) -> None:
        """Wait until every engine that answers holds this very version: a step's number would let one go on with what
        it started with, or with a lost lineage's."""

        async def adopted(engine: HttpEngine) -> None:
            with contextlib.suppress(EngineError, TimeoutError):  # it is gone or late: others have its work until then
                async with asyncio.timeout(ADOPT_S):
                    while (await engine.info()).version != published.version:  # noqa: ASYNC110  it is elsewhere
                        await asyncio.sleep(POLL_S)

        await asyncio.gather(*(adopted(engine) for engine in self.crew.engines.values()))

    async def _call(self, method: str, kind: type[T], *args: object) -> T:
        """Call the learner of this lineage. Raises `Lost` when it is gone, even if another is up."""
        assert self._learner is not None, "a lineage has begun"
        return await self._learner.call(method, kind, *args, deadline_s=STEP_S)

    async def _lineage(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(self._admit(), name="admit"),
                tasks.create_task(self.rolling.run(self._admitted), name="rolling"),
            ]
            await self._train(tasks)
            for task in beside:
                task.cancel()

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        if self._lacks_evaluation():
            await self._evaluate_during()
        late_s = 0.0  # waited for the version of the step before, where nothing may run beside it
        async for batch, plan, wait_s in self._batches():
            began = time.perf_counter()
            try:
                report = await self._call("forward_backward", StepReport, batch.step, batch.digest)
                waited_s = await self._committed()
                optim = await self._call("optim_step", dict[str, float])
            except NotFinite as error:
                raise await self._saved(error) from None
            self.trained = batch.step
            await self.probe.trained(batch.step, report.fresh_ratio_max)
            mine, read_s = await self._offer(batch.rollout_ids)
            facts = {
                **step_facts(plan, batch),
                **{name: getattr(report, name) for name in report.__struct_fields__},
                **optim,
                "wait_s": round(wait_s, 4),
                "train_s": round(time.perf_counter() - began - waited_s - read_s, 4),
                "stall_s": round(late_s + waited_s + read_s, 4),
            }
            commit = self._commit(tasks, batch, mine, facts)
            self._on_its_way = tasks.create_task(commit, name=f"commit of {batch.batch_id}")
            checkpoint = self.trained % self.config.rl.checkpoint_every == 0 or self.trained == self.config.rl.steps
            evaluation = self.config.evals.is_due(self.trained, self.config.rl.steps)
            alone = checkpoint or evaluation or self.config.experience.max_lag == 0
            late_s = await self._committed() if alone else 0.0
            if checkpoint:
                await self._checkpoint()
            if evaluation:
                await self._evaluate_during()

    async def _offer(self, rollout_ids: tuple[str, ...]) -> tuple[list[float], float]:
        """Have the learner begin to publish: its own log-probabilities of the probe, taken while it holds that version,
        and the seconds until its weights were read."""
        began = time.perf_counter()
        await self._call("offer", type(None), rollout_ids)
        read_s = time.perf_counter() - began
        return await self._call("probe", list[float], self.probe.text), read_s

    async def _commit(
        self, tasks: asyncio.TaskGroup, batch: BatchRef, mine: list[float], facts: dict[str, Any]
    ) -> None:
        """Wait until the pointer names the batch's version, and let everybody know."""
        published = await self._call("published", Published)
        await self.books(self.ledger.commit, batch.rollout_ids, published.version)
        self._is_published(published)
        self.telemetry.event("rl.step", step=batch.step, num_steps=self.config.rl.steps, **facts)
        asked = self.probe.ask(dict(self.crew.engines), published, mine, far=self.crew.far)
        tasks.create_task(asked, name=f"probe of {published.version}")

    def _is_published(self, published: Published) -> None:
        """Let everybody know whose work waits for a version."""
        self.crew.head(published.version)
        self.step = self.rolling.published = published.version.step
        self._room.set()
        self._admitted.set()

    async def _committed(self) -> float:
        """Wait until no version is on its way; the seconds that took. Raises what publishing it failed with."""
        began = time.perf_counter()
        if self._on_its_way is not None:
            await self._on_its_way
        return time.perf_counter() - began

    async def _batches(self) -> AsyncIterator[tuple[BatchRef, BatchPlan, float]]:
        """The batch of each next step, its plan, and the seconds it was waited for."""
        while self.trained < self.config.rl.steps:
            began = time.perf_counter()
            taken = await self._next_groups()
            if self._defence_due is not None:
                await self._call("defend", type(None), str(self._defence_due))
                self._defence_due = None
            while True:
                groups = [await self.books(self.ledger.group, group_id) for group_id in taken]
                try:
                    plan = await self._planned(groups)
                    batch = await self._call("record", BatchRef, plan)
                    break
                except LedgerError:
                    if not await self._quarantined(groups):
                        raise
            self._batched, self._taken, self._size = batch.step, self._taken + len(groups), 0
            await self.books(self.ledger.transaction, functools.partial(self._take_batch, batch, plan))
            self._room.set()
            self._admitted.set()  # what waits has moved up
            yield batch, plan, time.perf_counter() - began

    async def _planned(self, groups: list[Group]) -> BatchPlan:
        """The plan of the next step's batch, of these groups. Raises `LedgerError` where a rollout cannot be read."""
        experience, k1 = self.config.experience, None
        if experience.kl:
            valid = [rollout for group in groups for rollout, _ in group.valid]
            k1 = await self._call("k1", dict[str, float], valid)
        return plan_batch(
            groups,
            batch_id=f"b{self.trained + 1:06d}",
            step=self.trained + 1,
            max_lag=experience.max_lag,
            composition=self.config.composition,
            scheme=self._scheme,
            straggler=experience.straggler,
            k1=k1,
            full_groups=experience.signal_groups if self._scales else 0,
        )

    async def _quarantined(self, groups: list[Group]) -> bool:
        """Set aside whatever cannot be read of some groups, if it is the lesser part: else it is not their files that
        are damaged. Whether there was any."""
        stored = [rollout for group in groups for rollout, _ in group.valid]
        unread = [one for one in stored if not await apart(functools.partial(self.crew.files.has, one))]
        if not 0 < len(unread) <= len(stored) // 2:
            return False

        def work() -> None:
            for one in unread:
                self.ledger.move(one.rollout_id, State.QUARANTINED, reason=UNREAD)

        await self.books(self.ledger.transaction, work)
        for one in unread:
            self.telemetry.event("rollout.signs", rollout_id=one.rollout_id, state="quarantined", signs=[UNREAD])
        return True

    def _take_batch(self, batch: BatchRef, plan: BatchPlan) -> None:
        signals = Signals(self.ledger.recall("signals"))  # not this object's: this may be done again
        if self.config.experience.curriculum is Curriculum.SIGNAL:
            signals.count(plan, self.ledger.batched_groups(plan.judged))
        self.ledger.batch(batch)
        self.ledger.remember("signals", signals.counts)
        self.signals = signals

    async def _next_groups(self) -> list[str]:
        """Wait for the groups of the next step. Each rollout in them has deadlines of its own."""
        self._size, seen = 0, dict[str, bool]()
        ready = await self.books(lambda: self.ledger.ready_groups(self.ledger.open_groups()))
        while True:
            order = await self.books(self.ledger.open_groups)
            signal = await self.books(self._with_signal, ready, seen) if self.window.signal_groups else set[str]()
            if (taken := self.window.take(order, ready, signal)) is not None:
                return taken
            if (size := self.window.size(order, ready, signal)) > self._size:
                self._size = size
                self._room.set()
                self._admitted.set()
            ready |= await self.rolling.progress()

    def _with_signal(self, ready: Collection[str], seen: dict[str, bool]) -> set[str]:
        """Those of some groups that the next step has a sample of. `seen`: what was found of a group for this step."""
        found = self.ledger.with_signal(ready)
        experience = self.config.experience
        learned = functools.partial(
            teaches,
            learner_step=self.trained,
            max_lag=experience.max_lag,
            composition=self.config.composition,
            scheme=self._scheme,
        )
        seen |= {group: learned(self.ledger.group(group)) for group in found - seen.keys()}
        return {group for group in found if seen[group]}

    async def _admit(self) -> None:
        """Admit groups whenever the window has room, in one transaction with the task cursor."""
        while True:
            self._room.clear()
            index = await self.books(self.ledger.num_groups)
            num_open, at = index - self._taken, (self._batched, self.step)
            wanted = (self.config.rl.steps - self._batched) * self.window.most - num_open
            room = min(self.window.room(num_open, *at, self._size), wanted, AT_ONCE)
            if room <= 0:
                await self._room.wait()
                continue
            specs, cursor = list[RolloutSpec](), await self.books(self.ledger.cursor, Split.TRAIN)
            for number in range(index, index + room):
                task, cursor = self._draw(cursor)
                specs += siblings(
                    f"g{number:06d}",
                    task,
                    self.config.experience.group_size,
                    seed=self.config.seed,
                    temperature=self.config.rl.temperature,
                    min_step=self.window.min_step(num_open + number - index, *at),
                    keep_routes=self.config.wants_routes,
                )
                await asyncio.sleep(0)
            await self.books(self.ledger.transaction, functools.partial(self._admit_groups, specs, cursor))
            self._admitted.set()

    def _draw(self, cursor: int) -> tuple[Task, int]:
        """The next training task that the curriculum takes, and the cursor after it."""
        num_tasks = self.source.size(Split.TRAIN)
        while True:
            task = self.source.task(Split.TRAIN, cursor if num_tasks is None else cursor % num_tasks)
            cursor += 1
            draw = keyed_seed(self.config.seed, "curriculum", cursor) / 2**63
            if draw < self.signals.chance(task.family):
                return task, cursor

    def _admit_groups(self, specs: list[RolloutSpec], cursor: int) -> None:
        self.ledger.admit(*specs)
        self.ledger.move_cursor(Split.TRAIN, cursor)

    async def evaluate(self, name: str, split: Split, num_tasks: int, tries: int = 1) -> EvalResult:
        """Solve rate of the published version. No version is published meanwhile, so its pin costs engines nothing."""
        return await evaluate(
            self.crew,
            self.source,
            name=name,
            split=split,
            step=self.step,
            num_tasks=num_tasks,
            tries=tries,
            seed=self.config.seed,
            temperature=self.config.evals.temperature,
            out=self.run_folder / "evals",
            telemetry=self.telemetry,
        )

    async def _evaluate_during(self) -> None:
        await self.evaluate(DURING, Split.VALIDATION, self.config.evals.during_tasks)

    def _lacks_evaluation(self) -> bool:
        """Whether the evaluation of the step that a lineage begins with was cut off: its checkpoint came first."""
        path = self.run_folder / "evals" / file_name(DURING, Split.VALIDATION, self.step)
        return self.config.evals.is_due(self.step, self.config.rl.steps) and not path.exists()

    async def _defend(self, defence: Defence) -> None:
        """Have the learner take a defence from the next step on, and whoever goes on with this run. Not at once: a
        step's trace says with which settings it was trained."""
        await self.books(self.ledger.transaction, functools.partial(self.ledger.remember, "defence", str(defence)))
        self._defence_due = defence

    def _newest_checkpoint(self) -> Path:
        steps = sorted((self.run_folder / "checkpoints").glob("step-*"))
        return steps[-1] if steps else self.run_folder / "checkpoints" / "mid"

    async def _checkpoint(self) -> None:
        path = self.run_folder / "checkpoints" / f"step-{self.step:06d}"
        await self._call("save", type(None), str(path))
        await self._forget(goes_back_to(self.run_folder))
        freed = await self.books(
            keep_within, self.run_folder, self.ledger, self.traces, disk_gb=self.config.retention.disk_gb
        )
        if freed:
            kept = await self.books(kept_from, self.ledger)
            self.telemetry.event("retention", step=self.step, kept_from=kept, freed_bytes=freed)

    async def _forget(self, step: int) -> None:
        """Drop records and files of the rollouts that were consumed up to a step, which no restart goes back before."""
        await self.books(self.ledger.prune, step)
        await self._drop_files()

    async def _drop_files(self) -> None:
        """Delete the files of rollouts that nobody will ask for: of steps that no restart goes back to, or of attempts
        that were given up."""
        files = self.crew.files
        names = await apart(files.names)  # before the ledger is asked: what is written meanwhile stays
        wanted = await self.books(self.ledger.wanted_files)
        await apart(functools.partial(files.keep_only, names, wanted))

    async def _saved(self, error: NotFinite) -> NotFinite:
        """An error that ends the run, once the last version's state is on disk; it says where that is."""
        await self._committed()
        with contextlib.suppress(NotFinite):  # the live weights are lost, too: what was saved before is there
            await self._checkpoint()
        at = self._newest_checkpoint()
        facts = f"{error.facts}; what was trained until then is saved in {at}"
        hint = f"{error.hint}; other settings are a new run: --set start={at}; --resume tries the step again"
        return NotFinite(error.what, facts, hint=hint)


async def _nothing() -> None:
    """For a learner that only has to be there."""


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a task group died of. What can be mended only if there is nothing else."""
    leaves = [_cause(e) if isinstance(e, BaseExceptionGroup) else e for e in group.exceptions]
    return min(leaves, key=lambda e: (isinstance(e, MENDABLE), not isinstance(e, EtudeError)))
