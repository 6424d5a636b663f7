"""Chooses training tasks: families whose groups still give a signal are drawn more often, solved and hopeless ones
seldom.

A group whose members all got the same reward changes no weight, and costs as much as any other. Late in training most
groups are of that kind, while one family of tasks may still be half solved. So each family keeps the share of its
recent groups that had a signal, and a drawn task is passed over with a probability that grows as its family's share
falls behind the best family's. No probability falls under `FLOOR`, so that a family that was learned is still watched,
and one that became possible is noticed. Counts fade with `MEMORY`, since what is hard changes with the policy.

The source's own mix is what evaluations use; only training tasks are chosen. Pure but for its counts, which move with
the batches in order of admission, so synchronous RL repeats. Knows nothing of task sources and of the ledger.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping

from etude.records.summary import BatchPlan

FLOOR = 0.1  # of the best family's probability
MEMORY = 0.9  # of a family's counts, at each new group of it: about ten groups are remembered


class Curriculum(enum.StrEnum):
    """How training tasks are drawn from their source: `experience.curriculum` of a config."""

    SOURCE = "source"  # as they come
    SIGNAL = "signal"  # families by the share of their groups that had a signal


class Signals:
    """The share of recent groups with a signal, by family of tasks.

    >>> signals = Signals()
    >>> for _ in range(20):
    ...     signals.add("solved", signal=False)
    ...     signals.add("learning", signal=True)
    >>> round(signals.chance("learning"), 2), round(signals.chance("solved"), 2), signals.chance("never seen")
    (1.0, 0.1, 1.0)
    >>> Signals(signals.counts).chance("solved") == signals.chance("solved")
    True
    """

    def __init__(self, counts: Mapping[str, tuple[float, float]] | None = None) -> None:
        """`counts`: the `counts` of an earlier object, to continue from."""
        self._counts = {family: (float(s), float(n)) for family, (s, n) in (counts or {}).items()}

    @property
    def counts(self) -> dict[str, tuple[float, float]]:
        """(groups with a signal, groups) by family, both faded. Plain data."""
        return dict(self._counts)

    def add(self, family: str, *, signal: bool) -> None:
        """Count one more ended group of a family. `signal`: whether its members' rewards differed."""
        with_signal, seen = self._counts.get(family, (0.0, 0.0))
        self._counts[family] = (MEMORY * with_signal + signal, MEMORY * seen + 1.0)

    def count(self, plan: BatchPlan, known: Container[str]) -> None:
        """Count the groups of a step, except those without a valid member and those whose id is in `known`: they were
        counted when a lineage that is lost now trained on them."""
        for group_id, judged in plan.judged.items():
            if judged and group_id not in known:
                self.add(judged[0][0].family, signal=len({reward.raw for _, reward in judged}) > 1)

    def chance(self, family: str) -> float:
        """The probability, in [0.1, 1], with which a drawn task of this family is taken: its share of groups with a
        signal over the best family's share. Every family starts with one group with a signal, so a task of an unknown
        family is always taken."""
        best = max((_share(counts) for counts in self._counts.values()), default=1.0)
        return max(FLOOR, min(1.0, _share(self._counts.get(family, (0.0, 0.0))) / best))


def _share(counts: tuple[float, float]) -> float:
    with_signal, seen = counts
    return (with_signal + 1.0) / (seen + 1.0)
