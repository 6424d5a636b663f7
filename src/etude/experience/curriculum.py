"""The curriculum: draws tasks more often from families whose groups have a strong signal for few sampled tokens.

A group whose rollouts all have advantage 0 changes no weight, and costs as much as any other. The *strength* of a
family is the mean squared advantage of the rollouts of its recent groups. For rewards of 0 and 1 it is close to
p (1 − p), where p is the solve rate. A task is accepted with a probability that is proportional to strength / sampled
tokens per rollout of its family, and is 1 for the family with the highest quotient. The probability is never below
`FLOOR`, so that families which became solvable are noticed. If tasks repeat (a source of at most `MAX_TASKS` tasks),
each task has its own quotient, which starts at that of its family. Counts decay with `MEMORY`, since the policy changes
which tasks are hard.

Only groups of earlier steps decide, never the rewards of the drawn group. So the expected gradient of each drawn task
is that of its mean reward. The mix of tasks differs from the source's: training maximises a mean that is weighted by
the probabilities. The gradient is not divided by the probabilities, since this would give the rarely drawn, solved
tasks a large weight again. Of groups with two stages only the first stage counts: whether there is a second one depends
on the rewards of the first, and with a mean over all siblings such groups would look more certain than they are.

Evaluations use the source's own mix; only training tasks are chosen. The counts change with the batches in order of
admission, so synchronous RL is reproducible. This module does not depend on task sources or the ledger."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from etude.experience.groups import in_first_stage
from etude.records.summary import BatchPlan, Member

FLOOR = 0.1  # minimum probability, relative to the best family's
MEMORY = 0.9  # decay of a family's counts at each of its groups: about ten groups count
MAX_TASKS = 10_000  # larger sources are counted by family only, since the counts are stored with every step

State = Mapping[str, Mapping[str, Sequence[float]]]


class Curriculum(enum.StrEnum):
    """How training tasks are drawn from their source: the setting `experience.curriculum`.

    SOURCE: in the order of the source. SIGNAL: more often from families whose earlier groups had a strong signal
    (different rewards) for few sampled tokens."""

    SOURCE = "source"
    SIGNAL = "signal"


class Counts(NamedTuple):
    """Decayed sums over the groups of a family or a task.

    Each group adds to `strength` its mean squared advantage, to `tokens` the mean number of sampled tokens of a
    rollout, to `with_signal` 1 if its rewards differ, and to `groups` 1."""

    strength: float = 0.0
    tokens: float = 0.0
    with_signal: float = 0.0
    groups: float = 0.0

    def after(self, strength: float, tokens: float) -> Counts:
        """Return the counts after one more group, with the old ones decayed by `MEMORY`."""
        new = Counts(strength, tokens, float(strength > 0), 1.0)
        return Counts(*(MEMORY * old + one for old, one in zip(self, new, strict=True)))


class Signals:
    """Statistics of recent groups of rollouts, by family (kind of tasks) and by task.

    For each it has the mean squared advantage of the rollouts, and the mean number of tokens that a rollout sampled.
    From these, `chance` computes the probability that a drawn task is accepted.

    >>> signals = Signals()
    >>> for _ in range(20):
    ...     signals.add("solved", strength=0.0, tokens=100)
    ...     signals.add("learning", strength=0.25, tokens=100)
    ...     signals.add("long", strength=0.25, tokens=200)
    >>> [round(signals.chance(family), 2) for family in ("learning", "long", "solved", "never seen")]
    [1.0, 0.54, 0.1, 1.0]
    >>> Signals(signals.state).chance("solved") == signals.chance("solved")
    True
    """

    def __init__(self, state: State | None = None, *, min_group_size: int = 0, by_task: bool = False) -> None:
        """Start without counts, or continue from the `state` of an earlier object.

        `min_group_size`: number of rollouts in the first stage of a group; 0: groups have one stage. `by_task`: count
        by task as well as by family."""
        state = state or {}
        self.min_group_size, self.by_task = min_group_size, by_task
        self._families, self._tasks = (
            {name: Counts(*counts) for name, counts in state.get(of, {}).items()} for of in ("families", "tasks")
        )
        self._update()

    @property
    def state(self) -> State:
        """The `Counts` of each family and of each task, as data for JSON. `Signals(state)` continues from it."""
        return {"families": dict(self._families), "tasks": dict(self._tasks)}

    def add(self, family: str, *, strength: float, tokens: float, task: str = "") -> None:
        """Add an ended group to the counts of its family and task.

        `strength`: mean squared advantage of its rollouts. `tokens`: mean number of tokens that a rollout sampled."""
        self._families[family] = self._families.get(family, Counts()).after(strength, tokens)
        if self.by_task:
            self._tasks[task] = self._tasks.get(task, Counts()).after(strength, tokens)
        self._update()

    def count(self, plan: BatchPlan, known: Container[str]) -> None:
        """Add the groups of a step's batch to the counts.

        Skipped are groups with no valid rollout, and groups in which only one of several rollouts is valid: without
        siblings its advantage is unknown. Also skipped are the group ids in `known`: they were counted before a restart
        went back to an earlier step."""
        groups, sizes = dict[str, list[Member]](), Counter[str]()
        first = in_first_stage(plan.rollout_ids, self.min_group_size)
        for member, is_first in zip(plan.members, first, strict=True):
            if member.num_context_turns:  # a further continuation of the rollout before it
                continue
            sizes[member.group_id] += is_first
            if is_first and member.summary is not None and member.reward is not None:
                groups.setdefault(member.group_id, []).append(member)
        for group_id, members in groups.items():
            summaries = [member.summary for member in members if member.summary is not None]
            if group_id not in known and not len(members) == 1 < sizes[group_id]:
                self.add(
                    summaries[0].family,
                    strength=_mean(map(_squared, members)),
                    tokens=_mean(summary.num_sampled for summary in summaries),
                    task=summaries[0].problem,
                )

    def chance(self, family: str, task: str = "") -> float:
        """Return the probability, from `FLOOR` to 1, of accepting a drawn task of this family.

        The quality of a family is the mean squared advantage of its rollouts divided by their mean number of sampled
        tokens. The probability is this quality divided by that of the best family. With `by_task`, the quality of a
        task that has had a group is computed from its own groups. So that a few groups decide little, each family is
        given one more group, with the mean squared advantage of all groups that have different rewards and the mean
        number of tokens of all groups, and each such task one average group of its family. A task of a family without
        groups is always accepted."""
        if family not in self._families or not self._best:
            return 1.0
        strength, tokens = self._expected(family)
        if (counts := self._tasks.get(task)) is not None:
            strength, tokens = counts.strength + strength, counts.tokens + tokens
        return max(FLOOR, min(1.0, strength / tokens / self._best))

    def _update(self) -> None:
        """Compute the prior of families, an average group with a signal, and the best strength / tokens of a family."""
        every = Counts(*map(math.fsum, zip(*self._families.values(), strict=True)))
        self._usual = every.strength / max(every.with_signal, 1e-9), every.tokens / max(every.groups, 1e-9)
        expected = map(self._expected, self._families)
        self._best = max((strength / tokens for strength, tokens in expected), default=0.0)

    def _expected(self, family: str) -> tuple[float, float]:
        """Return the expected strength of a group of the family, and the tokens of one of its rollouts, at least 1."""
        counts, (strength, tokens) = self._families[family], self._usual
        groups = counts.groups + 1.0
        return (counts.strength + strength) / groups, max(1.0, (counts.tokens + tokens) / groups)


def _squared(member: Member) -> float:
    return _mean(advantage * advantage for advantage in member.turn_advantages or (member.advantage,))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)
