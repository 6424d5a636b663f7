"""The parity budget: how far the probabilities of engine and learner may differ in a run, and what happens beyond it.

At each publish every engine computes the log-probabilities of a fixed text with the new weights, so that mismatch is
measured apart from staleness. Over budget the run stops, takes its next defence, or only reports it, depending on
`[parity]`. An engine may compute differently when it decodes than when it scores a text: so in exact mode, the
probabilities of rollouts sampled by the learner's current weights are checked, too.

Defences, in order: exact mode needs none, since all probabilities are equal. Otherwise the learner replays the engines'
expert choices (routes). If the difference is still too large, importance weights are truncated
(`training.corrections`). Measuring and acting is done by `parity_probe` and the conductor."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from etude.config import ranged
from etude.evals.parity import Budget, Parity, budget_of, compare
from etude.numerics.config import ComputeDtype


class Defence(enum.StrEnum):
    """How the learner corrects for engines whose probabilities differ from its own.

    NONE: nothing. REPLAY: it computes with the experts that the engines chose. TRUNCATED: it also truncates importance
    weights."""

    NONE = "none"  # nothing: probabilities are equal
    REPLAY = "replay"  # it uses the engines' experts
    TRUNCATED = "truncated"  # it also truncates importance weights


class OverBudget(enum.StrEnum):
    """What a run does when an engine exceeds the parity budget: stop, use the next `Defence`, or only report it."""

    STOP = "stop"
    FALL_BACK = "fall_back"
    REPORT = "report"


@dataclass(frozen=True)
class ParityConfig:
    """The `[parity]` section: how far the probabilities of engine and learner may differ, in native mode.

    In exact mode they must be equal. r is the learner's probability of a token divided by the engine's. `k3` limits an
    estimate of the KL divergence (nats per token), and `ratio_p99` the 99th percentile of |r - 1|; None takes the
    default for the engines' dtype. `patience` is the number of consecutive probes of an engine over budget before the
    run reacts."""

    k3: float | None = None  # nats per token; None: by dtype, twice the measured value
    ratio_p99: float | None = None  # the 99th percentile of |r - 1|; None: by dtype
    patience: int = ranged(3, low=1)  # consecutive probes of an engine over budget before an alarm; exact mode: 1
    over_budget: OverBudget = OverBudget.STOP

    def __post_init__(self) -> None:
        for name, value in (("k3", self.k3), ("ratio_p99", self.ratio_p99)):
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} = {value} is not a budget: it must be 0 or more")

    def budget(self, dtype: str) -> Budget:
        """Return the limits in native mode for engines that compute in `dtype`.

        >>> ParityConfig(k3=1e-4).budget("bfloat16")
        Budget(k3=0.0001, ratio_p99=0.5)
        """
        usual = budget_of(dtype)
        return Budget(
            usual.k3 if self.k3 is None else self.k3, usual.ratio_p99 if self.ratio_p99 is None else self.ratio_p99
        )


FRESH = "fresh rollouts"
"""Used instead of an engine's name for rollouts sampled by the learner's current weights, on any engine."""


@dataclass(frozen=True)
class Alarm:
    """An engine that exceeds the parity budget, as `ParityMonitor` reports it.

    `engine` is its name, or `FRESH` if the rollouts of all engines were measured together. `defence` is the `Defence`
    to use from now on; None if there is no further one, or none is allowed."""

    engine: str
    found: Parity
    budget: Budget
    defence: Defence | None


class ParityMonitor:
    """Counts how often each engine exceeds the run's parity budget, and returns alarms.

    `defence`: the `Defence` that a resumed run used before.

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
        """`defence`: the defence already taken, in a resumed run."""
        self._config, self._dtype = config, dtype
        self.defence = defence or (Defence.NONE if exact else Defence.REPLAY)
        self._over: dict[str, int] = {}

    @property
    def budget(self) -> Budget | None:
        """The largest accepted difference between the probabilities of engine and learner. It depends on the `Defence`
        in use.

        Limits of 0 with NONE (exact mode), the limits of `[parity]` with REPLAY, and None (no limit) with TRUNCATED."""
        if self.defence is Defence.NONE:
            return Budget(0.0, 0.0)
        if self.defence is Defence.TRUNCATED:
            return None
        return self._config.budget(self._dtype)

    def record(self, engine: str, found: Parity) -> Alarm | None:
        """Record the result of a probe of an engine. Returns an alarm when the engine exceeded the budget too often.

        In exact mode, and for numbers that are not finite, once is too often. If the alarm has a defence, this defence
        is in use from then on."""
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
        """Record a step's max |r - 1| of rollouts that the current weights sampled; None if there were none.

        r is the learner's probability of a token divided by the engine's. Only exact mode checks it, where the maximum
        must be 0. Returns an alarm if it is not."""
        if self.defence is not Defence.NONE or fresh_ratio_max is None:
            return None
        return self.record(FRESH, compare([0.0], [math.log1p(fresh_ratio_max)]))


def _next(defence: Defence) -> Defence:
    return Defence.REPLAY if defence is Defence.NONE else Defence.TRUNCATED
