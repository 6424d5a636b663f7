"""The curriculum: draws tasks more often from families whose groups still have a signal.

A group whose members all got the same reward changes no weight, and costs as much as any other. So each family has a
share of its recent groups that had a signal, and a drawn task is skipped with a probability that grows as its family's
share falls behind the best family's. No probability of being taken is below `FLOOR`, so that families that became
solvable are noticed. Counts decay with `MEMORY`, since what is hard changes with the policy.

Evaluations use the source's own mix; only training tasks are chosen. The counts change with the batches in order of
admission, so synchronous RL is reproducible. This module knows nothing of task sources and of the ledger."""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping

from etude.records.summary import BatchPlan

FLOOR = 0.1  # minimum probability, relative to the best family's
MEMORY = 0.9  # decay of a family's counts at each of its groups: about ten groups count


class Curriculum(enum.StrEnum):
    """How training tasks are drawn from their source: the setting `experience.curriculum`.

    SOURCE: in the order of the source. SIGNAL: families by the share of their groups whose rewards differed."""

    SOURCE = "source"
    SIGNAL = "signal"


class Signals:
    """For each family of tasks, the share of recent groups with a signal (rewards that differ).

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
        """Begin without counts, or continue from the `counts` of an earlier object."""
        self._counts = {family: (float(s), float(n)) for family, (s, n) in (counts or {}).items()}

    @property
    def counts(self) -> dict[str, tuple[float, float]]:
        """(groups with a signal, all groups) by family. Older groups count less. Can be stored and given to `Signals`
        again."""
        return dict(self._counts)

    def add(self, family: str, *, signal: bool) -> None:
        """Count an ended group of a family. `signal`: whether its members' rewards differed."""
        with_signal, seen = self._counts.get(family, (0.0, 0.0))
        self._counts[family] = (MEMORY * with_signal + signal, MEMORY * seen + 1.0)

    def count(self, plan: BatchPlan, known: Container[str]) -> None:
        """Count the groups of a planned step.

        Groups without a valid member are skipped, and so are the group ids in `known`: they were counted before a
        restart went back to an earlier step."""
        for group_id, judged in plan.judged.items():
            if judged and group_id not in known:
                self.add(judged[0][0].family, signal=len({reward.raw for _, reward in judged}) > 1)

    def chance(self, family: str) -> float:
        """Return the probability, from `FLOOR` to 1, of taking a drawn task of this family.

        It is the family's share of groups with a signal over the best family's share. Every family starts as if one
        group had had a signal, so a task of an unknown family is always taken."""
        best = max((_share(counts) for counts in self._counts.values()), default=1.0)
        return max(FLOOR, min(1.0, _share(self._counts.get(family, (0.0, 0.0))) / best))


def _share(counts: tuple[float, float]) -> float:
    with_signal, seen = counts
    return (with_signal + 1.0) / (seen + 1.0)
