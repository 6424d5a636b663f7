"""The audits of a run: what an alarm does, and what a resumed run makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from etude.config import Plugin
from etude.errors import RewardDrift
from etude.experience import Group, Ledger
from etude.loop.drift_monitor import DriftMonitor
from etude.records import Graded
from etude.records.reward import Term
from etude.records.task import Trust
from etude.rewards.config import RewardsConfig, TermConfig
from etude.rewards.drift import AuditConfig, OnDrift
from etude.telemetry import Telemetry, read_events


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[], DriftMonitor]:
    """Opens the monitor of one run, as each session of the run does."""

    def monitor() -> DriftMonitor:
        ledger = Ledger(tmp_path / "ledger.sqlite", capacity=8)
        return DriftMonitor(ledger, Telemetry(tmp_path / "events.jsonl", process="conductor"))

    return monitor


def groups(step: int, term: float, auditor: float, version: str = "1") -> list[Group]:
    """Eight groups of two rollouts with these values."""
    plain = Graded.of(1.0, trust=Trust.DATA, reason="")
    graded = plain.with_terms(Term(name="clear", value=term, version=version), Term(name="auditor", value=auditor))
    made = [SimpleNamespace(group_id=f"g{step}-{i}", valid=[(None, graded)] * 2) for i in range(8)]
    return cast(Any, made)  # what the monitor reads of a group


def audit(on_drift: OnDrift, *others: TermConfig, weight: float = 0.5, **settings: Any) -> RewardsConfig:
    kind = Plugin("tests.loop.test_drift:Says")
    terms = TermConfig("clear", kind, weight, **settings), TermConfig("auditor", kind, 0.0), *others
    return RewardsConfig(terms, (AuditConfig(term="clear", by="auditor", tolerance=0.1, on_drift=on_drift),))


def test_an_alarm_holds_the_run_and_resuming_begins_the_test_anew(opened: Callable[[], DriftMonitor]) -> None:
    audits, first = audit(OnDrift.HOLD), opened()
    first.observe(audits, 1, groups(1, 0.5, 0.5))
    assert first.facts["clear by auditor"]["distance"] == 0.0
    with pytest.raises(RewardDrift) as held:
        first.observe(audits, 2, groups(2, 1.0, 0.5))
    assert held.value.what == "reward term 'clear' drifts from 'auditor'"
    assert "before step 2" in held.value.facts
    assert "mean of clear 1.000, of auditor 0.500; distance 0.500, tolerance 0.1" in held.value.facts
    assert not first.ended(audits.audits)
    first.ledger.close()
    again = opened()
    again.observe(audits, 2, groups(2, 0.5, 0.5))
    assert again.facts["clear by auditor"]["num_groups"] == 8, "the groups of the alarm are not counted"
    with pytest.raises(RewardDrift):
        again.observe(audits, 3, groups(3, 1.0, 0.5))
    again.ledger.close()


def test_an_alarm_that_ends_training_does_so_after_a_restart_too(opened: Callable[[], DriftMonitor]) -> None:
    audits, first = audit(OnDrift.END), opened()
    first.observe(audits, 1, groups(1, 1.0, 0.0))
    assert first.ended(audits.audits)
    first.ledger.close()
    again = opened()
    assert again.ended(audits.audits)
    assert not again.ended(audit(OnDrift.HOLD).audits)
    again.ledger.close()


def test_an_alarm_that_is_only_reported_is_one_event(opened: Callable[[], DriftMonitor], tmp_path: Path) -> None:
    audits, monitor = audit(OnDrift.REPORT), opened()
    for step in (1, 2, 3):
        monitor.observe(audits, step, groups(step, 1.0, 0.0))
    monitor.telemetry.close()
    [alarm] = [one for one in read_events(tmp_path) if one["kind"] == "rewards.drift"]
    assert (alarm["step"], alarm["action"], alarm["audit"]) == (1, "report", "clear by auditor")
    assert not monitor.ended(audits.audits)
    monitor.ledger.close()


def test_a_run_without_audits_stores_nothing(opened: Callable[[], DriftMonitor]) -> None:
    monitor = opened()
    monitor.observe(RewardsConfig(), 1, groups(1, 1.0, 0.0))
    assert monitor.ledger.recall("audits") is None
    assert monitor.facts == {}
    monitor.ledger.close()


def test_an_alarm_of_a_term_that_is_not_trained_on_does_not_hold(
    opened: Callable[[], DriftMonitor], tmp_path: Path
) -> None:
    first = opened()
    with pytest.raises(RewardDrift, match="clear"):
        first.observe(audit(OnDrift.HOLD), 1, groups(1, 1.0, 0.0))
    first.ledger.close()
    again = opened()
    again.observe(audit(OnDrift.HOLD, weight=0.0), 1, groups(1, 1.0, 0.0))
    again.observe(audit(OnDrift.HOLD, from_step=3), 2, groups(2, 1.0, 0.0))
    with pytest.raises(RewardDrift, match="clear"):
        again.observe(audit(OnDrift.HOLD, from_step=3), 3, groups(3, 1.0, 0.0))
    again.telemetry.close()
    alarms = [one for one in read_events(tmp_path) if one["kind"] == "rewards.drift"]
    assert [(one["step"], one["action"]) for one in alarms] == [(1, "hold"), (1, "report"), (3, "hold")]
    again.ledger.close()


def test_hints_and_gates_are_trained_on(opened: Callable[[], DriftMonitor]) -> None:
    gated = TermConfig("other", Plugin("tests.loop.test_drift:Says"), 0.5, when="clear")
    for rewards in (audit(OnDrift.HOLD, gated, weight=0.0), audit(OnDrift.HOLD, weight=0.0, hints=0.5)):
        monitor = opened()
        with pytest.raises(RewardDrift):
            monitor.observe(rewards, 1, groups(1, 1.0, 0.0))
        monitor.ledger.close()


@pytest.mark.parametrize(("weight", "version"), [(0.25, "1"), (0.5, "2")])
def test_a_test_begins_anew_with_another_weight_or_version(
    opened: Callable[[], DriftMonitor], weight: float, version: str
) -> None:
    monitor = opened()
    for step in (1, 2):
        monitor.observe(audit(OnDrift.HOLD), step, groups(step, 0.5, 0.5))
    assert monitor.facts["clear by auditor"]["num_groups"] == 16
    for step, num_groups in ((3, 8), (4, 16)):
        monitor.observe(audit(OnDrift.HOLD, weight=weight), step, groups(step, 0.5, 0.5, version))
        assert monitor.facts["clear by auditor"]["num_groups"] == num_groups
    monitor.ledger.close()


def test_an_alarm_that_ended_training_stays_with_another_weight(opened: Callable[[], DriftMonitor]) -> None:
    monitor = opened()
    monitor.observe(audit(OnDrift.END), 1, groups(1, 1.0, 0.0))
    rewards = audit(OnDrift.END, weight=0.0)
    monitor.observe(rewards, 1, groups(1, 0.5, 0.5))
    assert monitor.ended(rewards.audits)
    monitor.ledger.close()
