"""Finished rollouts as files: they are read back or refused, and deleted when no longer needed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.small_disk import small_disk
from tests.small_rollouts import Kit

from etude.errors import LedgerError, StoreError
from etude.experience import Ledger, RolloutFiles, plan_batch, record_batch
from etude.experience.groups import Finished, Group
from etude.records.summary import RolloutSummary, StoredFile, summary_of
from etude.records.wire import pack


@pytest.fixture
def files(tmp_path: Path) -> RolloutFiles:
    return RolloutFiles(tmp_path / "rollouts")


def stored(files: RolloutFiles, rollout_id: str, attempt: int = 0) -> RolloutSummary:
    whole = replace(Kit.rollout(rollout_id, attempt=attempt), exports={"a.py": b"2"})
    return summary_of(whole, files.write(whole))


def test_a_rollout_comes_back_whole_and_its_exports_alone(files):
    summary = stored(files, "g000000.0")
    assert pack(files.read(summary)) == pack(replace(Kit.rollout("g000000.0"), exports={"a.py": b"2"}))
    assert files.read_exports(summary) == {"a.py": b"2"}
    assert [path.name for path in files.folder.iterdir()] == ["g000000.0.0.rollout"]


def test_a_summary_counts_what_the_rollout_holds():
    rollout = Kit.rollout("g000000.0", Kit.chain([(2, 4)], [(3, 1), (5, 3)]))
    summary = summary_of(rollout)
    assert (summary.num_turns, summary.num_sampled, summary.num_prompt) == (2, 8, 6)
    assert summary.oldest_steps == {2: 4, 3: 1, 5: 3}
    assert (summary.engines, summary.num_moves, summary.stored) == (("engine-0",), 0, None)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_other_bytes_than_were_stored_are_an_error_with_a_hint(files, data):
    summary = stored(files, "g000000.0")
    path = files.path("g000000.0", 0)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=r"the stored rollout g000000\.0 cannot be read") as caught:
        files.read(summary)
    assert "copy its file back" in caught.value.hint
    assert not files.has(summary)


def test_a_file_that_is_gone_is_named(files):
    summary = stored(files, "g000000.0")
    files.drop(summary)
    files.drop(summary)
    with pytest.raises(LedgerError, match=r"g000000\.0\.0\.rollout: No such file"):
        files.read(summary)


def test_rollout_files_that_the_ledger_no_longer_needs_are_deleted_and_others_stay(files, tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", capacity=8)
    ids = [f"g000000.{i}" for i in range(4)]
    ledger.admit(*map(Kit.spec, ids))
    ledger.start(3)
    ledger.finish(stored(files, ids[0]), Kit.graded(1.0))
    stored(files, ids[1])  # its worker has not answered yet
    stored(files, ids[2])
    ledger.move(ids[2], "requeued", reason="its worker died")
    stored(files, "heldout000000.0")  # of an evaluation that was killed
    (files.folder / f"{ids[1]}.0.rollout.123.tmp").touch()  # still being written
    (files.folder / f"{ids[3]}.0.rollout.123.tmp").touch()  # of a worker that was killed
    assert files.keep_only(files.names(), ledger.wanted_files()) == 3
    assert files.names() == [f"{ids[0]}.0.rollout", f"{ids[1]}.0.rollout", f"{ids[1]}.0.rollout.123.tmp"]
    ledger.close()


def test_a_disk_that_is_full_is_named_and_leaves_nothing_behind(tmp_path):
    with small_disk(tmp_path, "64k") as disk:
        files = RolloutFiles(disk / "rollouts")
        large = replace(Kit.rollout("g000000.0"), exports={"a.bin": b"x" * 500_000})
        with pytest.raises(StoreError, match="cannot be written") as caught:
            files.write(large)
        assert "free disk space" in caught.value.hint
        assert files.names() == []


def test_an_unreadable_file_of_an_invalid_rollout_costs_no_step(files, tmp_path):
    good, bad = stored(files, "g000000.0"), stored(files, "g000000.1")
    ended = (
        Finished(rollout_id="g000000.0", outcome=Kit.graded(1.0), summary=good),
        Finished(rollout_id="g000000.1", outcome=Kit.invalid, summary=bad),
    )
    plan = plan_batch([Group("g000000", ("g000000.0", "g000000.1"), ended)], batch_id="b", step=1, max_lag=0)
    files.drop(bad)
    batch, _ = record_batch(tmp_path, plan, files.read)
    assert batch.rollout_ids == ("g000000.0", "g000000.1")
    files.drop(good)
    with pytest.raises(LedgerError, match=r"the stored rollout g000000\.0 cannot be read"):
        record_batch(tmp_path, plan, files.read)
    assert [path.name for path in tmp_path.glob("batch*")] == ["batch-000001.parquet"]


def test_a_file_of_an_earlier_format_is_refused_by_name_and_counts_as_stored(files):
    stored(files, "g000000.0")
    path, rollout = files.path("g000000.0", 0), Kit.rollout("g000000.0")
    earlier = pack(rollout)
    path.write_bytes(earlier)
    summary = summary_of(rollout, StoredFile(len(earlier), hashlib.sha256(earlier).hexdigest()))
    for read in (files.read, files.read_exports):
        with pytest.raises(LedgerError, match=r"the stored rollout g000000\.0 has another format") as caught:
            read(summary)
        assert "etude-rollout 2" in caught.value.facts
        assert "the etude version that started the run" in caught.value.hint
    assert files.has(summary)
