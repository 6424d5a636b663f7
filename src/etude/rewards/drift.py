"""Tests over the steps of a run whether a reward term still says what it should: the drift alarm.

A term that is trained on, such as a judge, is compared with another one that is not. There are two tests. Both are
*anytime-valid*: with no drift, the probability of ever raising the alarm in the whole run is at most `ALPHA`, however
often one looks. One observation is one group, since the rollouts of a group are not independent.

- *Distance* to an auditor, a second judge with weight 0. The root mean square distance of the two must not exceed a
  tolerance, which `etude judge calibrate` measures. Squares, since a few verdicts that are far off say more than many
  that are a level apart. A test by betting: the capital of a bettor who gains when squared distances are above the
  tolerance's (Waudby-Smith & Ramdas 2023, arXiv 2010.09686).
- *Climb* against the grade: the term rises over the run while the grade falls. Each group's mean is ranked among all
  before it; without a trend the ranks are uniform (conformal test martingales: Vovk 2021, arXiv 2102.10439). The alarm
  needs both, so a policy that gets better in both raises none, nor does one that trades nothing.

The capital is spread over bets of several sizes, one of which is 0, and moves between them at a small rate (the
"jumper" of Vovk et al.), so a drift that begins late is found as fast as an early one."""

from __future__ import annotations

import bisect
import enum
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from etude.config import ranged
from etude.errors import PluginError
from etude.records.reward import GRADE
from etude.records.rollout import Graded

ALPHA = 0.01
"""The probability of an alarm in a run without drift."""
_JUMP = 0.01
_SHARES = (0.0, 0.1, 0.3, 0.9)  # bets of the distance test, as shares of the largest allowed one
_SLOPES = (0.0, 0.5, 1.0, 2.0)  # bets of the climb test
MAX_PAST = 20_000
"""Groups whose ranks are kept. The climb test begins anew after so many."""


class OnDrift(enum.StrEnum):
    """What a run does at an alarm. REPORT: only reports it. HOLD: stops before the step if it is trained on the term;
    when the run is resumed, the test starts again. END: ends training with the weights of the step
    before, and evaluates them."""

    REPORT = "report"
    HOLD = "hold"
    END = "end"


@dataclass(frozen=True)
class AuditConfig:
    """A `[[rewards.audits]]` table of the config file: how a reward term is checked for drift.

    - `term`: the name of the checked term. With a `tolerance` its values must be from 0 to 1.
    - `by`: the auditor, with which it is compared: "grade", or the name of another term whose weight is 0.
    - `tolerance`: the accepted root mean square distance to the auditor, as `etude judge calibrate` measures it; None
      for "grade".
    - `on_drift`: what the run does at an alarm.

    Raises `ValueError` for a term that audits itself, for a `tolerance` if `by` is "grade", and for a missing
    `tolerance` otherwise."""

    term: str
    by: str
    tolerance: float | None = ranged(None, low=0.001, high=0.999)
    on_drift: OnDrift = OnDrift.HOLD

    def __post_init__(self) -> None:
        if self.term == self.by:
            raise ValueError(f"the term {self.term!r} cannot audit itself")
        if self.by == GRADE and self.tolerance is not None:
            raise ValueError(f"the audit of {self.term!r} by the grade has no tolerance: remove it")
        if self.by != GRADE and self.tolerance is None:
            raise ValueError(f"the audit of {self.term!r} needs a tolerance: measure it with etude judge calibrate")

    @property
    def name(self) -> str:
        """Name of the audit in metrics: "clear by clear_auditor"."""
        return f"{self.term} by {self.by}"


class AuditState(msgspec.Struct, kw_only=True):
    """The state of one audit, which a run stores after each step.

    `distance`, `rise`, `fall`: the capital of each bet of the test (`etude.rewards.drift`). `past_term`, `past_grade`:
    the group means of earlier steps, with which new ones are compared.

    `step`: the last observed step. `raised`: the step of the alarm; None: no alarm. `weight`, `trained`, `versions`:
    the weight of the term in that step, whether that step was trained on it, and the versions of its values; None and
    empty before the first step."""

    step: int = 0
    num_groups: int = 0
    distance: list[float] = msgspec.field(default_factory=lambda: _fresh(_SHARES))
    rise: list[float] = msgspec.field(default_factory=lambda: _fresh(_SLOPES))
    fall: list[float] = msgspec.field(default_factory=lambda: _fresh(_SLOPES))
    past_term: list[float] = []  # sorted
    past_grade: list[float] = []
    raised: int | None = None
    weight: float | None = None
    trained: bool = False
    versions: list[str] = []


