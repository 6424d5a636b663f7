"""One line of the ledger as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from etude.experience.transitions import State


@dataclass(frozen=True)
class Row:
    """What the ledger says of one rollout."""

    rollout_id: str
    group_id: str
    state: State
    attempt: int
    reason: str
    reward: float | None  # composed from the terms as it ended, without a KL penalty; None until graded
    boundary: str | None  # None unless invalid
    batch_id: str | None  # None until a batch took its group
    step: int | None  # the version step that batch produces
    has_sample: bool | None  # None until batched
    version: str | None  # None until trained, or when a restart found it in the lineage


COLUMNS = "rollout_id, group_id, state, attempt, reason, reward, boundary, batch_id, step, has_sample, version"


def as_row(values: tuple[Any, ...]) -> Row:
    """A row of `SELECT COLUMNS`."""
    rollout_id, group_id, state, attempt, reason, reward, boundary, batch_id, step, has_sample, version = values
    return Row(
        rollout_id=rollout_id,
        group_id=group_id,
        state=State(state),
        attempt=attempt,
        reason=reason,
        reward=reward,
        boundary=boundary,
        batch_id=batch_id,
        step=step,
        has_sample=None if has_sample is None else bool(has_sample),
        version=version,
    )
