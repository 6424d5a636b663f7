"""Decides from the outcomes of users whether a canary grows, is promoted, holds or is rolled back. A pure function.

A subject counts once at each share, by one value: a loud user has the weight of a silent one. Only outcomes at the
present share count. When a share grows, the canary's newest subjects are those of today, and the others' are those of
all days; a comparison over both would show a difference between days as one between versions.

The error `alpha` is divided equally among all comparisons: metrics times shares at which there is something to compare.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

from etude.releases.assignment import Arm
from etude.releases.costs import Costs
from etude.releases.sequences import Difference, difference
from etude.releases.settings import Metric, ReleaseSettings

Values = Mapping[str, Mapping[Arm, Sequence[float]]]
"""Metric -> version -> one value in [0, 1] for each subject that counts, in the order in which they began."""


class Action(enum.StrEnum):
    """The possible decisions about a canary."""

    WAIT = "wait"
    GROW = "grow"
    PROMOTE = "promote"
    HOLD = "hold"
    ROLL_BACK = "roll back"


class MetricEvidence(msgspec.Struct, frozen=True):
    """The evidence on one metric: the canary's mean minus the stable version's, above 0 if the canary is better.

    `low`, `high`: bounds of a confidence sequence: they are valid however often one looks. `canary`, `stable`: the
    numbers of subjects that were compared."""

    metric: str
    value: float
    low: float
    high: float
    canary: int
    stable: int


class Decision(msgspec.Struct, frozen=True):
    """A decision about a canary, its reason, and the evidence on each metric.

    `share`: percent of the subjects that had the canary when it was decided. `costs`: the dollars per kept change of
    both versions; None: nobody computed them."""

    action: Action
    reason: str
    share: int
    evidence: tuple[MetricEvidence, ...]
    costs: Costs | None = None


class Traffic(msgspec.Struct, frozen=True):
    """The times that a decision depends on, all in seconds since 1970.

    `share_since`: when the canary got its present share of the subjects. `now`: the present time. `last`: when the last
    outcome of each version came; a version without an outcome at this share is missing."""

    share_since: float
    now: float
    last: Mapping[Arm, float]


def decide(
    settings: ReleaseSettings, share: int, traffic: Traffic, values: Values, costs: Costs | None = None
) -> Decision:
    """Decide what to do with a canary that has `share` percent of the subjects.

    It may be called as often as wanted: if a canary is equal to the stable version, the probability that it is ever
    promoted or rolled back is at most `settings.alpha`.

    `traffic`: times of the last outcomes. `values`: the mean outcome of each subject, for each metric and version.
    `costs`: the dollars per kept change of each version; they can only prevent a promotion (`too_costly`)."""
    compared = share in settings.compared_shares
    evidence = tuple(_evidence(settings, metric, values) for metric in settings.metrics) if compared else ()
    action, reason = _decide(settings, share, traffic, evidence, too_costly(settings, costs))
    return Decision(action, reason, share, evidence, costs)


def too_costly(settings: ReleaseSettings, costs: Costs | None) -> str:
    """Return why a canary's kept changes cost too much for a promotion, or are not known to cost less; "" if they do
    not.

    The dollars themselves are compared, not the bounds of their intervals, as in the gate."""
    metric = settings.metrics[0]
    if metric.cost_rise is None:
        return ""
    new, old = (None if costs is None else costs[arm].value for arm in (Arm.CANARY, Arm.STABLE))
    if new is None or not old:
        return f"the dollars per {metric.name} of a version are unknown"
    rise = new / old - 1.0
    if rise <= metric.cost_rise:
        return ""
    return f"dollars per {metric.name} {rise:+.1%}, must be at most {metric.cost_rise:+.1%}"


def _evidence(settings: ReleaseSettings, metric: Metric, values: Values) -> MetricEvidence:
    canary, stable = (values.get(metric.name, {}).get(arm, ()) for arm in (Arm.CANARY, Arm.STABLE))
    alpha = settings.alpha / (len(settings.metrics) * len(settings.compared_shares))
    found = difference(canary, stable, alpha)
    if not metric.higher_is_better:
        found = Difference(-found.value, -found.high, -found.low)
    return MetricEvidence(metric.name, found.value, found.low, found.high, len(canary), len(stable))


def _decide(
    settings: ReleaseSettings, share: int, traffic: Traffic, evidence: Sequence[MetricEvidence], costly: str
) -> tuple[Action, str]:
    margins = {metric.name: metric.margin for metric in settings.metrics[1:]}  # of the first it is 0
    for one in evidence:
        if one.high < -margins.get(one.metric, 0.0):
            return Action.ROLL_BACK, f"{one.metric} is worse: {_shown(one)}"
    age = traffic.now - traffic.share_since
    for arm in Arm if evidence else (Arm.CANARY,):
        silent = traffic.now - max(traffic.share_since, traffic.last.get(arm, 0.0))
        if silent >= settings.silent_s:
            return Action.HOLD, f"no outcome of the {arm} version for {silent:.0f} s"
    if not evidence:
        if age >= settings.share_s:
            return Action.PROMOTE, f"it had all subjects for {age:.0f} s, after it was shown to be better"
        return Action.WAIT, f"it has all subjects; promoted after {settings.share_s:.0f} s"
    first, last = evidence[0], share == settings.compared_shares[-1]
    unsafe = [one for one in evidence[1:] if one.low <= -margins[one.metric]]
    if last and first.low > 0.0 and not unsafe and not costly:
        action = Action.PROMOTE if share == settings.shares[-1] else Action.GROW
        return action, f"{first.metric} is better: {_shown(first)}"
    if age >= settings.max_s:
        return Action.HOLD, f"no decision at {share} % after {age:.0f} s: {_open(first, unsafe, costly)}"
    if last:
        return Action.WAIT, _open(first, unsafe, costly)
    fewest = min(one.canary for one in evidence)
    if fewest < settings.subjects or age < settings.share_s:
        return Action.WAIT, f"{fewest} of {settings.subjects} subjects and {age:.0f} of {settings.share_s:.0f} s"
    return Action.GROW, f"nothing is shown to be worse with {fewest} subjects"


def _open(first: MetricEvidence, unsafe: Sequence[MetricEvidence], costly: str) -> str:
    """Why a canary is not promoted yet."""
    if first.low <= 0.0:
        return f"{first.metric} is not shown to be better: {_shown(first)}"
    if unsafe:
        return f"{unsafe[0].metric} is not shown to keep its margin: {_shown(unsafe[0])}"
    return costly or f"{first.metric} is better, {_shown(first)}, but this is not the last share"


def _shown(one: MetricEvidence) -> str:
    bounds = f"{one.value:+.3f} ({one.low:+.3f} to {one.high:+.3f})"
    return f"{bounds}, {one.canary} subjects against {one.stable}"
