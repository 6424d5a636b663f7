"""What engine and learner may differ by in a run, and what happens when they do. Pure: who asks and acts are others.

At each publish every engine is asked for its log-probabilities of a fixed text at that very version, so that a mismatch
is seen apart from staleness. Over budget the run ends, or takes its next defence, or says so and goes on. An engine
that decodes may compute otherwise than one that reads a text: while every number must be the same, so must those of
rollouts that the learner's own weights sampled.

Defences, in order: exact mode needs none, every number is the same; where it is not, the engines' routes are replayed;
where that is still too far, the importance weights are truncated (`training.corrections`).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from etude.config import ranged
from etude.evals.parity import Budget, Parity, budget_of, compare
from etude.numerics.config import ComputeDtype


class Defence(enum.StrEnum):
    """What makes up for engines that compute other numbers."""

    NONE = "none"  # nothing: the numbers are the same
    REPLAY = "replay"  # the engines' experts are used
    TRUNCATED = "truncated"  # and importance weights are truncated


class OverBudget(enum.StrEnum):
    """What a run does when an engine is further from the learner than its budget."""

    STOP = "stop"
    FALL_BACK = "fall_back"
    REPORT = "report"


@dataclass(frozen=True)
class ParityConfig:
    """The `[parity]` section. Budgets hold in native mode; in exact mode every number must be the same."""

    k3: float | None = None  # nats a token; none: by dtype, twice what was measured
    ratio_p99: float | None = None  # the 99th percentile of |r - 1|; none: by dtype
    patience: int = ranged(3, low=1)  # probes of one engine in a row that must be over; one, where all must be equal
    over_budget: OverBudget = OverBudget.STOP

    def __post_init__(self) -> None:
        for name, value in (("k3", self.k3), ("ratio_p99", self.ratio_p99)):
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} = {value} is no budget: a number from 0 on")

    def budget(self, dtype: str) -> Budget:
        """In native mode, of engines that compute in `dtype`.

        >>> ParityConfig(k3=1e-4).budget("bfloat16")
        Budget(k3=0.0001, ratio_p99=0.5)
        """
        usual = budget_of(dtype)
        return Budget(
            usual.k3 if self.k3 is None else self.k3, usual.ratio_p99 if self.ratio_p99 is None else self.ratio_p99
        )


FRESH = "fresh rollouts"
"""In the place of an engine's name: what the learner's own weights sampled, wherever."""


@dataclass(frozen=True)
class Alarm:
    """An engine that is over its budget."""

    engine: str  # or `FRESH`
    found: Parity
    budget: Budget
    defence: Defence | None  # what to take now; None: nothing is left, or nothing may be taken


class ParityMonitor:
    """The budget of a run, and how often each engine was over it.

    >>> watch = ParityMonitor(ParityConfig(over_budget=OverBudget.FALL_BACK), exact=True, dtype=ComputeDtype.FLOAT32)
    >>> from etude.evals.parity import compare
    >>> watch.record("engine-0", compare([-1.0], [-1.0])) is None
    True
    >>> watch.record("engine-0", compare([-1.0], [-1.000001])).defence
    <Defence.REPLAY: 'replay'>
    """

    def __init__(
        self, config: ParityConfig, *, exact: bool, dtype: ComputeDtype, defence: Defence | None = None
    ) -> None:
        """`defence`: the one that is taken already, by a run that goes on."""
        self._config, self._dtype = config, dtype
        self.defence = defence or (Defence.NONE if exact else Defence.REPLAY)
        self._over: dict[str, int] = {}

    @property
    def budget(self) -> Budget | None:
        """With the present defence; None where there is none that could be passed."""
        if self.defence is Defence.NONE:
            return Budget(0.0, 0.0)
        if self.defence is Defence.TRUNCATED:
            return None
        return self._config.budget(self._dtype)

    def record(self, engine: str, found: Parity) -> Alarm | None:
        """Count a probe. An alarm is raised when the patience with an engine is over, at once where every number must
        be the same or one is none; a defence it names counts as taken."""
        budget = self.budget
        if budget is None or budget.holds(found):
            self._over.pop(engine, None)
            return None
        self._over[engine] = self._over.get(engine, 0) + 1
        at_once = self.defence is Defence.NONE or not math.isfinite(found.k3)
        if self._over[engine] < self._config.patience and not at_once:
            return None
        self._over.clear()
        taken = None
        if self._config.over_budget is OverBudget.FALL_BACK:
            self.defence = taken = _next(self.defence)
            within = self.budget
            if within is not None and not within.holds(found):
                self.defence = taken = _next(taken)
        return Alarm(engine, found, budget, taken)

    def trained(self, fresh_ratio_max: float | None) -> Alarm | None:
        """Count a trained step's max |r - 1| on the learner's own weights as a probe, where it must be 0."""
        if self.defence is not Defence.NONE or fresh_ratio_max is None:
            return None
        return self.record(FRESH, compare([0.0], [math.log1p(fresh_ratio_max)]))


def _next(defence: Defence) -> Defence:
    return Defence.REPLAY if defence is Defence.NONE else Defence.TRUNCATED
