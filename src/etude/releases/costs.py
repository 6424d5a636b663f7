"""What a version's answers cost, in dollars per change that users kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from etude.evals.intervals import ratio
from etude.releases.assignment import Arm


class KeptCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the captured answers of one version cost per change that users kept.

    - `answers`, `subjects`: how many answers were counted, and of how many users.
    - `kept`: the sum of the answers' values of the first metric; of a signal that is true or false: how many are true.
    - `dollars`: what all these answers cost, kept or not. None: a price or a number of tokens is unknown.
    - `value`, `low`, `high`: `dollars` / `kept`, and its 95 % interval over users. None: `dollars` is unknown, or
      nothing was kept; the bounds are also None with fewer than two users."""

    answers: int
    subjects: int
    kept: float
    dollars: float | None
    value: float | None
    low: float | None
    high: float | None


Costs = Mapping[Arm, KeptCost]


def cost_per_kept(users: Sequence[tuple[float | None, float]], *, answers: int) -> KeptCost:
    """Return the cost per kept change of users, each with (dollars of its answers, or None if unknown; what it kept).

    >>> cost_per_kept([(2.0, 1.0), (1.0, 0.0), (3.0, 1.0)], answers=9).value
    3.0
    >>> cost_per_kept([(2.0, 1.0), (None, 1.0)], answers=2).value is None
    True
    """
    kept, known = math.fsum(one for _, one in users), [dollars for dollars, _ in users if dollars is not None]
    dollars = math.fsum(known) if len(known) == len(users) else None
    value = low = high = None
    if dollars is not None and kept > 0.0:
        found = ratio(known, [one for _, one in users])
        value = found.value
        low, high = (max(0.0, found.low), found.high) if len(users) > 1 else (None, None)
    return KeptCost(answers=answers, subjects=len(users), kept=kept, dollars=dollars, value=value, low=low, high=high)
