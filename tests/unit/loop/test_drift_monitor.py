"""The audits of a run: what an alarm does, and what a resumed run makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from etude.errors import RewardDrift
from etude.experience import Group, Ledger
from etude.loop.drift_monitor import DriftMonitor
from etude.records import Graded
from etude.records.reward import Term
from etude.records.task import Trust
from etude.rewards.drift import AuditConfig, OnDrift
from etude.telemetry import Telemetry, read_events


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[], DriftMonitor]:
    """Opens the monitor of one run, as each session of the run does."""

    def monitor() -> DriftMonitor:
        ledger = Ledger(tmp_path / "ledger.sqlite", capacity=8)
        return DriftMonitor(ledger, Telemetry(tmp_path / "events.jsonl", process="conductor"))

    return monitor


def groups(step: int, term: float, auditor: float) -> list[Group]:
    """Eight groups of two rollouts with these values."""
    plain = Graded.of(1.0, trust=Trust.DATA, reason="")
    graded = plain.with_terms(Term(name="clear", value=term), Term(name="auditor", value=auditor))
    made = [SimpleNamespace(group_id=f"g{step}-{i}", valid=[(None, graded)] * 2) for i in range(8)]
    return cast(Any, made)  # what the monitor reads of a group


def audit(on_drift: OnDrift) -> list[AuditConfig]:
    return [AuditConfig(term="clear", by="auditor", tolerance=0.1, on_drift=on_drift)]


def test_an_alarm_holds_the_run_and_resuming_begins_the_test_anew(opened: Callable[[], DriftMonitor]) -> None:
    audits, first = audit(OnDrift.HOLD), opened()
    first.observe(audits, 1, groups(1, 0.5, 0.5))
    assert first.facts["clear by auditor"]["distance"] == 0.0
    with pytest.raises(RewardDrift) as held:
        first.observe(audits, 2, groups(2, 1.0, 0.5))
    assert held.value.what == "reward term 'clear' drifts from 'auditor'"
    assert "before step 2" in held.value.facts
    assert "mean of clear 1.000, of auditor 0.500; distance 0.500, tolerance 0.1" in held.value.facts
    assert not first.ended(audits)
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
    assert first.ended(audits)
    first.ledger.close()
    again = opened()
    assert again.ended(audits)
    assert not again.ended(audit(OnDrift.HOLD))
    again.ledger.close()


def test_an_alarm_that_is_only_reported_is_one_event(opened: Callable[[], DriftMonitor], tmp_path: Path) -> None:
    audits, monitor = audit(OnDrift.REPORT), opened()
    for step in (1, 2, 3):
        monitor.observe(audits, step, groups(step, 1.0, 0.0))
    monitor.telemetry.close()
    [alarm] = [one for one in read_events(tmp_path) if one["kind"] == "rewards.drift"]
    assert (alarm["step"], alarm["action"], alarm["audit"]) == (1, "report", "clear by auditor")
    assert not monitor.ended(audits)
    monitor.ledger.close()


def test_a_run_without_audits_stores_nothing(opened: Callable[[], DriftMonitor]) -> None:
    monitor = opened()
    monitor.observe([], 1, groups(1, 1.0, 0.0))
    assert monitor.ledger.recall("audits") is None
    assert monitor.facts == {}
    monitor.ledger.close()
