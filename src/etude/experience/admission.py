"""The admission window: how far rollouts may run ahead of the learner. Pure logic without a clock.

The *lag* of a token is the learner's step when it trains on the token minus the step that sampled it. A limit on the
number of rollouts in flight does not bound the lag; a window in order of admission does. A group is *open* until a step
has taken it. A step takes at least `groups_per_step` of the open groups, in order. After b batches, open group number n
(from 0) is therefore trained at learner step b + n // groups_per_step at the latest. It may start when that step −
max_lag is published, on engines that have at least that version. Engines only move to newer versions, so no token of
the group exceeds the bound when it is trained.

A group has a *signal* if the rewards of its rollouts differ. With `signal_groups`, a step takes further groups, in the
same order, until so many of them have a signal (dynamic sampling, DAPO, arXiv 2503.14476). It does so in rounds. The
size of a round follows from the share of groups with a signal so far; a step takes at most `FILL` times
`groups_per_step`. Rounds depend only on outcomes, so `max_lag = 0` stays deterministic. Groups without a signal are
part of the batch: recorded, counted and consumed. With `LittleSignal.SCALE` a step takes no further groups; its
learning rate is scaled instead (`packing.batch_of`).

A step waits for its slowest group. With `Straggler.WAIT` batches are formed strictly in order of admission, and
`max_lag = 0` is exactly synchronous RL. With `Straggler.MASK` a step may skip a few groups that are not ready. They are
first in line for the next step, and tokens of them that became stale are masked out of the loss. No group is dropped,
so slow, hard tasks are not lost unnoticed: `late` and `masked_share` report them.

This module knows nothing of the ledger, of engines, or of the content of groups."""

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
"""The maximum number of groups that a step takes in search of signal, in multiples of `groups_per_step`."""

DRAWS = 4096
"""Number of simulated steps for a mean."""


class Straggler(enum.StrEnum):
    """What a step does if a group of rollouts is not ready when the others are.

    WAIT: the step waits for it. MASK: the step skips it, and a later step trains on it without its stale tokens."""

    WAIT = "wait"
    MASK = "mask"


class LittleSignal(enum.StrEnum):
    """What a step does when fewer than `signal_groups` of its groups have a signal (rewards that differ).

    FILL: it takes more groups. SCALE: it multiplies its learning rate by the share of groups with a signal."""

    FILL = "fill"
    SCALE = "scale"


