"""Watches the reward terms of a run for drift before each step, and says whether the run goes on.

The state of the tests is in the ledger, so a run that is resumed continues them. Resuming a run that an alarm held
accepts it: that test begins anew. It does so, too, when the term has another weight or version than before. An alarm of
a term that is not trained on is only reported. A run whose training an alarm ended does not train again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from etude.errors import RewardDrift
from etude.experience import Group, Ledger
from etude.records import Graded
from etude.rewards.config import RewardsConfig
from etude.rewards.drift import ALPHA, AuditConfig, AuditState, AuditStep, OnDrift, observe
from etude.telemetry import Telemetry

STATES = "audits"  # in the ledger: name of the audit → `AuditState`


class DriftMonitor:
    """Runs the audits of a run, which test whether reward terms drift. Create it before the run trains, and call
    `observe` with the groups of each step."""

    def __init__(self, ledger: Ledger, telemetry: Telemetry) -> None:
        self.ledger, self.telemetry = ledger, telemetry
        self.facts: dict[str, dict[str, Any]] = {}  # of the last observed step, by name of the audit
        self._states = msgspec.convert(ledger.recall(STATES) or {}, dict[str, AuditState])
        self._accepted = {name for name, state in self._states.items() if state.raised is not None}

    def ended(self, audits: Sequence[AuditConfig]) -> bool:
        """Return whether an alarm has ended training."""
        raised = {name for name, state in self._states.items() if state.raised is not None}
        return any(one.on_drift is OnDrift.END and one.name in raised for one in audits)

    def observe(self, rewards: RewardsConfig, step: int, groups: Sequence[Group]) -> None:
        """Update the statistical tests with the groups that `step` will train on, and store the states of the tests.

        `rewards`: the settings of `step`. Raises `RewardDrift` when an audit that may stop the run raises an alarm
        about a term that `step` is trained on. Call it in the ledger's thread."""
        audits, trained_on = rewards.audits, rewards.trained_on(step)
        terms = {one.name: one for one in rewards.terms}
        graded: Mapping[str, Sequence[Graded]] = {one.group_id: [outcome for _, outcome in one.valid] for one in groups}
        found: dict[str, AuditStep] = {}
        for one in audits:
            state = self._states.setdefault(one.name, AuditState())
            term, trained = terms[one.term], one.term in trained_on
            weight = term.weight if term.from_step <= step else 0.0
            versions = _versions(one.term, graded.values())
            accepted = one.name in self._accepted and one.on_drift is not OnDrift.END
            ended = state.raised is not None and one.on_drift is OnDrift.END
            if accepted or (not ended and _changed(state, weight, trained, versions)):
                self._states[one.name] = state = AuditState(step=step - 1)
            state.weight, state.trained, state.versions = weight, trained, versions or state.versions
            found[one.name] = observe(one, state, step, graded)
        self._accepted.clear()
        self.facts = {name: msgspec.to_builtins(one) for name, one in found.items()}
        if not audits:
            return
        stored = msgspec.to_builtins(self._states)
        self.ledger.transaction(lambda: self.ledger.remember(STATES, stored))
        held = list[RewardDrift]()
        for one in audits:
            if found[one.name].alarm:
                holds = one.on_drift is OnDrift.HOLD and one.term in trained_on
                action = OnDrift.REPORT if one.on_drift is OnDrift.HOLD and not holds else one.on_drift
                self.telemetry.event(
                    "rewards.drift", step=step, audit=one.name, action=str(action), **self.facts[one.name]
                )
                if holds:
                    held.append(_error(one, step, found[one.name]))
        if held:
            raise held[0]


def _versions(term: str, groups: Iterable[Sequence[Graded]]) -> list[str]:
    """The versions of the known values of a term."""
    graded = (one for group in groups for one in group)
    return sorted({own.version for one in graded for own in one.terms if own.name == term and own.value is not None})


def _changed(state: AuditState, weight: float, trained: bool, versions: Sequence[str]) -> bool:
    """Whether the term differs from what the test has observed so far."""
    if state.weight is not None and (state.weight, state.trained) != (weight, trained):
        return True
    return bool(state.versions) and not set(versions) <= set(state.versions)


def _error(audit: AuditConfig, step: int, found: AuditStep) -> RewardDrift:
    means = f"mean of {audit.term} {found.term:.3f}, of {audit.by} {found.by:.3f}" if found.term is not None else ""
    far = f"; distance {found.distance:.3f}" if found.distance is not None else ""
    far += f", tolerance {audit.tolerance:g}" if audit.tolerance is not None else ""
    return RewardDrift(
        f"reward term {audit.term!r} drifts from {audit.by!r}",
        f"before step {step}, e-value {found.e_value:.3g} (alarm at {1 / ALPHA:g}): {means}{far}",
        hint=f"compare rollouts: etude rewards explain; then correct the rubric, or set {audit.term}.weight=0 with "
        f"etude rewards set, and resume. The test then begins anew with the groups of step {step}",
    )
