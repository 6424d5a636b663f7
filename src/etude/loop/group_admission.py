"""Draws training tasks from the run's source, and admits a group of rollouts for each to the ledger.

The groups of one call and the task cursor are one transaction, so a process that is killed skips no task and takes none
twice. The curriculum decides which of the drawn tasks are used; its statistics are in the ledger, too."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Sequence

from etude.errors import TaskError
from etude.experience import Ledger
from etude.experience.curriculum import MAX_TASKS, Curriculum, Signals
from etude.experience.groups import in_first_stage
from etude.loop.config import RunConfig
from etude.loop.rollout_scheduler import keyed_seed, siblings
from etude.loop.run_in_thread import SerialExecutor
from etude.records import RolloutSpec, Task
from etude.records.summary import BatchPlan
from etude.records.task import Split
from etude.seams import TaskSource, WithdrawingSource

SIGNALS = "curriculum"  # in the ledger: `Signals.state`
WITHDRAWN = "its task was withdrawn"
WITHDRAWN_S = 20.0
"""Seconds in which a task source must say which tasks are withdrawn. Others wait 30 s for the lock that is held."""


class GroupAdmission:
    """Admits groups of rollouts of training tasks. `admit` calls the ledger in `ledger_thread`; the constructor and
    `count` call it in the caller's thread."""

    def __init__(self, ledger: Ledger, ledger_thread: SerialExecutor, source: TaskSource, config: RunConfig) -> None:
        self.ledger, self.ledger_thread, self.source, self.config = ledger, ledger_thread, source, config
        size = source.size(Split.TRAIN)  # asked here: in the ledger's thread a plug-in would be asked by two at once
        self._counts_tasks = size is not None and size <= MAX_TASKS
        self.signals = self._recalled_signals()

    async def admit(self, min_steps: Sequence[int]) -> None:
        """Admit a group for each of the next tasks that the curriculum accepts.

        `min_steps`: for each of them, the step of the oldest weights that may sample its rollouts."""
        first = await self.ledger_thread(self.ledger.num_groups)
        specs, cursor = list[RolloutSpec](), await self.ledger_thread(self.ledger.cursor, Split.TRAIN)
        for number, min_step in enumerate(min_steps, first):
            task, cursor = self._next_task(cursor)
            specs += siblings(
                f"g{number:06d}",
                task,
                self.config.experience.group_size,
                seed=self.config.seed,
                temperature=self.config.rl.temperature,
                min_step=min_step,
                keep_routes=self.config.wants_routes,
                forks=self.config.harness.forks,
            )
            await asyncio.sleep(0)
        await self.ledger_thread(self.ledger.transaction, functools.partial(self._store, specs, cursor))

    def _next_task(self, cursor: int) -> tuple[Task, int]:
        """The next training task that the curriculum accepts, and the task cursor after it."""
        num_tasks = self.source.size(Split.TRAIN)
        while True:
            task = self.source.task(Split.TRAIN, cursor if num_tasks is None else cursor % num_tasks)
            cursor += 1
            draw = keyed_seed(self.config.seed, "curriculum", cursor) / 2**63
            if draw < self.signals.chance(task.family, task.problem or task.task_id):
                return task, cursor

    def _store(self, specs: list[RolloutSpec], cursor: int) -> None:
        first = in_first_stage(ids := [spec.rollout_id for spec in specs], self.config.experience.min_group_size)
        self.ledger.admit(*specs, held={i for i, runs in zip(ids, first, strict=True) if not runs})
        self.ledger.move_cursor(Split.TRAIN, cursor)

    def count(self, plan: BatchPlan) -> None:
        """Count a batch's groups for the curriculum. Call it in the transaction of the batch, before `Ledger.batch`."""
        signals = self._recalled_signals()  # read anew: the transaction may be repeated
        if self.config.experience.curriculum is Curriculum.SIGNAL:
            signals.count(plan, self.ledger.batched_groups(plan.judged))
        self.ledger.remember(SIGNALS, signals.state)
        self.signals = signals

    def _recalled_signals(self) -> Signals:
        size = self.config.experience.min_group_size
        return Signals(self.ledger.recall(SIGNALS), min_group_size=size, by_task=self._counts_tasks)

    async def withdrawn(self, task_ids: Collection[str]) -> set[str]:
        """Return the ids of those tasks that the source has withdrawn since their rollouts began.

        Raises `TaskError` if the source does not answer within `WITHDRAWN_S`: production asks with the lock of the
        privacy folder held."""
        if not isinstance(self.source, WithdrawingSource):
            return set()
        try:
            async with asyncio.timeout(WITHDRAWN_S):
                return await asyncio.to_thread(self.source.withdrawn, task_ids)
        except TimeoutError:
            raise TaskError(
                "the task source does not say which tasks are withdrawn",
                f"`withdrawn` of {type(self.source).__name__} has not returned within {WITHDRAWN_S:g} s",
                hint="give what it waits for a shorter deadline",
            ) from None
