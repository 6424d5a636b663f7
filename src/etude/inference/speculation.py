"""Speculative decoding: which sequences of a step compute drafts of their next tokens, and how many.

A draft is accepted if it equals the token that the sequence samples anyway, whose random number is keyed by its
position. So drafts decide how many tokens a step yields, and never which. That is why the number of drafts may depend
on measured times.

A row of a draft costs time, and yields a token with some probability. Rows are added while their expected tokens a
second exceed those of the step without them. The cost is estimated from the latest steps, the probability from the
latest drafts. Both estimates forget: without new measurements they become optimistic again, so drafts are tried again
after some hundred steps.

A step has at most as many rows as the engine has slots, or `MOST` + 1 rows, if that is more. So a full batch has no
drafts, and logits need no further memory. Imports no torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from etude.config import Plugin
from etude.inference.config import Speculation
from etude.inference.look_up import Drafter, LookUp
from etude.inference.scheduler import Draft, Plan, Sequence
from etude.plugins import Kind, called, make

MOST = 16  # drafts of one sequence in a step
HOPE = 0.8  # probability that a draft is accepted, before any was
_MEMORY, _MEMORY_OF_SLOT = 128, 16  # drafts that an average is of: of all sequences, and of one
_IDLE = 8  # steps that forget as much as one draft
TRIALS = (1, 2, 3, 1, 2, 3, 1, 2)  # drafts of a sequence in the first steps with a drafter that computes its drafts
_PAUSE = 512  # steps without drafts after which such a drafter is tried again
_OF_COSTS = 1 / 256  # forgotten of the steps' times, per step
_RIDGE = 1e-3  # of a step; where less is known, a cost is taken for 0
_OUTLIER = 4.0  # a longer time than this many times the expected one counts as much


@runtime_checkable
class AllAtOnce(Protocol):
    """A drafter that drafts all sequences of a step together, and reads their tokens from them (`heads.Heads`)."""

    caught_up: bool
    """Whether the last call did work that later calls will not need. Its time is not taken for that of drafts."""

    def draft_all(self, wanted: Many[tuple[Sequence, int]]) -> list[list[int]]:
        """Return the drafts of each sequence, in the same order: as many as asked for, or none."""
        ...


@dataclass(slots=True)
class _Acceptance:
    """The share of drafts that are accepted, as a moving average of about the latest `memory` drafts."""

    memory: int
    accepted: float = 0.0
    tried: float = 0.0
    at: int = 0  # step

    def add(self, accepted: int, tried: int, step: int) -> None:
        """Add the drafts of a step, of which `tried` were compared with a token."""
        self._forget(step)
        kept = (1.0 - 1.0 / self.memory) ** tried
        self.accepted, self.tried = self.accepted * kept + accepted, self.tried * kept + tried

    def share(self, step: int, expected: float) -> float:
        """Return the share. `expected` counts as one more draft."""
        self._forget(step)
        return (self.accepted + expected) / (self.tried + 1.0)

    def _forget(self, step: int) -> None:
        if step > self.at:
            kept = (1.0 - 1.0 / (_IDLE * self.memory)) ** (step - self.at)
            self.accepted, self.tried, self.at = self.accepted * kept, self.tried * kept, step


@dataclass(slots=True)
class _SlotState:
    """What is known of a sequence. `token_ids`: its list of sampled tokens, which is another one after a restart.
    `num_known`: how many of them the drafter has."""

    token_ids: list[int] = field(default_factory=list)
    num_known: int = -1
    acceptance: _Acceptance = field(default_factory=lambda: _Acceptance(_MEMORY_OF_SLOT))


class StepCosts:
    """Estimates the duration of a step as a sum of four parts: a constant, a time per sequence, a constant if there are
    drafts, and a time per draft.

    It is a least squares fit in which older steps have less weight."""

    def __init__(self) -> None:
        self._xx, self._xt = np.zeros((4, 4)), np.zeros(4)
        self._costs: np.ndarray[tuple[int], np.dtype[np.float64]] | None = np.zeros(4)

    def add(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Add a measured step: it computed a token for each of `num_sequences`, and `num_drafts` drafts, and took
        `seconds`."""
        x = np.array([1.0, num_sequences / MOST, float(num_drafts > 0), num_drafts / MOST])
        if (expected := float(x @ self.costs)) > 0.0:
            seconds = min(seconds, _OUTLIER * expected)
        self._xx = (1.0 - _OF_COSTS) * self._xx + np.outer(x, x)
        self._xt = (1.0 - _OF_COSTS) * self._xt + seconds * x
        self._costs = None

    @property
    def costs(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The estimated parts of the sum in seconds, [4]; those of sequences and drafts are for `MOST` of them."""
        if self._costs is None:
            self._costs = np.linalg.solve(self._xx + _RIDGE * np.eye(4), self._xt).clip(min=0.0)
        return self._costs

    def step_s(self, num_sequences: int) -> float:
        """Return the expected seconds of a step without drafts; 0.0 if no step was measured."""
        return float(self.costs[0] + self.costs[1] * num_sequences / MOST)

    def drafts_s(self, num_drafts: int) -> float:
        """Return by how many seconds `num_drafts` drafts lengthen a step."""
        return float(self.costs[2] + self.costs[3] * num_drafts / MOST) if num_drafts else 0.0

    @property
    def draft_s(self) -> float:
        """The expected seconds that one further draft takes."""
        return float(self.costs[3]) / MOST


class Speculator:
    """Adds drafts to the plans of an engine.

    - `drafter`: proposes tokens: for one sequence at a time, or for all of a step (`AllAtOnce`).
    - `num_slots`: the slots of the engine.
    - `vocab_size`: proposed ids that are not below it are ignored.
    - `costs`: estimates the times of steps."""

    def __init__(
        self, drafter: Drafter | AllAtOnce, *, num_slots: int, vocab_size: int, costs: StepCosts | None = None
    ) -> None:
        self.drafter, self.costs, self._vocab_size = drafter, costs or StepCosts(), vocab_size
        self._together = drafter if isinstance(drafter, AllAtOnce) else None
        self._max_rows = max(num_slots, MOST + 1)
        self._slots = [_SlotState() for _ in range(num_slots)]
        self._all = _Acceptance(_MEMORY)
        self._step = 0
        self._trials, self._pause = 0, 0  # steps with drafts that were tried, and steps since the latest drafts
        self._uneven = False  # the time of this step says nothing of later ones

    def with_drafts(self, plan: Plan) -> Plan:
        """Return the plan with drafts for those decoding sequences for which drafts are expected to save time."""
        self._step, self._uneven, self._pause = self._step + 1, False, self._pause + 1
        if self._pause > _PAUSE:
            self._trials, self._pause = 0, 0
        num = len(plan.decode)
        room, step_s = self._max_rows - num, self.costs.step_s(num)
        if room <= 0 or not num or step_s <= 0.0:
            return plan
        tokens_per_s = num / step_s
        least = tokens_per_s * self.costs.draft_s  # probability with which a row pays
        if least >= 1.0 and not self._trial():
            return plan
        expected = self._all.share(self._step, HOPE)
        shares = {s: self._state(s).acceptance.share(self._step, expected) for s in plan.decode}
        found: dict[Sequence, list[int]] = {}
        wanted: list[tuple[Sequence, int]] = []
        gain, num_drafts, trial = 0.0, 0, self._trial()
        for sequence in sorted(plan.decode, key=lambda s: -shares[s]):
            most = min(room, trial or _depth(shares[sequence], least), sequence.num_missing - 1)
            if most <= 0:
                continue
            if self._together is not None:
                wanted.append((sequence, most))
                num = most
            else:
                found[sequence] = self._drafted(sequence, most)
                num = len(found[sequence])
            room, num_drafts = room - num, num_drafts + num
            gain += sum(shares[sequence] ** depth for depth in range(1, num + 1))
        if not num_drafts or (not trial and gain < tokens_per_s * self.costs.drafts_s(num_drafts)):
            return plan
        if self._together is not None:
            found = dict(zip((s for s, _ in wanted), self._together.draft_all(wanted), strict=True))
            self._uneven = self._together.caught_up
            self._trials, self._pause = self._trials + (not self._uneven), 0
        drafts = {s: Draft(s, s.num_computed, [s.token_ids[-1], *ids]) for s, ids in found.items() if ids}
        rest = [s for s in plan.decode if s not in drafts]
        return replace(plan, decode=rest, drafts=sorted(drafts.values(), key=lambda draft: draft.sequence.row))

    def record(self, plan: Plan, seconds: float) -> None:
        """Record a computed plan, and how long it took."""
        for draft in plan.drafts:
            accepted = draft.num_accepted
            tried = min(draft.num_drafted, accepted + 1)
            self._slots[draft.sequence.row].acceptance.add(accepted, tried, self._step)
            self._all.add(accepted, tried, self._step)
        if not plan.chunks and not self._uneven:
            num_drafts = sum(draft.num_drafted for draft in plan.drafts)
            self.costs.add(len(plan.decode) + len(plan.drafts), num_drafts, seconds)

    def _trial(self) -> int:
        """Return how many drafts a sequence gets in this step, to measure a drafter that computes its drafts; 0: by the
        estimates. With one number of drafts only, the cost of each and that of drafts at all are not known."""
        if self._together is None or self._trials >= len(TRIALS):
            return 0
        return TRIALS[self._trials]

    def _state(self, sequence: Sequence) -> _SlotState:
        state = self._slots[sequence.row]
        if state.token_ids is not sequence.token_ids:
            state = self._slots[sequence.row] = _SlotState(sequence.token_ids)
        return state

    def _drafted(self, sequence: Sequence, most: int) -> list[int]:
        """Return the drafts for a sequence, after the drafter was told its latest tokens."""
        state, ids = self._slots[sequence.row], sequence.token_ids
        assert not isinstance(self.drafter, AllAtOnce)
        if state.num_known < 0:
            self.drafter.begin(sequence.row, [*sequence.request.prompt_ids.tolist(), *ids])
        else:
            self.drafter.extend(sequence.row, ids[state.num_known :])
        state.num_known = len(ids)
        found = [int(token) for token in self.drafter.draft(sequence.row, most)[:most]]
        wrong = (depth for depth, token in enumerate(found) if not 0 <= token < self._vocab_size)
        return found[: next(wrong, len(found))]


class PluginDrafter:
    """A drafter of a user's own package. Every method raises `PluginError` if the plug-in raises an error or does not
    return integers."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._made: Drafter = make(Kind.DRAFTER, plugin)

    def begin(self, slot: int, token_ids: Many[int]) -> None:
        with called(Kind.DRAFTER, self._plugin, "its method begin"):
            self._made.begin(slot, token_ids)

    def extend(self, slot: int, token_ids: Many[int]) -> None:
        with called(Kind.DRAFTER, self._plugin, "its method extend"):
            self._made.extend(slot, token_ids)

    def draft(self, slot: int, most: int) -> list[int]:
        with called(Kind.DRAFTER, self._plugin, "its method draft"):
            return [operator.index(token) for token in self._made.draft(slot, most)]


def drafter_for(setting: Speculation | Plugin) -> Drafter | None:
    """Return a new drafter of the kind that a config names; None for none. Raises `PluginRefused` for a plug-in that
    cannot be used."""
    if isinstance(setting, Plugin):
        return PluginDrafter(setting)
    return LookUp() if setting is Speculation.LOOK_UP else None


def _depth(share: float, least: float) -> int:
    """Return how many drafts of a sequence pay: of which each is accepted with a probability of at least `least`.

    >>> _depth(0.5, 0.2), _depth(0.1, 0.2), _depth(0.9, 0.0)
    (2, 0, 16)
    """
    if share >= 1.0 or least <= 0.0:
        return MOST
    return min(MOST, int(math.log(least) / math.log(share)))
