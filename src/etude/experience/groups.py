"""Data records of the ledger: rows, finished rollouts, and groups of rollouts. It does not access the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from etude.experience.transitions import State
from etude.records.rollout import Graded, Invalid
from etude.records.summary import RolloutSummary


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout and its outcome, as the ledger stores it.

    `summary` is None if the process that ran the rollout died before it stored one."""

    rollout_id: str
    outcome: Graded | Invalid
    summary: RolloutSummary | None = None


@dataclass(frozen=True)
class Group:
    """The sibling rollouts of one task, from which advantages are computed.

    `rollout_ids`: all members, sorted. `finished`: the ended members, sorted by id, without those that were cancelled
    or quarantined. `lost`: ids of the members with tokens that were sampled by weights which a restart abandoned."""

    group_id: str
    rollout_ids: tuple[str, ...]
    finished: tuple[Finished, ...]
    lost: frozenset[str] = frozenset()

    @property
    def valid(self) -> tuple[tuple[RolloutSummary, Graded], ...]:
        """The (summary, outcome) of each graded member: the only members that may be used for a baseline."""
        return tuple(
            (one.summary, one.outcome)
            for one in self.finished
            if one.summary is not None and isinstance(one.outcome, Graded)
        )

    @property
    def invalid(self) -> tuple[Invalid, ...]:
        """The outcomes of the invalid members."""
        return tuple(one.outcome for one in self.finished if isinstance(one.outcome, Invalid))


def in_first_stage(rollout_ids: Sequence[str], min_group_size: int) -> list[bool]:
    """Return for each rollout of a group whether it is in the first stage: one of the first `min_group_size` siblings.

    With `min_group_size` 0 all are, since the group has one stage.

    >>> in_first_stage(["g000012.0", "g000012.10", "g000012.2"], 4), in_first_stage(["g000012.5"], 0)
    ([True, False, True], [True])
    """
    return [not min_group_size or int(i.rpartition(".")[2]) < min_group_size for i in rollout_ids]


class Row(msgspec.Struct, frozen=True):
    """The state of one rollout, as its row in the ledger (the database of all rollouts of a run).

    - `reward`: composed from the terms when the rollout ended, without KL penalty; None until graded.
    - `boundary`: the part of the system that failed; None unless the rollout is invalid.
    - `batch_id`: None until a batch took its group. `step`: the version step that this batch produces.
    - `has_sample`: whether the batch has a sample of it; None until batched.
    - `version`: the version that was trained on it; None until then, or when a restart found it already trained."""

    rollout_id: str
    group_id: str
    state: State
    attempt: int
    reason: str
    reward: float | None
    boundary: str | None
    batch_id: str | None
    step: int | None
    has_sample: bool | None
    version: str | None


_STATES = {state.value: state for state in State}  # a live run reads each row four times
COLUMNS = "rollout_id, group_id, state, attempt, reason, reward, boundary, batch_id, step, has_sample, version"


def as_row(values: tuple[Any, ...]) -> Row:
    """Create a `Row` from one result row of `SELECT {COLUMNS}`: its values, in this order."""
    rollout_id, group_id, state, attempt, reason, reward, boundary, batch_id, step, has_sample, version = values
    known = None if has_sample is None else bool(has_sample)
    return Row(rollout_id, group_id, _STATES[state], attempt, reason, reward, boundary, batch_id, step, known, version)