class AuditStep(msgspec.Struct, frozen=True, kw_only=True):
    """One audit after one step: the e-value, means over the step's rollouts, and whether the alarm is raised.

    An e-value above 1 / `ALPHA` raises the alarm. `term` and `by` are the means of the term and its auditor; None if no
    rollout had both values. `distance`: root mean square difference between the two."""

    e_value: float
    term: float | None
    by: float | None
    distance: float | None
    num_groups: int
    alarm: bool


def observe(config: AuditConfig, state: AuditState, step: int, groups: Mapping[str, Sequence[Graded]]) -> AuditStep:
    """Add the groups of a step to an audit, and return its result. A step that was observed before adds nothing.

    `groups`: the graded rollouts by group id. Rollouts for which one of the two values is unknown are left out. Raises
    `PluginError` if the audit has a tolerance, and a value is not from 0 to 1."""
    found = [
        pairs
        for group in sorted(groups)
        if (pairs := [pair for one in groups[group] if (pair := _pair(config, one)) is not None])
    ]
    if step > state.step:
        state.step = step
        for pairs in found:
            _add(config, state, pairs)
    e_value = _e_value(config, state)
    if e_value >= 1 / ALPHA and state.raised is None:
        state.raised = step
    every = [pair for pairs in found for pair in pairs]
    return AuditStep(
        e_value=e_value,
        term=_mean([term for term, _ in every]),
        by=_mean([by for _, by in every]),
        distance=math.sqrt(_square(every)) if every else None,
        num_groups=state.num_groups,
        alarm=state.raised == step,
    )


def _pair(config: AuditConfig, graded: Graded) -> tuple[float, float] | None:
    values = graded.values
    term, by = values.get(config.term), values.get(config.by)
    if term is None or by is None:
        return None
    if config.tolerance is not None and not 0.0 <= min(term, by) <= max(term, by) <= 1.0:
        raise PluginError(
            f"the audit {config.name!r} needs values from 0 to 1",
            f"a rollout has {config.term} {term:g} and {config.by} {by:g}",
            hint="change the term to give values from 0 to 1, or remove the auditor and with it the audit "
            f"(etude rewards set RUN --remove {config.by}), and resume",
        )
    return term, by


def _add(config: AuditConfig, state: AuditState, pairs: Sequence[tuple[float, float]]) -> None:
    state.num_groups += 1
    if config.tolerance is not None:
        accepted = config.tolerance**2
        _bet(state.distance, [1 + share * (_square(pairs) / accepted - 1) for share in _SHARES])
        return
    if len(state.past_term) >= MAX_PAST:
        state.past_term, state.past_grade = [], []
        state.rise, state.fall = _fresh(_SLOPES), _fresh(_SLOPES)
    draw = random.Random(state.num_groups)
    above = 1.0 - _rank(state.past_term, statistics.fmean(term for term, _ in pairs), draw)
    below = _rank(state.past_grade, statistics.fmean(by for _, by in pairs), draw)
    _bet(state.rise, [1 + slope * (0.5 - above) for slope in _SLOPES])
    _bet(state.fall, [1 + slope * (0.5 - below) for slope in _SLOPES])


def _rank(past: list[float], value: float, draw: random.Random) -> float:
    """Insert a value into sorted ones, and return its rank in (0, 1): uniform if all are exchangeable."""
    low, high = bisect.bisect_left(past, value), bisect.bisect_right(past, value)
    past.insert(high, value)
    return (low + (1.0 - draw.random()) * (high - low + 1)) / len(past)


def _fresh(bets: Sequence[float]) -> list[float]:
    return [1.0 / len(bets)] * len(bets)


def _bet(capital: list[float], gains: Sequence[float]) -> None:
    """Move a little capital between the bets, then multiply each by its gain, whose expectation is at most 1."""
    total = math.fsum(capital)
    for i, gain in enumerate(gains):
        capital[i] = min(1e200, ((1 - _JUMP) * capital[i] + _JUMP * total / len(capital)) * gain)


def _e_value(config: AuditConfig, state: AuditState) -> float:
    if config.tolerance is not None:
        return math.fsum(state.distance)
    return min(math.fsum(state.rise), math.fsum(state.fall))  # both must hold: the smaller one is an e-value of that


def _square(pairs: Sequence[tuple[float, float]]) -> float:
    """The mean squared distance of pairs of values from 0 to 1."""
    return statistics.fmean((term - by) ** 2 for term, by in pairs)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
