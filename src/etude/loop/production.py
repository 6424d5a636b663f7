"""Trains a run further on production use (`etude learn`): episodes from a privacy folder, rewards from users' signals.

Each step takes the oldest settled episodes, each as a group of one rollout in the run's ledger, so that every episode
is trained on at most once and every rule of a run holds: states, batches, traces, replay, publishing, checkpoints. The
step's version is the newest one of the run's channel of weights, a candidate for `etude release begin`.

Consent is asked twice: when the batch is formed, and after the optimiser step. The second time the privacy folder is
locked until the version is published, so that no subject withdraws in between. If one has withdrawn, the weights are
discarded, the learner starts again from the last checkpoint, and the step is made again without that subject.

An episode is linked to its rollout in the privacy folder before the ledger has the rollout. After a kill between the
two, the record is still free, since no rollout in the ledger holds it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from etude.errors import ConfigError, EtudeError, NotFinite, RunRefused
from etude.experience import Group, Ledger, plan_batch, step_metrics
from etude.experience.admission import Straggler
from etude.experience.transitions import State
from etude.loop.config import RunConfig
from etude.loop.locations import has_published, ledger_location, traces_folder, weights_store
from etude.loop.processes import Supervisor
from etude.loop.retention import delete_oldest, oldest_restart_step
from etude.loop.rpc import Caller, ProcessLost
from etude.loop.run_in_thread import SerialExecutor, run_in_thread
from etude.loop.run_processes import RunProcesses, open_processes
from etude.privacy import Level, PrivacyFolder
from etude.production import Baselines, Episode, LearnSettings, choose, find_episodes, graded_of, reward_of, rollout_of
from etude.production.episodes import SOURCE
from etude.production.outcomes import SignalSource, Values
from etude.records import RolloutSpec, Version
from etude.records.sample import Published, StepReport
from etude.records.summary import BatchPlan, BatchRef, Member, summary_of
from etude.rewards import Composition
from etude.run import RunFolder
from etude.telemetry import Telemetry
from etude.weights.chain import history
from etude.weights.chain.history import LineageSteps

STEP_S, BEGIN_S = 600.0, 1200.0
LEAST = 2  # episodes of a step
MAX_FRUITLESS = 6  # lost learners in a row without a step
STABLE = "stable"  # the branch of the deployed version, if there is one
BASELINES, SINCE = "production.baselines", "production.since"  # in the ledger
NO_CONSENT = "its subject no longer allows training"
SCHEME, SCHEME_VERSION = "production-baselines", "1"
T = TypeVar("T")
OnStep = Callable[[int, Version, dict[str, Any]], None]
"""Called after each step with its number, its version and its metrics."""


async def learn(
    run: RunFolder,
    config: RunConfig,
    settings: LearnSettings,
    telemetry: Telemetry,
    folder: PrivacyFolder,
    signals: SignalSource,
    *,
    steps: int | None,
    poll_s: float,
    on_step: OnStep,
    on_wait: Callable[[str], None] = lambda _: None,
) -> None:
    """Train a run on production use, for a number of steps, or until it is cancelled if `steps` is None.

    The caller holds the run's lock. `poll_s`: how often new episodes are looked for, in s. `on_wait` is called with a
    line on what is waited for when that changes. Raises `ConfigError` for settings that do not fit the run,
    `RunRefused` if its RL has not ended, and the error that ended training."""
    supervisor = Supervisor(telemetry, hung_s=config.fleet.hung_s)
    try:
        async with open_processes(run, config, telemetry, supervisor) as processes:
            with contextlib.closing(
                ProductionTrainer(run, config, settings, telemetry, processes, folder, signals)
            ) as trainer:
                await processes.start_learner()
                await trainer.train(steps, poll_s=poll_s, on_step=on_step, on_wait=on_wait)
    finally:
        await supervisor.close()


class ProductionTrainer:
    """Trains a run on production episodes with the run's learner process. See the module's docstring."""

    def __init__(
        self,
        run: RunFolder,
        config: RunConfig,
        settings: LearnSettings,
        telemetry: Telemetry,
        processes: RunProcesses,
        folder: PrivacyFolder,
        signals: SignalSource,
    ) -> None:
        if not run.ended("rl") or not has_published(run):
            hint = f"finish its RL first: etude run --resume {run.path}"
            raise RunRefused(f"{run.path} cannot learn from production yet", "its RL has not ended", hint=hint)
        self.run, self.config, self.settings, self.telemetry = run, config, settings, telemetry
        self.processes, self.folder, self.signals = processes, folder, signals
        capacity = config.experience.window.max_open_groups * config.experience.group_size
        if settings.episodes > capacity:
            raise ConfigError(
                f"episodes = {settings.episodes} is more than the run's ledger has slots",
                f"it has {capacity}: groups_per_step x group_size x (max_lag + 1) of the run",
                hint=f"set episodes = {capacity} or less",
            )
        self.ledger = Ledger(ledger_location(run), capacity=capacity, log=self._log_ledger)
        self.storage = SerialExecutor("storage")  # the one thread that uses the ledger and the privacy folder
        self.composition = Composition(require_submit=False, kl=settings.kl)
        self.prefix = f"{SOURCE}-{run.identity()['run_id']}-"  # several runs may learn from one privacy folder
        self.step = 0
        self._learner: Caller | None = None

    def close(self) -> None:
        """Close the ledger after its pending writes. Idempotent."""
        self.storage.close()
        self.ledger.close()

    def _log_ledger(self, words: str) -> None:
        self.telemetry.event("ledger", reason=words)

    async def train(self, steps: int | None, *, poll_s: float, on_step: OnStep, on_wait: Callable[[str], None]) -> None:
        """Make `steps` steps, or go on until cancelled if it is None. See `learn`."""
        done = fruitless = 0
        while steps is None or done < steps:
            try:
                if self._learner is None or self._learner.lost.is_set():
                    await self._begin()
                groups = await self._next_groups(poll_s, on_wait)
                made = await self._make_step(groups)
            except ProcessLost as error:
                self._learner, fruitless = None, fruitless + 1
                self.telemetry.event("lineage", state="lost", step=self.step, reason=error.what)
                if fruitless > MAX_FRUITLESS:
                    facts = f"{fruitless} times in a row; the last time: {error.what}: {error.facts}"
                    raise EtudeError("the learner was lost repeatedly", facts, hint=error.hint) from None
                continue
            if made is not None:
                fruitless, done = 0, done + 1
                on_step(self.step, *made)

    async def _call(self, method: str, kind: type[T], *args: object) -> T:
        assert self._learner is not None, "a lineage has begun"
        return await self._learner.call(method, kind, *args, deadline_s=STEP_S)

    async def _begin(self) -> None:
        """Load the newest checkpoint into the learner, publish it, and set the ledger back to its step."""
        learner = self._learner = await self.processes.learners.pick(deadline_s=STEP_S)
        checkpoint = max((self.run / "checkpoints").glob("step-*"), default=self.run / "checkpoints" / "mid")
        self.step = await learner.call("begin", int, str(checkpoint), deadline_s=BEGIN_S)
        await self._call("offer", type(None), ())
        published = await self._call("published", Published)
        if self.settings.kl:
            store = weights_store(self.run)
            stable = await run_in_thread(lambda: history.head(store, "policy", STABLE))
            deployed = published.version if stable is None else stable.head.version
            await self._call("refer", type(None), deployed.step)
        steps = LineageSteps(weights_store(self.run))
        mended = await self.storage(
            functools.partial(self.ledger.reconcile, steps, believed=steps.unread_up_to, head=published.version)
        )
        self.telemetry.event("lineage", state="begin", step=self.step, version=str(published.version), **vars(mended))
        await self._drop_files()

    # Episodes

    async def _next_groups(self, poll_s: float, on_wait: Callable[[str], None]) -> list[str]:
        """Return the ids of the groups of the next step: those that were left over, or new ones."""
        told = ""
        while True:
            open_now = await self.storage(self.ledger.open_groups)
            if left := [group_id for group_id in open_now if group_id.startswith(self.prefix)]:
                return left
            ready, rated, why = await self.storage(self._ready, time.time())
            if not why:
                return await self._admit(ready, rated)
            if why != told:
                told = why
                on_wait(why)
            await asyncio.sleep(poll_s)

    def _ready(self, now: float) -> tuple[list[Episode], list[tuple[Values, float]], str]:
        """Return the episodes of the next step with their signals and rewards, and "" or what is waited for."""
        since = float(self.ledger.recall(SINCE) or 0.0)
        found = find_episodes(self.folder, since=since, taken=self._taken)
        settled = [one for one in found if one.last_at <= now - self.settings.settle_s]
        valued = dict[tuple[str, ...], tuple[Values, float]]()
        for one in settled:
            values = self.signals.values_of(one.response_ids)
            reward = reward_of(values, self.settings.outcomes)
            if reward is None:
                reward = self.settings.silent
            if reward is not None:
                valued[one.record_ids] = values, reward
        self._move_on(found, valued.keys(), now)
        rated = [one for one in settled if one.record_ids in valued]
        chosen = choose(rated, episodes=self.settings.episodes, per_user=self.settings.per_user)
        waited_s = now - self.settings.settle_s - min((one.last_at for one in chosen), default=now)
        late = len(chosen) >= LEAST and waited_s >= self.settings.max_wait_s
        waits = len(chosen) < self.settings.episodes and not late
        counts = f"{len(rated)} with a signal that counts, {len(settled)} settled, {len(found)} in all"
        why = f"{len(chosen)} of {self.settings.episodes} episodes: {counts}"
        return chosen, [valued[one.record_ids] for one in chosen], why if waits else ""

    def _taken(self, record_ids: Collection[str]) -> set[str]:
        """Return those of these records that a rollout in the ledger holds."""
        uses = self.folder.records.uses(record_ids)
        mine = {i for ids in uses.values() for i in ids if i.startswith(self.prefix)}
        stored = {row.rollout_id for row in self.ledger.find_rows(mine)} if mine else set[str]()
        return {record_id for record_id, ids in uses.items() if ids & stored}

    def _move_on(self, found: Sequence[Episode], rated: Collection[tuple[str, ...]], now: float) -> None:
        """Remember from which time on answers are read: episodes before it were trained on, or settled unrated."""
        open_now = [one for one in found if one.record_ids in rated or one.last_at > now - self.settings.settle_s]
        since = min((one.first_at for one in open_now), default=now - self.settings.settle_s)
        if since > float(self.ledger.recall(SINCE) or 0.0):
            self.ledger.transaction(lambda: self.ledger.remember(SINCE, since))

    async def _admit(self, episodes: Sequence[Episode], rated: Sequence[tuple[Values, float]]) -> list[str]:
        """Store episodes as graded rollouts, each the only one of its group. Returns the ids of the groups."""
        first = await self.storage(self.ledger.num_groups)
        rollouts = [rollout_of(one, f"{self.prefix}{first + i:06d}") for i, one in enumerate(episodes)]

        def link() -> None:
            for rollout, one in zip(rollouts, episodes, strict=True):
                for record_id in one.record_ids:
                    self.folder.records.link(record_id, rollout.rollout_id)

        await self.storage(link)
        stored = await run_in_thread(lambda: [self.processes.files.write(rollout) for rollout in rollouts])
        ended = [
            (summary_of(rollout, file), graded_of(values, reward))
            for rollout, file, (values, reward) in zip(rollouts, stored, rated, strict=True)
        ]
        specs = [
            RolloutSpec(
                rollout_id=rollout.rollout_id,
                group_id=rollout.group_id,
                attempt=0,
                task=rollout.task,
                seed=0,
                temperature=self.config.rl.temperature,
                keep_routes=False,
            )
            for rollout in rollouts
        ]

        def store() -> None:
            self.ledger.admit(*specs)
            for spec in specs:
                self.ledger.move(spec.rollout_id, State.RUNNING)
            self.ledger.finish_all(ended)

        await self.storage(self.ledger.transaction, store)
        return [rollout.group_id for rollout in rollouts]

    # Steps

    async def _make_step(self, groups: list[str]) -> tuple[Version, dict[str, Any]] | None:
        """Train on these groups and publish the result. Returns the version and metrics of the step.

        Returns None if a subject has withdrawn its consent after the batch was formed: the groups that are left will be
        taken again."""
        await self._withdraw(groups)
        found = await self.storage(self.ledger.groups, groups)
        k1 = (
            await self._call("k1", dict[str, float], [s for g in found for s, _ in g.valid])
            if self.settings.kl
            else None
        )
        plan = await self.storage(self._plan, found, k1)
        batch = await self._call("record", BatchRef, plan)
        await self.storage(self.ledger.transaction, functools.partial(self._take, batch, plan))
        began = time.perf_counter()
        try:
            report = await self._call("forward_backward", StepReport, batch.step, batch.digest)
            optim = await self._call("optim_step", dict[str, float])
        except NotFinite as error:
            hint = f"{error.hint}; the last good checkpoint is of step {self.step}"
            raise NotFinite(error.what, error.facts, hint=hint) from None
        async with self._locked():
            if await self._withdraw(groups):
                self.telemetry.event("production.discarded", step=batch.step, reason=NO_CONSENT)
                await self._begin()
                return None
            await self._call("offer", type(None), batch.rollout_ids)
            published = await self._call("published", Published)
        await self.storage(self.ledger.commit, batch.rollout_ids, published.version)
        self.step = batch.step
        facts = {
            **step_metrics(plan, batch),
            **{name: getattr(report, name) for name in report.__struct_fields__},
            **optim,
            "origin": SOURCE,
            "train_s": round(time.perf_counter() - began, 4),
        }
        self.telemetry.event("rl.step", step=batch.step, num_steps=batch.step, **facts)
        await self._checkpoint()
        return published.version, facts

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Hold the lock of the privacy folder, so that no consent changes."""
        with contextlib.ExitStack() as stack:
            await run_in_thread(lambda: stack.enter_context(self.folder.keys.lock()))
            yield

    async def _withdraw(self, groups: Sequence[str]) -> int:
        """Quarantine the rollouts of these groups whose subjects do not allow training now, and delete their files.
        Returns how many there are."""
        rows = [row for group_id in groups for row in await self.storage(self.ledger.group_rows, group_id)]
        ids = [row.rollout_id for row in rows if row.state in (State.GRADED, State.BATCHED)]
        gone = await self.storage(self._without_consent, ids)

        def work() -> None:
            for rollout_id in gone:
                self.ledger.move(rollout_id, State.QUARANTINED, reason=NO_CONSENT)

        if gone:
            summaries = [await self.storage(self.ledger.finished, rollout_id) for rollout_id in gone]
            await self.storage(self.ledger.transaction, work)
            for one in summaries:
                if one is not None and one.summary is not None:
                    await run_in_thread(functools.partial(self.processes.files.drop, one.summary))
            self.telemetry.event("production.withdrawn", rollouts=len(gone), step=self.step)
        return len(gone)

    def _without_consent(self, rollout_ids: Sequence[str]) -> list[str]:
        """Return the ids of the rollouts that hold a record that may not be trained on now."""
        records = self.folder.records.records_of(rollout_ids)
        usable = self.folder.usable({i for ids in records.values() for i in ids}, Level.TRAIN)
        return [i for i in rollout_ids if not records.get(i) or not records[i] <= usable]

    def _plan(self, groups: Sequence[Group], k1: dict[str, float] | None) -> BatchPlan:
        """Plan the next step: rewards by the terms, and advantages by the baselines of the kinds of work."""
        plan = plan_batch(
            groups,
            batch_id=f"b{self.step + 1:06d}",
            step=self.step + 1,
            max_lag=self.settings.max_lag,
            composition=self.composition,
            straggler=Straggler.MASK,
            k1=k1,
        )
        baselines = Baselines(self.ledger.recall(BASELINES))
        rewarded = list(_rewarded(plan))
        given = baselines.advantages([reward for _, reward in rewarded])
        by_id = {one.rollout_id: advantage for (one, _), advantage in zip(rewarded, given, strict=True)}
        members = tuple(msgspec.structs.replace(one, advantage=by_id.get(one.rollout_id, 0.0)) for one in plan.members)
        rewards = {**plan.rewards, "scheme": SCHEME, "scheme_version": SCHEME_VERSION}
        return msgspec.structs.replace(plan, members=members, rewards=rewards)

    def _take(self, batch: BatchRef, plan: BatchPlan) -> None:
        """Record the batch, and count its rewards in the baselines, unless they were counted before."""
        baselines = Baselines(self.ledger.recall(BASELINES))
        before = self.ledger.batched_groups([one.group_id for one in plan.members])
        baselines.count([reward for one, reward in _rewarded(plan) if one.group_id not in before])
        self.ledger.batch(batch)
        self.ledger.remember(BASELINES, baselines.state)

    async def _checkpoint(self) -> None:
        await self._call("save", type(None), str(self.run / "checkpoints" / f"step-{self.step:06d}"))
        await self.storage(self.ledger.prune, oldest_restart_step(self.run))
        await self._drop_files()
        disk_gb = self.config.retention.disk_gb
        traces = traces_folder(self.run)
        await self.storage(functools.partial(delete_oldest, self.run, self.ledger, traces, disk_gb=disk_gb))

    async def _drop_files(self) -> None:
        """Delete the files of rollouts that nobody needs any more."""
        names = await run_in_thread(self.processes.files.names)
        wanted = await self.storage(self.ledger.wanted_files)
        await run_in_thread(functools.partial(self.processes.files.keep_only, names, wanted))


def _rewarded(plan: BatchPlan) -> Iterator[tuple[Member, tuple[str, float]]]:
    """Yield each rewarded member with its (kind of work, reward)."""
    for one in plan.members:
        if one.reward is not None and one.summary is not None:
            yield one, (one.summary.family, one.reward.value)
