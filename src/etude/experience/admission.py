"""Admission: how far the rollouts may run ahead of the learner, as pure logic without a clock.

*Lag* of a token is the learner's step when it trains on it minus the step that sampled it. Counting slots does not
bound it: batching whatever finishes first let 17 % of groups over the bound at lag 1 in a simulation. A window in
order of admission does. Group number n (counted from 0) belongs to the learner's step n // groups_per_step; it may
start once step n // groups_per_step − max_lag is published, on engines that are at least there. Engines only go
forward, so no token of it can be staler than the bound when its turn comes.

Its turn may come late: a step waits for its slowest group. `Straggler.WAIT` waits, so batches are formed strictly by
order of admission, and `max_lag = 0` is exactly synchronous RL. `Straggler.MASK` lets a step pass over a few groups
that are not ready; they are first in line for the next step, and the spans of them that became stale are masked out
of the loss. Nothing is dropped, so slow, hard tasks are not starved unseen: `late` and `masked_share` show them.

Knows nothing of the ledger, of engines, or of what a group holds.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from etude.errors import LedgerError
from etude.records.rollout import Path
from etude.records.wire import Bools


class Straggler(enum.StrEnum):
    """What a step does about a group that is not ready when the others are."""

    WAIT = "wait"
    MASK = "mask"


@dataclass(frozen=True)
class Window:
    """Who may start, and who is trained next. It has no state: the ledger has.

    >>> window = Window(max_lag=1, groups_per_step=2)
    >>> window.room(num_admitted=0, published_step=0)  # steps 0 and 1 may be sampled by version 0
    4
    >>> window.room(num_admitted=4, published_step=1)
    2
    >>> window.take(["g0", "g1", "g2"], ready={"g1", "g2"})  # g0 is waited for
    >>> window.take(["g0", "g1", "g2"], ready={"g0", "g1"})
    ['g0', 'g1']
    """

    max_lag: int
    groups_per_step: int
    straggler: Straggler = Straggler.WAIT

    @property
    def num_groups(self) -> int:
        """The most groups that are admitted and not trained; times the group's size it is the ledger's capacity."""
        return (self.max_lag + 1) * self.groups_per_step

    @property
    def late_groups(self) -> int:
        """The most groups that one step may pass over."""
        return max(1, self.groups_per_step // 8) if self.straggler is Straggler.MASK else 0

    def room(self, num_admitted: int, published_step: int) -> int:
        """How many more groups may start, when `num_admitted` ever were and `published_step` is the newest version."""
        return max(0, (published_step + self.max_lag + 1) * self.groups_per_step - num_admitted)

    def min_step(self, index: int) -> int:
        """The version step that engines must at least have for group number `index`: `RolloutSpec.min_step`."""
        return max(0, index // self.groups_per_step - self.max_lag)

    def take(self, order: Sequence[str], ready: Collection[str]) -> list[str] | None:
        """The groups of the next step, or None while one of them is waited for. `order`: every group that no step
        has taken, in order of admission (`Ledger.open_groups`)."""
        found = [group for group in order[: self.groups_per_step + self.late_groups] if group in ready]
        return found[: self.groups_per_step] if len(found) >= self.groups_per_step else None

    def late(self, order: Sequence[str], taken: Sequence[str]) -> list[str]:
        """The groups that `take` passed over: admitted before its last one and not in it."""
        reach = order.index(taken[-1]) if taken else 0
        return [group for group in order[:reach] if group not in set(taken)]


def masked(path: Path, keep: Bools) -> Path:
    """The path with loss only where `keep` [T] is True; what it saw stays whole. Logprobs follow the mask, as `Path`
    promises."""
    mask = path.mask & keep
    logprobs = np.where(mask, path.logprobs, np.float32(0)).astype(np.float32)
    return msgspec.structs.replace(path, mask=mask, logprobs=logprobs)


def bounded(path: Path, *, learner_step: int, max_lag: int, straggler: Straggler) -> Path:
    """The path with no token staler than the bound, the keys it attended to included. Under WAIT a staler one is a
    defect and a `LedgerError`."""
    stale = path.mask & (learner_step - path.oldest_steps > max_lag)
    if not stale.any():
        return path
    if straggler is Straggler.WAIT:
        oldest = int(path.oldest_steps[path.mask].min())
        raise LedgerError(
            f"a token of step {oldest} would be trained at step {learner_step}",
            f"the bound is {max_lag}",
            hint="the window did not hold: keep the run folder and report it, or set straggler = 'mask'",
        )
    return masked(path, ~stale)
