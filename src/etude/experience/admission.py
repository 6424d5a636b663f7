"""Admission: how far the rollouts may run ahead of the learner, as pure logic without a clock.

*Lag* of a token is the learner's step when it trains on it minus the step that sampled it. Counting slots does not
bound it: batching whatever finishes first let 17 % of groups over the bound at lag 1 in a simulation. A window in
order of admission does. A step takes at least `groups_per_step` of the open groups (those that no step has taken), in
order: number n of them (counted from 0) is trained at learner step b + n // groups_per_step at the latest, where b
batches were formed before. It may start once that step − max_lag is published, on engines that are at least there.
Engines only go forward, so no token of it can be staler than the bound when its turn comes.

With `signal_groups` a step goes on taking groups, in the same order, until so many of them have a signal (dynamic
sampling, DAPO, arXiv 2503.14476): in rounds, each as large as the share of signal so far says, up to `FILL` times
`groups_per_step`. Rounds follow from the outcomes alone, so `max_lag = 0` stays deterministic; where too few groups are
open for one, more are admitted. Groups without a signal are part of the batch: recorded, counted, and consumed. With
`LittleSignal.SCALE` a step takes no more groups than ever; its learning rate is scaled instead (`packing.batch_of`).

Its turn may come late: a step waits for its slowest group. `Straggler.WAIT` waits, so batches are formed strictly by
order of admission, and `max_lag = 0` is exactly synchronous RL. `Straggler.MASK` lets a step pass over a few groups
that are not ready; they are first in line for the next step, and the spans of them that became stale are masked out
of the loss. Nothing is dropped, so slow, hard tasks are not starved unseen: `late` and `masked_share` show them.

Knows nothing of the ledger, of engines, or of what a group holds.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from etude.errors import LedgerError
from etude.records.rollout import Path
from etude.records.wire import Bools

FILL = 4
"""The most that a step takes in search of signal, in times `groups_per_step`."""

DRAWS = 4096
"""Steps that are drawn for a mean."""


class Straggler(enum.StrEnum):
    """What a step does with a group that is not ready when the others are: wait for it, or pass over it."""

    WAIT = "wait"
    MASK = "mask"


class LittleSignal(enum.StrEnum):
    """What a step does when fewer than `signal_groups` of its groups have a signal."""

    FILL = "fill"  # it takes more groups
    SCALE = "scale"  # it takes that share of the learning rate


@dataclass(frozen=True)
class Window:
    """Decides which groups may start and which the next step trains on. It keeps no state: the ledger does.

    >>> window = Window(max_lag=1, groups_per_step=2)
    >>> window.free_groups(num_open=0, batched_step=0, published_step=0)  # steps 0 and 1 may be sampled by version 0
    4
    >>> window.free_groups(num_open=2, batched_step=1, published_step=1)
    2
    >>> window.take(["g0", "g1", "g2"], ready={"g1", "g2"})  # g0 is waited for
    >>> window.take(["g0", "g1", "g2"], ready={"g0", "g1"})
    ['g0', 'g1']
    >>> picky = Window(max_lag=0, groups_per_step=2, signal_groups=2)
    >>> picky.take(["g0", "g1"], ready={"g0", "g1"}, signal={"g1"})  # half had a signal: two more will give one
    >>> picky.size(["g0", "g1"], ready={"g0", "g1"}, signal={"g1"})
    4
    """

    max_lag: int
    groups_per_step: int
    straggler: Straggler = Straggler.WAIT
    signal_groups: int = 0  # 0: a step takes `groups_per_step`, whatever they hold

    @property
    def max_open_groups(self) -> int:
        """The most groups that can be admitted and not trained at once; times the group's size, the ledger's
        capacity."""
        if not self.signal_groups:
            return (self.max_lag + 1) * self.groups_per_step
        return (
            2 * self.max_groups + self.max_lag * self.groups_per_step
        )  # two batches under way, and the window after them

    @property
    def max_groups(self) -> int:
        """The most groups that a step takes."""
        return (FILL if self.signal_groups else 1) * self.groups_per_step

    @property
    def max_late_groups(self) -> int:
        """The most groups that one step may pass over under `Straggler.MASK`."""
        return max(1, self.groups_per_step // 8) if self.straggler is Straggler.MASK else 0

    def free_groups(self, num_open: int, batched_step: int, published_step: int, size: int = 0) -> int:
        """How many more groups may start, when `num_open` are open, the batch of `batched_step` was formed last, and
        `published_step` is the newest version. `size`: how many groups the step that is being formed now needs in all,
        where it takes a further round (see `Window.size`); 0 where none is being formed."""
        ahead = (published_step - batched_step + self.max_lag + 1) * self.groups_per_step
        return max(0, max(ahead, size if size > self.groups_per_step else 0) - num_open)

    def min_step(self, num_open: int, batched_step: int, published_step: int) -> int:
        """The version step that engines must at least have for a group that starts behind `num_open` open ones:
        `RolloutSpec.min_step`."""
        return max(0, min(published_step, self.required_step(num_open, batched_step)))

    def required_step(self, place: int, batched_step: int, size: int = 0) -> int:
        """The version step that must be published before the open group in this place, counted from 0, may start.
        `size`: what the step that is being formed takes, as far as is known."""
        steps_ahead = 0 if place < size else place // self.groups_per_step
        return batched_step + steps_ahead - self.max_lag

    def take(self, order: Sequence[str], ready: Collection[str], signal: Collection[str] = ()) -> list[str] | None:
        """The groups of the next step, or None while one of them is waited for. `order`: every group that no step
        has taken, in order of admission (`Ledger.open_groups`); `signal`: those of `ready` whose rewards differ."""
        size = self.size(order, ready, signal)
        found = self._first(order, ready, size)
        return found if len(found) >= size else None

    def size(self, order: Sequence[str], ready: Collection[str], signal: Collection[str] = ()) -> int:
        """How many groups the next step takes, as known from those that are ready; it may grow as more become ready."""
        size = self.groups_per_step
        while size < self.max_groups:
            found = self._first(order, ready, size)
            having = sum(group in signal for group in found)
            if len(found) < size or having >= self.signal_groups:
                break
            more = math.ceil((self.signal_groups - having) * size / having) if having else size
            size = min(self.max_groups, size + more)
        return size

    def mean_size(self, signal_share: float) -> float:
        """How many groups a step takes on average, where each group has a signal with this chance.

        The mean of `DRAWS` steps that are drawn by these rules, always the same ones.

        >>> Window(max_lag=1, groups_per_step=8).mean_size(0.5)
        8.0
        >>> picky = Window(max_lag=1, groups_per_step=8, signal_groups=8)
        >>> [round(picky.mean_size(share)) for share in (1.0, 0.5, 0.0)]
        [8, 20, 32]
        """
        rng = np.random.default_rng(0)
        size = np.full(DRAWS, self.groups_per_step)
        having = rng.binomial(size, signal_share)
        while (short := (having < self.signal_groups) & (size < self.max_groups)).any():
            lacking = -(-(self.signal_groups - having) * size // np.maximum(having, 1))
            more = np.where(short, np.minimum(np.where(having > 0, lacking, size), self.max_groups - size), 0)
            having, size = having + rng.binomial(more, signal_share), size + more
        return float(size.mean())

    def _first(self, order: Sequence[str], ready: Collection[str], size: int) -> list[str]:
        return [group for group in order[: size + self.max_late_groups] if group in ready][:size]

    def late(self, order: Sequence[str], taken: Sequence[str]) -> list[str]:
        """The groups that `take` passed over: admitted before its last one and not in it."""
        reach = order.index(taken[-1]) if taken else 0
        return [group for group in order[:reach] if group not in set(taken)]


def mask_path(path: Path, keep: Bools) -> Path:
    """The path with loss only where `keep` ([T] bool) is True. Its tokens stay; logprobs outside the mask become 0.0,
    as `Path` requires."""
    mask = path.mask & keep
    logprobs = np.where(mask, path.logprobs, np.float32(0)).astype(np.float32)
    return msgspec.structs.replace(path, mask=mask, logprobs=logprobs)


def mask_stale(path: Path, *, learner_step: int, max_lag: int, straggler: Straggler) -> Path:
    """The path with loss only on tokens within the bound: neither the token nor a key that it attended to is older than
    `learner_step - max_lag`. Under WAIT an older token is a defect of the window and raises `LedgerError`."""
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
    return mask_path(path, ~stale)
