from __future__ import annotations

import pytest
from msgspec.structs import replace

from etude.errors import LedgerError
from etude.experience import audit, plan_batch, record_batch
from etude.experience.sqlite import SqliteDatabase as Database


@pytest.fixture
def run(tmp_path, ledger, kit, finish_group):
    """Two committed steps of one group each and a finished group that waits."""
    lineage = []
    for step in (1, 2):
        finish_group(f"g00000{step}", [1.0, 0.0, None])
        groups = [ledger.group(f"g00000{step}")]
        plan = plan_batch(groups, batch_id=f"b{step:06d}", step=step, max_lag=9)
        _, batch = record_batch(tmp_path / "traces", plan, kit.read)
        ledger.batch(batch)
        ledger.commit(batch.rollout_ids, kit.version(step))
        lineage.append((step, list(batch.rollout_ids)))
    finish_group("g000003", [1.0, 0.0])
    return lineage


def tamper(tmp_path, sql):
    database = Database(tmp_path / "ledger.sqlite")
    database.execute(sql)
    database.close()


def test_a_sound_run_is_clean(tmp_path, ledger, run):
    report = audit(ledger, tmp_path / "traces", [(0, []), *run])
    assert report.sound
    assert (report.num_rollouts, report.num_consumed, report.num_steps) == (8, 6, 2)
    report.require_sound()


def test_a_rollout_in_two_steps_of_the_lineage_is_twice(tmp_path, ledger, run):
    report = audit(ledger, tmp_path / "traces", [*run, (3, ["g000001.0"])])
    assert report.twice == ("g000001.0",)
    with pytest.raises(LedgerError, match=r"1 trained twice \(g000001\.0\)"):
        report.require_sound()


def test_a_rollout_flagged_trained_outside_of_the_lineage_is_lost_until_reconciled(tmp_path, ledger, run):
    report = audit(ledger, tmp_path / "traces", run[:1])
    assert report.lost == ("g000002.0", "g000002.1")
    ledger.reconcile(run[:1])
    assert audit(ledger, tmp_path / "traces", run[:1]).sound


def test_a_graded_rollout_without_its_stored_outcome_is_lost(tmp_path, ledger, run):
    tamper(tmp_path, "DELETE FROM blobs WHERE rollout_id = 'g000003.1' AND name = 'finished'")
    assert audit(ledger, tmp_path / "traces", run).lost == ("g000003.1",)


def test_a_slot_held_by_an_ended_rollout_is_leaked(tmp_path, ledger, run):
    tamper(tmp_path, "UPDATE slots SET rollout_id = 'g000001.0' WHERE slot = 7")
    assert audit(ledger, tmp_path / "traces", run).leaked == ("g000001.0",)


def test_the_audit_follows_the_lineage_and_not_the_states_in_the_ledger(tmp_path, ledger, run):
    tamper(tmp_path, "UPDATE rollouts SET state = 'graded' WHERE rollout_id = 'g000001.0'")  # it is in the weights
    report = audit(ledger, tmp_path / "traces", run)
    assert report.sound  # the lineage says trained, once; nothing holds a slot for it
    tamper(tmp_path, "UPDATE rollouts SET state = 'trained' WHERE rollout_id = 'g000003.0'")  # it is not
    report = audit(ledger, tmp_path / "traces", run)
    assert (report.lost, report.leaked) == (("g000003.0",), ("g000003.0",))


@pytest.mark.parametrize("content", [None, b"damaged"])
def test_a_missing_or_damaged_trace_is_reported(tmp_path, ledger, run, content):
    path = tmp_path / "traces" / "batch-000002.parquet"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    missing = audit(ledger, tmp_path / "traces", run).missing
    assert missing == ("trace of step 2 (g000002.0 …)",)


def test_a_rollout_of_the_lineage_that_the_ledger_never_saw_is_missing(tmp_path, ledger, run):
    assert "g000099.0" in audit(ledger, tmp_path / "traces", [*run, (3, ["g000099.0"])]).missing


def test_trained_without_a_grade_is_found_from_the_trace(tmp_path, ledger, run, kit):
    plan = plan_batch([kit.group("g000001", [1.0, 0.0, None])], batch_id="b000001", step=1, max_lag=9)
    first, *others = plan.members
    ungraded = replace(plan, members=(replace(first, outcome=kit.invalid), *others))
    record_batch(tmp_path / "traces", ungraded, kit.read)
    assert audit(ledger, tmp_path / "traces", run).ungraded == ("g000001.0",)
