"""The conductor: runs the training loop of a run. The loop itself is `_train`.

`_train` takes batches in order of admission, trains the learner on them, and publishes each new version of the weights
to the engines. Beside it run `_admit` (tasks → admitted groups), `RolloutScheduler.run` (admitted → graded rollouts),
`GroupScorer.run` (ended → scored groups) and the parity probes of each new version. All are in one task group: an error
in one of them ends the loop with that error. Synchronous RL is the same code with `max_lag = 0`.

| | consumes | produces | waits for | unblocked by |
| --- | --- | --- | --- | --- |
| `_admit` | task cursor | admitted groups, within the window | a free place in the window | a version, a batch |
| `RolloutScheduler.run` | admitted rollouts | graded rollouts in the ledger | a free engine slot | a finished rollout |
| `GroupScorer.run` | ended groups | groups with all reward terms | a grader, an unknown term | the term |
| `_batches` | scored groups, strictly in order | one batch | its slowest group | `GroupScorer` |
| `_train` | a batch | new live weights, handed to the publisher | the learner, the previous commit | `_commit` |
| `_commit` | the weights being published | a version | the move of the pointer | the learner |

The window is how many groups may be open (admitted and not trained yet). A version is committed when the learner moves
the store's pointer to it. Publishing runs in the background, one version at a time. The forward and backward pass of
the next batch may overlap with it; the next optimiser step, a checkpoint and an evaluation wait for the commit. With
`max_lag = 0` nothing overlaps.

A lineage is what one learner process trains without interruption. It ends with `ProcessLost` when the learner dies,
since its successor has no weights in memory; calls always go to the process in which `begin` was called. The successor
loads the last checkpoint, publishes it, and the ledger is reconciled with it. Damaged deltas in the store are repaired
in the same way: a publisher that finds the newest version damaged publishes a full snapshot.

The loop ends at the last step or when it is stopped. In both cases rollouts in flight are cancelled. After a stop, the
ledger keeps them for `--resume`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

from etude.config import Plugin
from etude.errors import EtudeError, LedgerError, NotFinite, TaskWithdrawn
from etude.evals import EvalResult
from etude.experience import SCHEMES, Group, Ledger, plan_batch, step_metrics
from etude.experience.admission import LittleSignal
from etude.experience.packing import has_fresh_signal
from etude.experience.transitions import State
from etude.harness import ChatFormat
from etude.loop.config import RunConfig, check_forms_pairs
from etude.loop.drift_monitor import DriftMonitor
from etude.loop.error_groups import first_cause
from etude.loop.evaluation import evaluate, file_name, judge_dollars, run_price, tasks_of
from etude.loop.group_admission import WITHDRAWN, GroupAdmission
from etude.loop.group_scoring import GroupScorer
from etude.loop.locations import ledger_location, traces_folder, weights_store
from etude.loop.parity import Defence, ParityMonitor
from etude.loop.parity_probe import ParityProbe, Unreachable
from etude.loop.retention import delete_oldest, oldest_restart_step, replayable_after
from etude.loop.reward_settings import RewardSettings
from etude.loop.rollout_scheduler import RolloutScheduler
from etude.loop.rpc import Caller, ProcessLost
from etude.loop.run_in_thread import SerialExecutor, run_in_thread
from etude.loop.run_processes import RunProcesses
from etude.numerics.config import Mode
from etude.plugins import Kind, make
from etude.records.sample import Published, StepReport
from etude.records.summary import BatchPlan, BatchRef
from etude.records.task import Split
from etude.rewards.config import TermConfig
from etude.run import RunFolder
from etude.seams import TaskSource
from etude.telemetry import Telemetry
from etude.weights.chain.history import LineageSteps

STEP_S = 600.0
BEGIN_S = 2 * STEP_S  # includes the end of a publish of the lost lineage
AT_ONCE = 32  # groups admitted per transaction
UNREAD = "its stored rollout cannot be read"
JUDGES = "judge_accounts"  # in the ledger: dollars of each account of judges, as last read
DURING = "during"  # the name of evaluations between steps
MAX_FRUITLESS = 6  # lineages in a row that end without a step
T = TypeVar("T")


RECOVERABLE = (ProcessLost, Unreachable, TaskWithdrawn)


class Conductor:
    """Runs reinforcement learning with the processes of a run, its ledger (database of rollouts), and a task source."""

    def __init__(
        self,
        run: RunFolder,
        config: RunConfig,
        telemetry: Telemetry,
        processes: RunProcesses,
        source: TaskSource,
        chat: ChatFormat,
    ) -> None:
        self.run_folder, self.config, self.telemetry = run, config, telemetry
        self.processes, self.source = processes, source
        self.traces = traces_folder(run)
        self._scales = config.experience.little_signal is LittleSignal.SCALE
        credit = config.experience.credit
        self._scheme = make(Kind.CREDIT, credit) if isinstance(credit, Plugin) else SCHEMES[credit]
        check_forms_pairs(config.learner, self._scheme)
        self.window = config.experience.window
        self.ledger = Ledger(
            ledger_location(run), capacity=config.ledger_slots, composition=config.composition, log=self._log_ledger
        )
        self.ledger_thread = SerialExecutor("ledger")  # its own thread: a server may be unreachable for seconds
        self.scheduler = RolloutScheduler(self.ledger, self.ledger_thread, processes, telemetry)
        self.rewards = RewardSettings(run, config)
        self.drift = DriftMonitor(self.ledger, telemetry)
        self.scorer = GroupScorer(self.ledger, self.ledger_thread, processes, telemetry, self.rewards)
        self.admission = GroupAdmission(self.ledger, self.ledger_thread, source, config)
        self.step = 0  # of the last committed version
        self.trained = 0  # of the live weights: one ahead of `step` while their version is being published
        self._batched = 0  # step of the last batch that was formed
        self._batched_tasks = set[str]()  # of the newest batch
        self._taken = 0  # groups that batches of this lineage consumed
        self._size = 0  # groups that the next step takes, as far as is known
        self._commit_task: asyncio.Task[None] | None = None
        self._learner: Caller | None = None  # the process that holds this lineage's weights
        exact, taken = config.numerics.mode is Mode.EXACT, self.ledger.recall("defence")
        defence = None if taken is None else Defence(taken)
        watch = ParityMonitor(config.parity, exact=exact, dtype=config.engine.dtype, defence=defence)
        self.probe = ParityProbe(chat, config.parity, watch, telemetry, self._defend)
        self._defence_due: Defence | None = None
        self._window_changed = asyncio.Event()  # the window may have free places
        self._admitted = asyncio.Event()  # there may be rollouts that can start
        self.scheduler.required_step = lambda place: self.window.required_step(place, self._batched, self._size)

    def close(self) -> None:
        """Close the ledger after its pending writes. Idempotent."""
        self.ledger_thread.close()
        self.ledger.close()

    async def reinforce(self) -> None:
        """Train until the last step, and save the result as ``checkpoints/final``.

        Raises the error that ended training."""
        await self._with_learner(self._lineage)
        result = str(self.run_folder / "checkpoints" / "final")
        await self._with_learner(lambda: self._call("save", type(None), result))
        await self._drop_files()

    async def resume(self) -> None:
        """Make the learner load and publish the newest checkpoint, and set the ledger back to that step."""
        await self._with_learner(_nothing)

    async def _with_learner(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run work that needs a learner. When the learner is lost, its successor starts from the newest checkpoint and
        the work is repeated. Raises the single error behind a task group's failure, and `EtudeError` after
        `MAX_FRUITLESS` lineages in a row without a step."""
        fruitless = 0
        while True:
            first = self.step
            try:
                if self._learner is None or self._learner.lost.is_set():
                    await self._begin()
                first = self.step
                return await work()
            except BaseExceptionGroup as group:
                error = first_cause(group, minor=RECOVERABLE)
                if not isinstance(error, RECOVERABLE):
                    raise error from None
            except RECOVERABLE as alone:
                error = alone
            self._learner = None
            self.telemetry.event("lineage", state="lost", step=self.step, reason=error.what)
            fruitless = 0 if self.step > first else fruitless + 1
            if fruitless > MAX_FRUITLESS:
                facts = f"{fruitless} times in a row; the last time: {error.what}: {error.facts}"
                raise EtudeError(f"training failed repeatedly after step {self.step}", facts, hint=error.hint) from None

    async def _begin(self) -> None:
        """Start a new lineage on a learner that is up: load, publish, reconcile, probe."""
        learner = self._learner = await self.processes.learners.pick(deadline_s=STEP_S)
        self._commit_task = None  # a publish of the lost lineage is finished by the learner
        checkpoint = str(self._newest_checkpoint())
        self.step = self.trained = self._batched = await learner.call("begin", int, checkpoint, deadline_s=BEGIN_S)
        self._size = 0
        self.scorer.begin(self.step + 1)
        self.probe.learner_class = await self._call("parity", str)
        if self.config.numerics.mode is Mode.EXACT:
            self.processes.require_parity(self.probe.learner_class)
        if (taken := await self.ledger_thread(self.ledger.recall, "defence")) is not None:
            await self._call("defend", type(None), taken)
        learner_logprobs, _ = await self._offer(())
        published = await self._call("published", Published)
        steps = LineageSteps(weights_store(self.run_folder))
        reconciled = functools.partial(
            self.ledger.reconcile, steps, believed=steps.unread_up_to, head=published.version
        )
        await self.ledger_thread(self.rewards.recall, self.ledger, self.step + 1)
        mended = await self.ledger_thread(reconciled)  # no lineage continues from a step that it lacks
        self._taken = await self.ledger_thread(lambda: self.ledger.num_groups() - len(self.ledger.open_groups()))
        if steps.damaged is not None:
            reason = (
                f"the manifest of {steps.damaged.version} is damaged: the ledger's record is used for steps up to it"
            )
            self.telemetry.event("weights.mend", step=self.step, reason=reason)
        self.telemetry.event("lineage", state="begin", step=self.step, version=str(published.version), **vars(mended))
        self._on_published(published)
        await self._drop_files()
        await self.processes.wait_for_adoption(published.version)
        await self.processes.wait_for_engine()
        await self.probe.run(dict(self.processes.engines), published, learner_logprobs, remote=self.processes.remote)

    def _log_ledger(self, words: str) -> None:
        self.telemetry.event("ledger", reason=words)

    async def _call(self, method: str, kind: type[T], *args: object) -> T:
        """Call the learner of this lineage. Raises `ProcessLost` when it is gone, even if its successor is up."""
        assert self._learner is not None, "a lineage has begun"
        return await self._learner.call(method, kind, *args, deadline_s=STEP_S)

    async def _lineage(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._admit(), name="admit"),
                tasks.create_task(self.scheduler.run(self._admitted), name="rolling"),
                tasks.create_task(self.scorer.run(self.scheduler), name="scoring"),
            ]
            await self._train(tasks)
            for task in background:
                task.cancel()

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        if self._lacks_evaluation():
            await self._evaluate_during()
        late_s = 0.0  # waited for the previous version, where nothing may overlap with publishing
        async for batch, plan, wait_s in self._batches():
            began = time.perf_counter()
            try:
                report = await self._call("forward_backward", StepReport, batch.step, batch.digest)
                waited_s = await self._wait_for_commit()
                optim = await self._call("optim_step", dict[str, float])
            except NotFinite as error:
                raise await self._save_last_version(error) from None
            await self._refuse_withdrawn()
            self.trained = batch.step
            await self.probe.trained(batch.step, report.fresh_ratio_max)
            learner_logprobs, read_s = await self._offer(batch.rollout_ids)
            facts = {
                **step_metrics(plan, batch),
                **({"audits": audits} if (audits := self.drift.facts) else {}),
                **({"reward_weights": weights} if (weights := plan.rewards["weights"]) else {}),
                **{name: getattr(report, name) for name in report.__struct_fields__},
                **optim,
                "wait_s": round(wait_s, 4),
                "train_s": round(time.perf_counter() - began - waited_s - read_s, 4),
                "stall_s": round(late_s + waited_s + read_s, 4),
            }
            commit = self._commit(tasks, batch, learner_logprobs, facts)
            self._commit_task = tasks.create_task(commit, name=f"commit of {batch.batch_id}")
            checkpoint = self.trained % self.config.rl.checkpoint_every == 0 or self.trained == self.config.rl.steps
            evaluation = self.config.evals.is_due(self.trained, self.config.rl.steps)
            alone = checkpoint or evaluation or self.config.experience.max_lag == 0
            late_s = await self._wait_for_commit() if alone else 0.0
            if checkpoint:
                await self._checkpoint()
            if evaluation:
                await self._evaluate_during()

    async def _offer(self, rollout_ids: tuple[str, ...]) -> tuple[list[float], float]:
        """Have the learner start publishing its live weights. Returns its log-probabilities of the probe text under
        these weights, and the seconds until the weights were read."""
        began = time.perf_counter()
        await self._call("offer", type(None), rollout_ids)
        read_s = time.perf_counter() - began
        return await self._call("probe", list[float], self.probe.text), read_s

    async def _commit(
        self, tasks: asyncio.TaskGroup, batch: BatchRef, learner_logprobs: list[float], facts: dict[str, Any]
    ) -> None:
        """Wait until the pointer names the batch's version, commit the batch to the ledger, and start the probe of the
        version."""
        published = await self._call("published", Published)
        await self.ledger_thread(self.ledger.commit, batch.rollout_ids, published.version)
        self._on_published(published)
        terms = self.rewards.at(batch.step).terms
        if (dollars := await self._judge_dollars(terms)) is not None or terms:
            facts["judge_dollars"] = dollars
        self.telemetry.event("rl.step", step=batch.step, num_steps=self.config.rl.steps, **facts)
        probe = self.probe.run(dict(self.processes.engines), published, learner_logprobs, remote=self.processes.remote)
        tasks.create_task(probe, name=f"probe of {published.version}")

    async def _judge_dollars(self, terms: Sequence[TermConfig]) -> float | None:
        """Return what the judges of these terms, and those that were removed, have cost so far on all hosts; None:
        unknown, or no judge."""
        earlier = dict(await self.ledger_thread(self.ledger.recall, JUDGES) or {})
        accounts = await self.processes.judge_accounts(terms) if terms else {}
        if accounts:
            await self.ledger_thread(self.ledger.remember, JUDGES, {**earlier, **accounts})
        return None if accounts is None else judge_dollars(accounts, earlier)

    def _on_published(self, published: Published) -> None:
        self.processes.set_head(published.version)
        self.step = self.scheduler.published = published.version.step
        self._window_changed.set()
        self._admitted.set()

    async def _wait_for_commit(self) -> float:
        """Wait until no version is being published. Returns the seconds waited. Raises the error of a failed
        publish."""
        began = time.perf_counter()
        if self._commit_task is not None:
            await self._commit_task
        return time.perf_counter() - began

    async def _batches(self) -> AsyncIterator[tuple[BatchRef, BatchPlan, float]]:
        while self.trained < self.config.rl.steps and not await self._ended_by_drift():
            began = time.perf_counter()
            taken = await self._next_groups()
            if self._defence_due is not None:
                await self._call("defend", type(None), str(self._defence_due))
                self._defence_due = None
            while True:
                await self.scorer.complete(taken, self.trained + 1)
                groups = await self.ledger_thread(self.ledger.groups, taken)
                if await self._quarantine_withdrawn(groups):
                    continue
                rewards = self.rewards.at(self.trained + 1)
                await self.ledger_thread(self.drift.observe, rewards, self.trained + 1, groups)
                if self.drift.ended(rewards.audits):
                    break
                try:
                    plan = await self._plan(groups)
                    batch = await self._call("record", BatchRef, plan)
                    break
                except LedgerError:
                    if not await self._quarantine_unreadable(groups):
                        raise
            if self.drift.ended(rewards.audits):
                continue
            self._batched, self._taken, self._size = batch.step, self._taken + len(groups), 0
            self.scorer.taken(taken, batch.step)
            await self.ledger_thread(self.ledger.transaction, functools.partial(self._take_batch, batch, plan))
            self._window_changed.set()
            self._admitted.set()  # waiting groups have moved up
            yield batch, plan, time.perf_counter() - began

    async def _ended_by_drift(self) -> bool:
        """Whether an alarm has ended training. Then the weights of the last step are saved first."""
        if not self.drift.ended(self.rewards.at(self.trained + 1).audits):
            return False
        await self._wait_for_commit()
        if self._newest_checkpoint().name != f"step-{self.step:06d}":
            await self._checkpoint()
        return True

    async def _plan(self, groups: list[Group]) -> BatchPlan:
        experience, k1 = self.config.experience, None
        if experience.kl:
            valid = [rollout for group in groups for rollout, _ in group.valid]
            k1 = await self._call("k1", dict[str, float], valid)
        return plan_batch(
            groups,
            batch_id=f"b{self.trained + 1:06d}",
            step=self.trained + 1,
            max_lag=experience.max_lag,
            composition=self.rewards.composition(self.trained + 1),
            scheme=self._scheme,
            straggler=experience.straggler,
            k1=k1,
            full_groups=experience.signal_groups if self._scales else 0,
            min_group_size=experience.min_group_size,
        )

    async def _quarantine_withdrawn(self, groups: list[Group]) -> bool:
        """Quarantine the rollouts of these groups whose tasks were withdrawn, and delete their files. Returns whether
        there were any."""
        stored = [rollout for group in groups for rollout, _ in group.valid]
        gone = await self.admission.withdrawn({one.task_id for one in stored})
        lost = [one for one in stored if one.task_id in gone]
        await self._quarantine([one.rollout_id for one in lost], WITHDRAWN)
        for one in lost:
            await run_in_thread(functools.partial(self.processes.files.drop, one))
        self._batched_tasks = {one.task_id for one in stored} - gone
        return bool(gone)

    async def _refuse_withdrawn(self) -> None:
        """Raise `TaskWithdrawn` if a task of the newest batch was withdrawn, so that its weights are discarded."""
        if gone := await self.admission.withdrawn(self._batched_tasks):
            hint = "none needed: training goes on from the last checkpoint, without these rollouts"
            raise TaskWithdrawn(f"{len(gone)} tasks were withdrawn while they were trained on", hint=hint)

    async def _quarantine_unreadable(self, groups: list[Group]) -> bool:
        """Quarantine the rollouts of these groups whose files cannot be read. Returns whether there were any. When more
        than half cannot be read, nothing is quarantined: then the file system is at fault, not the files."""
        stored = [rollout for group in groups for rollout, _ in group.valid]
        unread = [one for one in stored if not await run_in_thread(functools.partial(self.processes.files.has, one))]
        if not 0 < len(unread) <= len(stored) // 2:
            return False
        await self._quarantine([one.rollout_id for one in unread], UNREAD)
        return True

    async def _quarantine(self, rollout_ids: Sequence[str], reason: str) -> None:
        def work() -> None:
            for rollout_id in rollout_ids:
                self.ledger.move(rollout_id, State.QUARANTINED, reason=reason)

        if rollout_ids:
            await self.ledger_thread(self.ledger.transaction, work)
        for rollout_id in rollout_ids:
            self.telemetry.event("rollout.signs", rollout_id=rollout_id, state="quarantined", signs=[reason])

    def _take_batch(self, batch: BatchRef, plan: BatchPlan) -> None:
        self.admission.count(plan)
        self.ledger.batch(batch)
        self.rewards.tuned = self.rewards.remember(self.ledger, plan)

    async def _next_groups(self) -> list[str]:
        """Wait for the groups of the next step. Has no deadline: every rollout and every term has its own."""
        self._size, seen = 0, dict[str, bool]()
        while True:
            ready = set(self.scorer.scored)
            order = await self.ledger_thread(self.ledger.open_groups)
            signal = (
                await self.ledger_thread(self._with_signal, ready, seen) if self.window.signal_groups else set[str]()
            )
            if (taken := self.window.take(order, ready, signal)) is not None:
                return taken
            if (size := self.window.size(order, ready, signal)) > self._size:
                self._size = size
                self._window_changed.set()
                self._admitted.set()
            await self.scorer.progress()

    def _with_signal(self, ready: Collection[str], seen: dict[str, bool]) -> set[str]:
        """The groups of `ready` from which the next step has a sample. `seen` caches the result per group for this
        step.

        Each group is composed and credited as its batch will be: rewards in rows of the ledger are those of rollouts by
        themselves, and a credit scheme may give advantages to equal rewards."""
        experience = self.config.experience
        learned = functools.partial(
            has_fresh_signal,
            learner_step=self.trained,
            max_lag=experience.max_lag,
            composition=self.rewards.composition(self.trained + 1),
            scheme=self._scheme,
            min_group_size=experience.min_group_size,
        )
        new = sorted(set(ready) - seen.keys())
        seen |= dict(zip(new, map(learned, self.ledger.groups(new)), strict=True))
        return {group for group in ready if seen[group]}

    async def _admit(self) -> None:
        """Admit groups whenever the window has free places, in one transaction with the task cursor."""
        while True:
            self._window_changed.clear()
            num_open = await self.ledger_thread(self.ledger.num_groups) - self._taken
            at = self._batched, self.step
            wanted = (self.config.rl.steps - self._batched) * self.window.max_groups - num_open
            free = min(self.window.free_groups(num_open, *at, self._size), wanted, AT_ONCE)
            if free <= 0:
                await self._window_changed.wait()
                continue
            await self.admission.admit([self.window.min_step(num_open + number, *at) for number in range(free)])
            self._admitted.set()

    async def evaluate(self, name: str, split: Split, num_tasks: int, tries: int = 1) -> EvalResult:
        """Evaluate the published weights with `tries` rollouts on each of the first `num_tasks` tasks of a split.

        `name`: the name of the result, such as "before". No version is published during the evaluation."""
        return await evaluate(
            self.processes,
            tasks_of(self.source, [split], num_tasks),
            name=name,
            split=split,
            step=self.step,
            tries=tries,
            seed=self.config.seed,
            temperature=self.config.evals.temperature,
            out=self.run_folder / "evals" / file_name(name, split, self.step),
            price=run_price(self.config),
            telemetry=self.telemetry,
        )

    async def _evaluate_during(self) -> None:
        await self.evaluate(DURING, Split.VALIDATION, self.config.evals.during_tasks)

    def _lacks_evaluation(self) -> bool:
        """Whether the evaluation of the step at which this lineage starts was interrupted: the checkpoint is written
        first."""
        path = self.run_folder / "evals" / file_name(DURING, Split.VALIDATION, self.step)
        return self.config.evals.is_due(self.step, self.config.rl.steps) and not path.exists()

    async def _defend(self, defence: Defence) -> None:
        """Have the learner use this defence from the next step on, and record it for `--resume`. It is not applied at
        once, since the trace of a step records the settings of that step."""
        await self.ledger_thread(
            self.ledger.transaction, functools.partial(self.ledger.remember, "defence", str(defence))
        )
        self._defence_due = defence

    def _newest_checkpoint(self) -> Path:
        steps = sorted((self.run_folder / "checkpoints").glob("step-*"))
        return steps[-1] if steps else self.run_folder / "checkpoints" / "mid"

    async def _checkpoint(self) -> None:
        path = self.run_folder / "checkpoints" / f"step-{self.step:06d}"
        await self._call("save", type(None), str(path))
        await self._prune(oldest_restart_step(self.run_folder))
        freed = await self.ledger_thread(
            delete_oldest, self.run_folder, self.ledger, self.traces, disk_gb=self.config.retention.disk_gb
        )
        if freed:
            kept = await self.ledger_thread(replayable_after, self.ledger)
            self.telemetry.event("retention", step=self.step, kept_from=kept, freed_bytes=freed)

    async def _prune(self, step: int) -> None:
        """Delete records and files of rollouts that steps up to this one consumed. No restart goes back before it."""
        await self.ledger_thread(self.ledger.prune, step)
        await self._drop_files()

    async def _drop_files(self) -> None:
        """Delete the files of rollouts that nobody needs: of steps before any restart point, and of abandoned
        attempts. At the end of RL those since the last restart point stay, for `etude judge labels`."""
        files = self.processes.files
        names = await run_in_thread(files.names)  # listed before the ledger is queried, so that new files are kept
        wanted = await self.ledger_thread(self.ledger.wanted_files)
        await run_in_thread(functools.partial(files.keep_only, names, wanted))

    async def _save_last_version(self, error: NotFinite) -> NotFinite:
        """Save the last good version's state. Returns the error with the checkpoint's path in it, for the caller to
        raise."""
        await self._wait_for_commit()
        with contextlib.suppress(NotFinite):  # the live weights are NaN, too: the previous checkpoint remains
            await self._checkpoint()
        at = self._newest_checkpoint()
        facts = f"{error.facts}; the last good checkpoint is {at}"
        hint = f"{error.hint}; for other settings start a new run: --set start={at}; --resume repeats the step"
        return NotFinite(error.what, facts, hint=hint)


async def _nothing() -> None:
    """Do nothing: `resume` needs only the learner that `_with_learner` brings up."""