@dataclass(frozen=True)
class Window:
    """Decides which groups of rollouts may start, and which groups the next step trains on.

    It has no state of its own; the state is in the ledger. `max_lag`: the largest allowed age of a token in steps.
    `groups_per_step`: the smallest number of groups of a step. `signal_groups`: the wanted number of groups with a
    signal; if there are fewer, the step takes more groups. 0: it always takes `groups_per_step`.

    >>> window = Window(max_lag=1, groups_per_step=2)
    >>> window.free_groups(num_open=0, batched_step=0, published_step=0)  # version 0 may sample for steps 0 and 1
    4
    >>> window.free_groups(num_open=2, batched_step=1, published_step=1)
    2
    >>> window.take(["g0", "g1", "g2"], ready={"g1", "g2"})  # waits for g0
    >>> window.take(["g0", "g1", "g2"], ready={"g0", "g1"})
    ['g0', 'g1']
    >>> picky = Window(max_lag=0, groups_per_step=2, signal_groups=2)
    >>> picky.take(["g0", "g1"], ready={"g0", "g1"}, signal={"g1"})  # half have a signal: two more groups are needed
    >>> picky.size(["g0", "g1"], ready={"g0", "g1"}, signal={"g1"})
    4
    """

    max_lag: int
    groups_per_step: int
    straggler: Straggler = Straggler.WAIT
    signal_groups: int = 0

    @property
    def max_open_groups(self) -> int:
        """The maximum number of groups that are admitted and not yet trained.

        The number of slots of the ledger is this number times the group size."""
        if not self.signal_groups:
            return (self.max_lag + 1) * self.groups_per_step
        # two batches in progress, and the window after them
        return 2 * self.max_groups + self.max_lag * self.groups_per_step

    @property
    def max_groups(self) -> int:
        """The maximum number of groups that a step takes."""
        return (FILL if self.signal_groups else 1) * self.groups_per_step

    @property
    def max_late_groups(self) -> int:
        """The maximum number of groups that a step may skip under `Straggler.MASK`."""
        return max(1, self.groups_per_step // 8) if self.straggler is Straggler.MASK else 0

    def free_groups(self, num_open: int, batched_step: int, published_step: int, size: int = 0) -> int:
        """Return how many more groups of rollouts may start now.

        `num_open`: number of admitted groups that no batch has taken. `batched_step`: step of the last batch that was
        formed. `published_step`: step of the newest published weights. `size`: how many groups the batch that is being
        formed needs in all, if it takes a further round (see `Window.size`), otherwise 0."""
        ahead = (published_step - batched_step + self.max_lag + 1) * self.groups_per_step
        return max(0, max(ahead, size if size > self.groups_per_step else 0) - num_open)

    def min_step(self, num_open: int, batched_step: int, published_step: int) -> int:
        """Return the lowest step of weights that may sample the group that is admitted after `num_open` open groups.

        The result becomes `RolloutSpec.min_step`: engines with older weights must not run the group. The arguments are
        those of `free_groups`."""
        return max(0, min(published_step, self.required_step(num_open, batched_step)))

    def required_step(self, place: int, batched_step: int, size: int = 0) -> int:
        """Return the step whose weights must be published before the open group at `place` (counted from 0) may start.

        `batched_step`: step of the last batch that was formed. `size`: the number of groups of the batch that is being
        formed, as far as it is known."""
        steps_ahead = 0 if place < size else place // self.groups_per_step
        return batched_step + steps_ahead - self.max_lag

    def take(self, order: Sequence[str], ready: Collection[str], signal: Collection[str] = ()) -> list[str] | None:
        """Return the groups that the next step trains on, or None while one of them is not ready.

        `order`: all open groups in order of admission (`Ledger.open_groups`). `ready`: those whose rollouts have all
        ended. `signal`: those of `ready` whose rewards differ."""
        size = self.size(order, ready, signal)
        found = self._first(order, ready, size)
        return found if len(found) >= size else None

    def size(self, order: Sequence[str], ready: Collection[str], signal: Collection[str] = ()) -> int:
        """Return how many groups the next step takes, as far as the ready groups show.

        The number may grow when further groups become ready. The arguments are those of `take`."""
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
        """Return the mean number of groups of a step if each group has a signal with probability `signal_share`.

        It is the mean of `DRAWS` simulated steps with a fixed seed.

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
        """Return the open groups that a step left out: admitted before the last group in `taken`, and not in
        `taken`."""
        reach = order.index(taken[-1]) if taken else 0
        return [group for group in order[:reach] if group not in set(taken)]


def mask_path(path: Path, keep: Bools) -> Path:
    """Restrict the loss of a path to tokens where `keep` ([T] bool) is True.

    All tokens stay in the path. The log-probabilities outside the mask become 0.0, as `Path` requires."""
    mask = path.mask & keep
    logprobs = np.where(mask, path.logprobs, np.float32(0)).astype(np.float32)
    return msgspec.structs.replace(path, mask=mask, logprobs=logprobs)


def mask_stale(path: Path, *, learner_step: int, max_lag: int, straggler: Straggler) -> Path:
    """Restrict the loss of a path to tokens within the lag bound.

    A token is within the bound if neither the token nor a key that it attended to was computed by a version older than
    `learner_step - max_lag`. Under MASK older tokens are masked. Under WAIT there should be none, so one raises
    `LedgerError`."""
    stale = path.mask & (learner_step - path.oldest_steps > max_lag)
    if not stale.any():
        return path
    if straggler is Straggler.WAIT:
        oldest = int(path.oldest_steps[path.mask].min())
        raise LedgerError(
            f"a token of step {oldest} would be trained at step {learner_step}",
            f"a token may be at most {max_lag} steps old (experience.max_lag)",
            hint="this is a defect of etude: keep the run folder and report it; straggler = 'mask' avoids it",
        )
    return mask_path(path, ~stale)
