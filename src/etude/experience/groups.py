"""Finished rollouts and the groups they belong to. Plain data; knows nothing of where it is stored."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from etude.records.rollout import Graded, Invalid
from etude.records.summary import RolloutSummary


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout and how it ended. Made by the ledger, read by credit and packing."""

    rollout_id: str
    outcome: Graded | Invalid
    summary: RolloutSummary | None = None  # None: the process that ran it died and left nothing


@dataclass(frozen=True)
class Group:
    """Sibling rollouts of one task."""

    group_id: str
    rollout_ids: tuple[str, ...]  # every member, sorted; those cancelled or quarantined have no entry in `finished`
    finished: tuple[Finished, ...]  # by rollout id
    lost: frozenset[str] = frozenset()  # members of which a version of a lost lineage sampled something

    @property
    def valid(self) -> tuple[tuple[RolloutSummary, Graded], ...]:
        """The members that were judged: the only ones a baseline may use."""
        return tuple(
            (one.summary, one.outcome)
            for one in self.finished
            if one.summary is not None and isinstance(one.outcome, Graded)
        )

    @property
    def invalid(self) -> tuple[Invalid, ...]:
        """The outcomes of the invalid members."""
        return tuple(one.outcome for one in self.finished if isinstance(one.outcome, Invalid))
