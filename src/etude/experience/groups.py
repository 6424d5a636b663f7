"""Plain data of the ledger: rows, finished rollouts, and the groups they belong to. Knows nothing of storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from etude.experience.transitions import State
from etude.records.rollout import Graded, Invalid
from etude.records.summary import RolloutSummary


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout and its outcome. Created by the ledger, read by credit and packing."""

    rollout_id: str
    outcome: Graded | Invalid
    summary: RolloutSummary | None = None  # None: the process that ran it died and stored nothing


@dataclass(frozen=True)
class Group:
    """The sibling rollouts of one task."""

    group_id: str
    rollout_ids: tuple[str, ...]  # all members, sorted; cancelled and quarantined ones are not in `finished`
    finished: tuple[Finished, ...]  # sorted by rollout id
    lost: frozenset[str] = frozenset()  # members with tokens sampled by a version of a lost lineage

    @property
    def valid(self) -> tuple[tuple[RolloutSummary, Graded], ...]:
        """The graded members: the only ones that may be used for a baseline."""
        return tuple(
            (one.summary, one.outcome)
            for one in self.finished
            if one.summary is not None and isinstance(one.outcome, Graded)
        )

    @property
    def invalid(self) -> tuple[Invalid, ...]:
        """The outcomes of the invalid members."""
        return tuple(one.outcome for one in self.finished if isinstance(one.outcome, Invalid))


class Row(msgspec.Struct, frozen=True):
    """The state of one rollout, as its row in the ledger (the database of all rollouts of a run)."""

    rollout_id: str
    group_id: str
    state: State
    attempt: int
    reason: str
    reward: float | None  # composed from the terms when it ended, without KL penalty; None until graded
    boundary: str | None  # None unless invalid
    batch_id: str | None  # None until a batch took its group
    step: int | None  # the version step that this batch produces
    has_sample: bool | None  # None until batched
    version: str | None  # None until trained, or when a restart found it in the lineage


_STATES = {state.value: state for state in State}  # a live run reads each row four times
COLUMNS = "rollout_id, group_id, state, attempt, reason, reward, boundary, batch_id, step, has_sample, version"


def as_row(values: tuple[Any, ...]) -> Row:
    """Create a `Row` from one result row of `SELECT {COLUMNS}`: its values, in this order."""
    rollout_id, group_id, state, attempt, reason, reward, boundary, batch_id, step, has_sample, version = values
    known = None if has_sample is None else bool(has_sample)
    return Row(rollout_id, group_id, _STATES[state], attempt, reason, reward, boundary, batch_id, step, known, version)
