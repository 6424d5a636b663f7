"""Trains a run further on production use (`etude learn`): on windows of episodes with rewards from users' signals.

Each step takes episodes of the newest window (`production_windows`). In the run's ledger an episode is a group of one
rollout. So it is trained on at most once, and batches, traces, replay, publishing and checkpoints work as in RL. A step
publishes a version to the run's channel of weights; it is a candidate for a release (`production_loop`). With
`simulated` in the settings, the batch also has groups of simulated rollouts (`simulated_groups`). Their advantages are
computed by the run's credit scheme, those of episodes from the baseline of their kind of work.

Consent is checked twice: when the batch is formed, and after the optimiser step. The second time the privacy folder is
locked until the version is published, so that no subject withdraws in between. If one has withdrawn, the weights are
discarded, the learner starts again from the last checkpoint, and the step is repeated without that subject. Tasks that
their source has withdrawn are treated in the same way."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from etude.errors import EtudeError, NotFinite
from etude.experience import Group, plan_batch, step_metrics
from etude.experience.admission import Straggler
from etude.experience.ledger import Reconciled
from etude.experience.traces import PRODUCTION_SCHEME
from etude.experience.transitions import State
from etude.loop import usage
from etude.loop.group_admission import WITHDRAWN
from etude.loop.locations import traces_folder, weights_store
from etude.loop.processes import Supervisor, unless_failed
from etude.loop.production_windows import Window, Windows
from etude.loop.retention import delete_oldest, oldest_restart_step
from etude.loop.rpc import Caller, ProcessLost
from etude.loop.run_in_thread import run_in_thread
from etude.loop.run_processes import RunProcesses, open_processes
from etude.loop.simulated_groups import SimulatedGroups
from etude.privacy import Level
from etude.production import Baselines
from etude.production.episodes import SIMULATED, SOURCE
from etude.records import Version
from etude.records.sample import Published, StepReport
from etude.records.summary import BatchPlan, BatchRef, Member
from etude.releases.pointers import STABLE, branch_version
from etude.rewards import Composition
from etude.telemetry import Telemetry
from etude.training.schedule import rl_lr_multiplier
from etude.weights.chain.history import LineageSteps

STEP_S, BEGIN_S = 600.0, 1200.0
MIXED = "mixed"  # the origin of steps that have both
MAX_FRUITLESS = 6  # lost learners in a row without a step
BASELINES = "production.baselines"  # in the ledger
NO_CONSENT = "its subject no longer allows training"
NOT_PROMOTED = "a version that was trained on it was not promoted"
SCHEME_VERSION = "1"
T = TypeVar("T")
OnStep = Callable[[int, Version, dict[str, Any]], None]
"""Called after each step with its number, its version and its metrics."""


async def learn(
    windows: Windows,
    telemetry: Telemetry,
    *,
    steps: int | None,
    poll_s: float,
    on_step: OnStep,
    on_wait: Callable[[str], None] = lambda _: None,
) -> None:
    """Train a run on its windows without releases, for `steps` steps; None: until it is cancelled.

    The caller holds the run's lock. `poll_s`: seconds between checks for new episodes. `on_wait` is called with a
    line that says what it waits for, whenever that changes. Raises the error that ended training."""
    async with trainer_of(windows, telemetry) as trainer:
        await trainer.train(steps, poll_s=poll_s, on_step=on_step, on_wait=on_wait)


@contextlib.asynccontextmanager
async def trainer_of(windows: Windows, telemetry: Telemetry) -> AsyncIterator[ProductionTrainer]:
    """Start a learner process for the run of `windows`, and yield a trainer that uses it.

    With simulated rollouts also the run's engines, workers and graders are started. The processes end at the end of the
    `async with` block. Raises the error of a process that cannot be kept alive."""
    supervisor = Supervisor(telemetry, hung_s=windows.config.fleet.hung_s)
    watching = asyncio.create_task(usage.log_usage(supervisor.usage, telemetry), name="usage")
    try:
        async with (
            unless_failed(supervisor),
            open_processes(windows.run, windows.config, telemetry, supervisor) as processes,
        ):
            trainer = ProductionTrainer(windows, telemetry, processes)
            sampling = [processes.start_sampling()] if trainer.simulated is not None else []
            await asyncio.gather(processes.start_learner(), *sampling)
            yield trainer
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await supervisor.close()


class ProductionTrainer:
    """Trains a run on production episodes with the run's learner process. See the module's docstring."""

    def __init__(self, windows: Windows, telemetry: Telemetry, processes: RunProcesses) -> None:
        self.windows, self.telemetry, self.processes = windows, telemetry, processes
        self.run, self.config, self.settings = windows.run, windows.config, windows.settings
        self.ledger, self.storage, self.folder = windows.ledger, windows.storage, windows.folder
        self.simulated = SimulatedGroups(windows, telemetry, processes) if self.settings.simulated else None
        self.composition = Composition(require_submit=False, kl=self.settings.kl)
        self.step = 0
        self.version: Version | None = None  # of the learner's weights, as last published
        self._learner: Caller | None = None
        self._window: Window | None = None
        self._referred: Version | None = None

    async def train(self, steps: int | None, *, poll_s: float, on_step: OnStep, on_wait: Callable[[str], None]) -> None:
        """Make `steps` steps; None: go on until cancelled. See `learn`."""
        made = await self.train_window(on_step, most=steps)  # of a window that an earlier process left
        while steps is None or made < steps:
            await self.windows.fill(poll_s=poll_s, on_wait=on_wait)
            made += await self.train_window(on_step, most=None if steps is None else steps - made)

    async def train_window(self, on_step: OnStep, *, most: int | None = None) -> int:
        """Make the missing steps of the newest window, at most `most` (None: all). Returns how many were made.

        Afterwards `version` is the newest version that the learner has published. Raises the error that ended
        training."""
        made = fruitless = 0
        self._window = await self.storage(self.windows.newest)
        while most is None or made < most:
            try:
                if self._learner is None or self._learner.lost.is_set():
                    await self._begin()
                episodes = await self.windows.left()
                if not episodes:
                    break
                done = await self._make_step(episodes)
            except ProcessLost as error:
                self._learner, fruitless = None, fruitless + 1
                self.telemetry.event("lineage", state="lost", step=self.step, reason=error.what)
                if fruitless > MAX_FRUITLESS:
                    facts = f"{fruitless} times in a row; the last time: {error.what}: {error.facts}"
                    raise EtudeError("the learner was lost repeatedly", facts, hint=error.hint) from None
                continue
            if done is not None:
                fruitless, made = 0, made + 1
                on_step(self.step, *done)
        return made

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
        self.version, self._referred = published.version, None
        mended = await self.storage(self._reconcile, published.version)
        self.telemetry.event("lineage", state="begin", step=self.step, version=str(published.version), **vars(mended))
        await self._drop_files()
        if self.simulated is not None:
            await self.simulated.begin(published.version, await self._call("parity", str))

    def _reconcile(self, head: Version) -> Reconciled:
        """Correct the ledger's states for the learner's weights. Rollouts of earlier windows' steps that these weights
        were not trained on are quarantined: their version was not promoted, and the next one is not trained on them.

        If a step of this window is undone, its simulated groups are free again, also one that an earlier window had
        admitted and not used."""
        steps, window, windows = LineageSteps(weights_store(self.run)), self._window, self.windows
        if window is None or window.base is None:
            return self.ledger.reconcile(steps, believed=steps.unread_up_to, head=head)
        first, base = window.first, window.base.step
        batched = [row for step in self.ledger.steps(after=base) for row in self.ledger.rows(step=step)]
        new = [row for row in batched if windows.is_episode(row.group_id) and windows.number(row.group_id) >= first]
        batches = {row.batch_id for row in new}
        free = {row.group_id for row in batched if row.batch_id in batches}

        def spent(group_id: str) -> str:
            return NOT_PROMOTED if windows.number(group_id) < first and group_id not in free else ""

        return self.ledger.reconcile(steps, believed=steps.unread_up_to, head=head, spent=spent)

    async def _refer(self) -> None:
        """Have the learner compare with the deployed version: that of the branch `stable`; without one, the newest when
        the learner began."""
        store = weights_store(self.run)
        deployed = await run_in_thread(lambda: branch_version(store, "policy", STABLE))
        deployed = deployed or self._referred or self.version
        if deployed is not None and deployed != self._referred:
            await self._call("refer", type(None), deployed.step)
            self._referred = deployed

    # Steps

    async def _with_simulated(self, episodes: list[str]) -> list[str]:
        """Return these groups of episodes, and the groups of simulated rollouts of their step, which are complete.

        If no episode may be trained on, there are no simulated ones either."""
        await self._withdraw(episodes)
        number = sum(len(group.valid) for group in await self.storage(self.ledger.groups, episodes))
        if self.simulated is None or not number:
            return episodes
        assert self.version is not None, "a lineage has begun"
        return [*episodes, *await self.simulated.ready(number, self.version)]

    async def _make_step(self, episodes: list[str]) -> tuple[Version, dict[str, Any]] | None:
        """Train on these episodes, and on simulated groups as the settings say, and publish the result.

        Returns the version and metrics of the step; None if a subject has withdrawn its consent after the batch was
        formed: the groups that are left will be taken again."""
        groups = await self._with_simulated(episodes)
        await self._withdraw(groups)  # the rollouts took their time
        if not any(group.valid for group in await self.storage(self.ledger.groups, episodes)):
            groups = episodes  # simulated groups alone are no production step; a later one takes them
        found = await self.storage(self.ledger.groups, groups)
        k1 = None
        if self.settings.kl:
            await self._refer()
            k1 = await self._call("k1", dict[str, float], [s for g in found for s, _ in g.valid])
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
            if not (gone := await self._withdraw(groups)):
                await self._call("offer", type(None), batch.rollout_ids)
                published = await self._call("published", Published)
        if gone:
            self.telemetry.event("production.discarded", step=batch.step, reason=f"{gone} rollouts were withdrawn")
            await self._begin()
            return None
        await self.storage(self.ledger.commit, batch.rollout_ids, published.version)
        self.step, self.version = batch.step, published.version
        parts = {name: _metrics(part, batch) for name, part in self._by_origin(plan).items()}
        facts = {
            **step_metrics(plan, batch),
            **{name: getattr(report, name) for name in report.__struct_fields__},
            **optim,
            "origin": MIXED if len(parts) > 1 else SOURCE,
            "origins": parts,
            "window": 0 if self._window is None else self._window.number,
            "sampled_by": _sampled_by([one for one in found if self.windows.is_episode(one.group_id)], self._window),
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
        """Quarantine the rollouts of these groups whose subjects do not allow training now, or whose tasks were
        withdrawn, and delete their files. Returns how many there are."""
        rows = [row for group_id in groups for row in await self.storage(self.ledger.group_rows, group_id)]
        rows = [row for row in rows if row.state in (State.GRADED, State.BATCHED)]
        episodes = [row.rollout_id for row in rows if self.windows.is_episode(row.group_id)]
        gone = dict.fromkeys(await self.storage(self._without_consent, episodes), NO_CONSENT)
        if self.simulated is not None:
            simulated = [row.rollout_id for row in rows if not self.windows.is_episode(row.group_id)]
            gone |= dict.fromkeys(await self.simulated.withdrawn(simulated), WITHDRAWN)

        def work() -> None:
            for rollout_id, reason in gone.items():
                self.ledger.move(rollout_id, State.QUARANTINED, reason=reason)

        if gone:
            summaries = [await self.storage(self.ledger.finished, rollout_id) for rollout_id in gone]
            await self.storage(self.ledger.transaction, work)
            for one in summaries:
                if one is not None and one.summary is not None:
                    await run_in_thread(functools.partial(self.windows.files.drop, one.summary))
            self.telemetry.event("production.withdrawn", rollouts=len(gone), step=self.step)
        return len(gone)

    def _without_consent(self, rollout_ids: Sequence[str]) -> list[str]:
        """Return the ids of the rollouts that hold a record that may not be trained on now."""
        records = self.folder.records.records_of(rollout_ids)
        usable = self.folder.usable({i for ids in records.values() for i in ids}, Level.TRAIN)
        return [i for i in rollout_ids if not records.get(i) or not records[i] <= usable]

    def _plan(self, groups: Sequence[Group], k1: dict[str, float] | None) -> BatchPlan:
        """Plan the next step: rewards by the terms, and advantages by the baselines of the kinds of work.

        Simulated groups have the rewards and advantages of the run's RL."""
        batch_id, step = f"b{self.step + 1:06d}", self.step + 1
        plan = plan_batch(
            [one for one in groups if self.windows.is_episode(one.group_id)],
            batch_id=batch_id,
            step=step,
            max_lag=self.settings.max_lag,
            composition=self.composition,
            straggler=Straggler.MASK,
            k1=k1,
        )
        baselines = Baselines(self.ledger.recall(BASELINES))
        rewarded = list(_rewarded(plan))
        given = baselines.advantages([reward for _, reward in rewarded])
        by_id = {one.rollout_id: advantage for (one, _), advantage in zip(rewarded, given, strict=True)}
        members = [msgspec.structs.replace(one, advantage=by_id.get(one.rollout_id, 0.0)) for one in plan.members]
        rewards = {**plan.rewards, "scheme": PRODUCTION_SCHEME, "scheme_version": SCHEME_VERSION}
        num_tokens = plan.num_loss_tokens
        if simulated := [one for one in groups if not self.windows.is_episode(one.group_id)]:
            assert self.simulated is not None, "they are its groups"
            beside = self.simulated.plan(simulated, k1, batch_id=batch_id, step=step)
            members, rewards = [*members, *beside.members], {**rewards, SIMULATED: beside.rewards}
            num_tokens += beside.num_loss_tokens
        return msgspec.structs.replace(
            plan,
            members=tuple(sorted(members, key=lambda one: one.rollout_id)),
            num_loss_tokens=num_tokens,
            rewards=rewards,
            lr_share=self._lr_share(),
        )

    def _by_origin(self, plan: BatchPlan) -> dict[str, BatchPlan]:
        """Return the members of a plan by their origin: "production", and "simulated" if it has such."""
        found = dict[str, list[Member]]()
        for one in plan.members:
            found.setdefault(SOURCE if self.windows.is_episode(one.group_id) else SIMULATED, []).append(one)
        return {name: msgspec.structs.replace(plan, members=tuple(some)) for name, some in sorted(found.items())}

    def _lr_share(self) -> float:
        """Return the factor of the run's scheduled rate that makes the rate of the next step: constant after a warm-up
        that begins with the deployed version, or at the end of RL where no releases are made."""
        learner, num_steps, base = (
            self.config.learner,
            self.config.rl.steps,
            None if self._window is None else self._window.base,
        )
        since = max(0, self.step - (num_steps if base is None else base.step))
        warm = min(1.0, (since + 1) / learner.warmup_steps) if learner.warmup_steps else 1.0
        scheduled = rl_lr_multiplier(self.step, num_steps, warmup_steps=learner.warmup_steps)
        return self.settings.lr_share * warm / scheduled

    def _take(self, batch: BatchRef, plan: BatchPlan) -> None:
        """Record the batch, and count its rewards in the baselines, unless they were counted before."""
        parts = self._by_origin(plan)
        baselines = Baselines(self.ledger.recall(BASELINES))
        before = self.ledger.batched_groups([one.group_id for one in plan.members])
        baselines.count([reward for one, reward in _rewarded(parts[SOURCE]) if one.group_id not in before])
        if self.simulated is not None and SIMULATED in parts:
            self.simulated.take(parts[SIMULATED])
        self.ledger.batch(batch)
        self.ledger.remember(BASELINES, baselines.state)

    async def _checkpoint(self) -> None:
        await self._call("save", type(None), str(self.run / "checkpoints" / f"step-{self.step:06d}"))
        await self.storage(self.ledger.prune, oldest_restart_step(self.run))
        await self._drop_files()
        disk_gb = self.config.retention.disk_gb
        traces = traces_folder(self.run)
        keep = self._window.deployed_steps if self._window is not None else ()
        await self.storage(functools.partial(delete_oldest, self.run, self.ledger, traces, disk_gb=disk_gb, keep=keep))

    async def _drop_files(self) -> None:
        """Delete the files of rollouts that nobody needs any more."""
        names = await run_in_thread(self.windows.files.names)
        wanted = await self.storage(self.ledger.wanted_files)
        await run_in_thread(functools.partial(self.windows.files.keep_only, names, wanted))


