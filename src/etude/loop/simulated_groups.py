"""Simulated rollouts in production steps: tasks of the run's source, rolled out by the run's engines.

A step of `etude learn` with `simulated` in its settings waits until the groups of its share are complete, and trains on
them together with its episodes. The groups are admitted to the run's ledger as in RL: with ids, task cursor,
curriculum, graders and reward terms of the run. They require the version that the learner has now, so their tokens have
lag 0, except after a restart. Groups that were admitted earlier and not trained on, because a process was killed or a
step was undone, are used first.

Rollouts run only while a step waits for them: engines and workers are idle while the learner trains.

| | consumes | produces | waits for | unblocked by |
| --- | --- | --- | --- | --- |
| `ready` | tasks | complete groups | a rollout, at most `simulated_wait_s` seconds for one | `RolloutScheduler.run` |
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from etude.config import Plugin
from etude.errors import DeadlineExceeded, EngineError
from etude.experience import SCHEMES, Group, plan_batch
from etude.experience.admission import Straggler
from etude.experience.transitions import ENDED, State
from etude.loop.config import check_forms_pairs, open_tasks
from etude.loop.error_groups import first_cause
from etude.loop.group_admission import GroupAdmission
from etude.loop.group_scoring import GroupScorer
from etude.loop.production_windows import Windows
from etude.loop.reward_settings import RewardSettings
from etude.loop.rollout_scheduler import RolloutScheduler
from etude.loop.run_processes import RunProcesses
from etude.numerics.config import Mode
from etude.plugins import Kind, make
from etude.records import Version
from etude.records.summary import BatchPlan
from etude.telemetry import Telemetry

NOT_NEEDED = "no step waits for it now"


class SimulatedGroups:
    """Admits, rolls out and scores the groups of simulated rollouts for production steps.

    Raises `TaskError` if the run's task source cannot be opened."""

    def __init__(self, windows: Windows, telemetry: Telemetry, processes: RunProcesses) -> None:
        self.windows, self.processes = windows, processes
        self.config, self.settings = windows.config, windows.settings
        ledger, storage = windows.ledger, windows.storage
        credit = self.config.experience.credit
        self._scheme = make(Kind.CREDIT, credit) if isinstance(credit, Plugin) else SCHEMES[credit]
        check_forms_pairs(self.config.learner, self._scheme)
        self._rewards = RewardSettings(windows.run, self.config)
        self._scheduler = RolloutScheduler(ledger, storage, processes, telemetry)
        self._scheduler.required_step = lambda _: 0  # the version of a step that a restart undid may not exist any more
        self._scorer = GroupScorer(ledger, storage, processes, telemetry, self._rewards)
        self._admission = GroupAdmission(ledger, storage, open_tasks(self.config), self.config)

    async def begin(self, version: Version, learner_class: str) -> None:
        """Have the engines serve this version, which the learner has published.

        `learner_class`: its parity class. Waits for the first engine of a run that has only remote ones."""
        if self.config.numerics.mode is Mode.EXACT:
            self.processes.require_parity(learner_class)
        self._published(version)
        await self.processes.wait_for_adoption(version)
        await self.processes.wait_for_engine()

    def _published(self, version: Version) -> None:
        self.processes.set_head(version)
        self._scheduler.published = version.step

    async def ready(self, num_episodes: int, version: Version) -> list[str]:
        """Admit and roll out the groups for the step after `version`, wait for their rewards, and return their ids.

        `num_episodes`: the number of the step's episodes, from which the number of groups follows. Raises
        `DeadlineExceeded` if no rollout has ended for `simulated_wait_s` seconds, and the error of a task source, an
        agent program or a reward term that fails."""
        self._published(version)
        number = self.settings.simulated_groups(num_episodes, self.config.experience.group_size)
        found = await self._open()
        if len(found) < number:
            await self._admission.admit([version.step] * (number - len(found)))
            found = await self._open()
        wanted = found[:number]
        self._rewards.refresh()
        await self.windows.storage(self._rewards.recall, self.windows.ledger, version.step + 1)
        self._scorer.begin(version.step + 1)
        await self._roll_out(wanted, version.step + 1)
        await self._score(wanted, version.step + 1)
        return wanted

    async def _open(self) -> list[str]:
        """Return the groups of tasks that no batch has taken, in order of admission."""
        found = await self.windows.storage(self.windows.ledger.open_groups)
        return [one for one in found if not self.windows.is_episode(one)]

    async def _roll_out(self, wanted: Sequence[str], step: int) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                rolling = tasks.create_task(self._scheduler.run(asyncio.Event()), name="rolling")
                await self._ended(wanted, step)
                rolling.cancel()
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        await self.windows.storage(self._requeue)

    async def _ended(self, wanted: Sequence[str], step: int) -> None:
        """Wait until all rollouts of these groups have ended."""
        late, before = False, list[str]()
        while left := await self._undone(wanted):
            if late and left == before:
                raise await self._overdue(left, step)
            late, before = False, left
            try:
                async with asyncio.timeout(self.settings.simulated_wait_s):
                    await self._scheduler.progress()
            except TimeoutError:
                late = True

    async def _undone(self, wanted: Sequence[str]) -> list[str]:
        """Return the rollouts of these groups that have not ended, after decisions about held ones."""
        ended = await self.windows.storage(self.windows.ledger.ended_groups, wanted)
        if any(await asyncio.gather(*map(self._scorer.decide, sorted(ended)))):
            self._scheduler.wake()
        return await self.windows.storage(self._left, frozenset(wanted))

    def _left(self, wanted: frozenset[str]) -> list[str]:
        rows = self.windows.ledger.rows(states=[*set(State) - ENDED], open_only=True)
        return [row.rollout_id for row in rows if row.group_id in wanted]

    def _requeue(self) -> None:
        """Set rollouts back that were cancelled while they ran: of groups that this step does not need."""
        ledger = self.windows.ledger

        def work() -> None:
            for row in ledger.rows(states=[State.RUNNING]):
                ledger.move(row.rollout_id, State.REQUEUED, reason=NOT_NEEDED)

        ledger.transaction(work)

    async def _overdue(self, left: Sequence[str], step: int) -> DeadlineExceeded:
        engines = list[str]()
        for name, engine in self.processes.engines.items():
            try:
                engines.append(f"{name} serves {(await engine.info(deadline_s=3.0)).version}")
            except (EngineError, TimeoutError, DeadlineExceeded):
                engines.append(f"{name} does not answer")
        return DeadlineExceeded(
            f"no simulated rollout has ended for {self.settings.simulated_wait_s:g} s",
            f"step {step} waits for {len(left)} of them; {', '.join(engines) or 'no engine is up'}",
            hint="see logs/worker-0.log and logs/engine-0.log of the run; if rollouts take longer raise "
            "simulated_wait_s; simulated = 0 trains on production alone",
        )

    async def _score(self, wanted: Sequence[str], step: int) -> None:
        """Have the reward terms of `step` measured."""
        self._rewards.refresh()
        terms = self._rewards.at(step).terms
        try:
            async with asyncio.TaskGroup() as tasks:
                for group_id in wanted:
                    tasks.create_task(self._scorer.measure(group_id, terms), name=f"measure {group_id}")
        except BaseExceptionGroup as group:
            raise first_cause(group) from None

    async def withdrawn(self, rollout_ids: Sequence[str]) -> list[str]:
        """Return the ids of those rollouts whose tasks the source has withdrawn."""
        found = [await self.windows.storage(self.windows.ledger.finished, one) for one in rollout_ids]
        tasks = {one.rollout_id: one.summary.task_id for one in found if one is not None and one.summary is not None}
        gone = await self._admission.withdrawn(set(tasks.values()))
        return [rollout_id for rollout_id, task_id in tasks.items() if task_id in gone]

    def plan(self, groups: Sequence[Group], k1: Mapping[str, float] | None, *, batch_id: str, step: int) -> BatchPlan:
        """Plan the part of a step's batch that is these groups: rewards and advantages as in the run's RL.

        The KL penalty is that of production steps, to the deployed version."""
        return plan_batch(
            groups,
            batch_id=batch_id,
            step=step,
            max_lag=self.settings.max_lag,
            composition=replace(self._rewards.composition(step), kl=self.settings.kl),
            scheme=self._scheme,
            straggler=Straggler.MASK,
            k1=k1,
            min_group_size=self.config.experience.min_group_size,
        )

    def take(self, plan: BatchPlan) -> None:
        """Count the groups of a planned step. Call it in the transaction of the batch, before `Ledger.batch`."""
        self._admission.count(plan)
        self._rewards.tuned = self._rewards.remember(self.windows.ledger, plan)
