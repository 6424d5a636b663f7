"""Measures the reward terms of each group when all its rollouts have ended. Then the group is ready for a batch.

With `experience.min_group_size` the first rollouts of a group decide whether the others run. Terms that take part in
this decision are measured as soon as the first rollouts have ended. Their values and the decision are stored in one
transaction.

All siblings are measured by the same version of a term. A value that may be known later, because a service is
unreachable, is measured again with back-off for `retry_s` seconds after the first failure, and at least once. Then the
group is used without the term. With `missing = "wait"` it waits, whatever the reason is, and is measured by the newest
settings. The terms that are measured when the whole group has ended are stored together.

| | consumes | produces | waits for | unblocked by |
| --- | --- | --- | --- | --- |
| `run` | groups whose rollouts have ended | scored groups | a grader, an unknown term | the term, its deadline |
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from etude.errors import DeadlineExceeded, LedgerError
from etude.experience import Group, Ledger
from etude.experience.transitions import State
from etude.loop.reward_settings import RewardSettings
from etude.loop.rollout_scheduler import RolloutScheduler
from etude.loop.run_in_thread import SerialExecutor
from etude.loop.run_processes import RunProcesses
from etude.records import Graded
from etude.records.summary import RolloutSummary
from etude.rewards import Composition
from etude.rewards.config import Missing, TermConfig
from etude.telemetry import Telemetry

FIRST_S, MOST_S = 1.0, 60.0
"""Seconds after which an unknown term is measured again: the first wait and the longest. The wait doubles each time."""
FINAL_S = 600.0
"""The same for terms that do not say that they may be known later, such as a judge that refuses: asking costs money."""
LOOK_S = 2.0
"""Seconds after which a group that waits looks whether the settings have changed. Then it is measured at once."""
WAIT_S = 86_400.0
"""The longest time in seconds that a group waits for an unknown term (`Missing.WAIT`). Then the run ends with an
error."""


class GroupScorer:
    """Has grader processes measure the reward terms of groups, and stores the values in the ledger.

    It also decides whether the held rollouts of a group run, if reward terms take part in this decision."""

    def __init__(
        self,
        ledger: Ledger,
        ledger_thread: SerialExecutor,
        processes: RunProcesses,
        telemetry: Telemetry,
        settings: RewardSettings,
    ) -> None:
        self.ledger, self.ledger_thread, self.processes = ledger, ledger_thread, processes
        self.telemetry, self.settings = telemetry, settings
        self.scored = dict[str, tuple[TermConfig, ...]]()  # groups that no batch has taken, with the terms they have
        self.next_step = 1  # the next step whose batch is formed
        self._begun = set[str]()  # those, and groups that are being scored
        self._reported = settings.changes
        self._more = asyncio.Event()
        ledger.grades_decide = lambda: not settings.deciding(self.next_step)[0]

    async def run(self, scheduler: RolloutScheduler) -> None:
        """Score every group whose rollouts have ended, until cancelled. Raises `PluginError` for a term that fails."""
        ended = await self.ledger_thread(lambda: self.ledger.ended_groups(self.ledger.open_groups()))
        async with asyncio.TaskGroup() as tasks:
            while True:
                for group_id in sorted(ended):
                    tasks.create_task(self._score(group_id, scheduler), name=f"terms of {group_id}")
                ended = await scheduler.progress()

    async def progress(self) -> None:
        """Wait until a further group is scored. The wait has no deadline of its own, since every rollout and every term
        has one."""
        await self._more.wait()
        self._more.clear()

    def begin(self, step: int) -> None:
        """Start, or start again after a restart, with the batch of `step`: every ended group is scored once more."""
        self.next_step = step
        self.scored.clear()
        self._begun.clear()

    def taken(self, group_ids: Sequence[str], step: int) -> None:
        """Forget the groups that the batch of `step` took."""
        self.next_step = step + 1
        for group_id in group_ids:
            del self.scored[group_id]
        self._begun.difference_update(group_ids)

    async def _score(self, group_id: str, scheduler: RolloutScheduler) -> None:
        if group_id in self._begun:
            return
        self._begun.add(group_id)
        if await self.decide(group_id):
            self._begun.discard(group_id)  # it is scored when its later rollouts have ended
            scheduler.wake()
            return
        await self.measure(group_id, self.settings.measured(self.next_step))
        self._more.set()

    async def decide(self, group_id: str) -> bool:
        """Decide whether the held rollouts of a group run, and return it. The other rollouts must have ended.

        Measures the terms that take part in the decision. Waits for unknown values, and raises, as `measure` does. If a
        stored rollout of the group cannot be read, the held ones run."""
        rows = await self.ledger_thread(self.ledger.group_rows, group_id)
        if all(row.state is not State.HELD for row in rows):
            return False
        terms, _ = self.settings.deciding(self.next_step)
        try:
            graded, changed = await self._measured(group_id, terms)
        except LedgerError:
            graded, changed = [], {}
        _, composition = self.settings.deciding(self.next_step)
        rewards = [one.value for one in composition.rewards([one.terms for one in graded])]
        return await self.ledger_thread(self.ledger.decide, group_id, changed, rewards)

    async def complete(self, group_ids: Sequence[str], step: int) -> None:
        """Measure the reward terms of `step` that scored groups do not have yet, before `step` trains on the groups.

        Terms are missing if the settings changed after a group was scored. Raises `PluginError` if a term fails."""
        self.settings.refresh()
        if (now := self.settings.changes) is not self._reported:
            self.telemetry.event("rewards.changed", step=step, from_steps=[one.from_step for one in now])
            self._reported = now
        terms = self.settings.at(step).terms
        lacking = [one for one in group_ids if not set(terms) <= set(self.scored[one])]
        await asyncio.gather(*(self.measure(group_id, terms) for group_id in lacking))

    async def measure(self, group_id: str, terms: tuple[TermConfig, ...]) -> None:
        """Measure the values of `terms` that the rollouts of a group lack, and store them.

        An unknown value is measured again for `retry_s` seconds, with `missing = "wait"` until it is known. Raises
        `PluginError` if a term fails, and `DeadlineExceeded` if a value is still unknown after `WAIT_S` seconds."""
        try:
            if terms and (changed := (await self._measured(group_id, terms))[1]):
                await self.ledger_thread(self.ledger.add_terms, changed)
            self.scored[group_id] = terms
        except LedgerError:  # a stored rollout cannot be read: forming the batch reports it
            self.scored[group_id] = ()

    async def _measured(
        self, group_id: str, terms: tuple[TermConfig, ...]
    ) -> tuple[list[Graded], dict[str, tuple[Graded, float]]]:
        """Return the outcomes of the valid rollouts of a group with these terms, and the changed ones for
        `Ledger.add_terms`."""
        group: Group = await self.ledger_thread(self.ledger.group, group_id)
        summaries, had = [one for one, _ in group.valid], [one for _, one in group.valid]
        if not had or not terms:
            return had, {}
        clock = asyncio.get_running_loop().time
        graded, pause_s, said = had, FIRST_S, dict[str, str]()
        failed_at: float | None = None
        while True:
            found = await self.processes.measure(terms, summaries, graded)
            graded = [one.with_terms(*(new.term for new in some)) for one, some in zip(graded, found, strict=True)]
            failed_at = clock() if failed_at is None else failed_at
            waited_s = clock() - failed_at
            retried = {one.term.name for some in found for one in some if one.retry}
            held, hurried = self._to_retry(group_id, terms, retried, graded, waited_s)
            if not held and not hurried:
                break
            if said != (said := self._reasons([*held, *hurried], summaries, graded)):
                self._log("waiting", group_id, [*held, *hurried], said, waited_s, held)
            await self._pause(pause_s if retried else FINAL_S)
            pause_s = min(2 * pause_s, MOST_S)
            newest = {one.name: one for one in self.settings.at(self.next_step + 1).terms if one.name in held}
            terms = tuple(newest.get(one.name, one) for one in terms)
        composition = self.settings.composition(self.next_step)
        unknown = [one.name for one in terms if any(composition.why_unknown(got, one.name) for got in graded)]
        if unknown:
            self._log("without", group_id, unknown, self._reasons(unknown, summaries, graded), waited_s)
        elif said:
            self._log("known", group_id, [], {}, waited_s)
        return graded, {
            summary.rollout_id: (new, composition.of(new).value)
            for summary, old, new in zip(summaries, had, graded, strict=True)
            if new != old
        }

    async def _pause(self, seconds: float) -> None:
        """Wait before terms are measured again: so many seconds, or until the settings change."""
        clock, seen = asyncio.get_running_loop().time, self.settings.changes
        until = clock() + seconds
        while self.settings.changes is seen and (left_s := until - clock()) > 0:
            await asyncio.sleep(min(left_s, LOOK_S))
            self.settings.refresh()

    def _to_retry(
        self,
        group_id: str,
        terms: Sequence[TermConfig],
        retried: Collection[str],
        graded: Sequence[Graded],
        waited_s: float,
    ) -> tuple[list[str], list[str]]:
        """Return the names of unknown terms to measure again: those that hold the group, and those that delay it.

        `retried`: names of terms that may be known later. Raises `DeadlineExceeded` after `WAIT_S`."""
        self.settings.refresh()  # a user may let a group go on without the term that it waits for
        now = {one.name: one for one in self.settings.measured(self.next_step)}
        composition, names = self.settings.composition(self.next_step), [one.name for one in terms if one.name in now]
        held = [name for name in names if _patient(now[name]) and _waits_for(name, graded, composition) in names]
        if held and waited_s > WAIT_S:
            why = next(filter(None, (composition.why_unknown(one, held[0]) for one in graded)))
            raise DeadlineExceeded(
                f"reward term {held[0]!r} of group {group_id} is unknown",
                f"waited {waited_s:.0f} s: {why}",
                hint=f"repair the term, or give etude rewards set RUN {held[0]}.missing=without; then resume",
            )
        return held, [name for name in names if name in {*retried} - {*held} and waited_s < now[name].retry_s]

    def _reasons(
        self, names: Sequence[str], summaries: Sequence[RolloutSummary], graded: Sequence[Graded]
    ) -> dict[str, str]:
        """Return why terms are unknown, by rollout and name."""
        composition = self.settings.composition(self.next_step)
        return {
            f"{summary.rollout_id} {name}": why
            for summary, one in zip(summaries, graded, strict=True)
            for name in names
            if (why := composition.why_unknown(one, name))
        }

    def _log(
        self,
        state: str,
        group_id: str,
        names: Sequence[str],
        reasons: Mapping[str, str],
        waited_s: float,
        held: Sequence[str] = (),
    ) -> None:
        """Report the terms that a group waits for, that it goes without, or that became known.

        `held`: those of them without which the group does not go on (`Missing.WAIT`)."""
        self.telemetry.event(
            "rewards.unknown",
            group_id=group_id,
            state=state,
            terms=list(names),
            held=list(held),
            reasons=dict(list(reasons.items())[:3]),
            waited_s=round(waited_s, 3),
        )


def _waits_for(name: str, graded: Sequence[Graded], composition: Composition) -> str:
    """Return which term must become known so that the term `name` is known for all rollouts: itself, or a gate.

    Returns "" if it is known, or its gate is closed, for all of them."""
    gates = [name]
    while gates[-1] in composition.when:
        gates.append(composition.when[gates[-1]])
    for one in graded:
        if composition.why_unknown(one, name):
            return next((gate for gate in reversed(gates) if one.values.get(gate) is None), name)
    return ""


def _patient(term: TermConfig) -> bool:
    """Whether groups wait for a term. They do not wait for one that is only measured."""
    return term.missing is Missing.WAIT and bool(term.weight or term.hints)