def _rewarded(plan: BatchPlan) -> Iterator[tuple[Member, tuple[str, float]]]:
    """Yield each rewarded member with its (kind of work, reward)."""
    for one in plan.members:
        if one.reward is not None and one.summary is not None:
            yield one, (one.summary.family, one.reward.value)


def _metrics(part: BatchPlan, batch: BatchRef) -> dict[str, Any]:
    """Return the metrics of the members of one origin."""
    whole = step_metrics(part, batch)
    names = ("num_groups", "reward_mean", "no_signal_share", "lag", "token_lag", "invalid")
    return {name: whole[name] for name in names} | {"num_rollouts": sum(map(len, part.judged.values()))}


def _sampled_by(groups: Sequence[Group], window: Window | None) -> dict[str, float]:
    """Return the shares of the sampled tokens by what their version was when the window was formed: "deployed",
    "before" (deployed before it) or "other". Empty where no releases are made."""
    if window is None or window.base is None:
        return {}
    counts = Counter[str]()
    names = {one.digest: name for one, name in ((window.before, "before"), (window.base, "deployed")) if one}
    for one in (summary for group in groups for summary, _ in group.valid):
        for places, number in one.sampled_by:
            found = {names.get(one.versions[place].digest, "other") for place in places}
            counts["other" if "other" in found else "before" if "before" in found else "deployed"] += number
    total = max(1, counts.total())
    return {name: counts[name] / total for name in ("deployed", "before", "other")}
