from __future__ import annotations

import contextlib
import hashlib
import resource
import signal
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.errors import LedgerError, StoreError
from etude.experience import Finished, Group, Straggler, plan_batch, read_trace, record_batch
from etude.experience import traces as trace_module
from etude.experience.traces import SCHEMA, read_index, read_rollout, trace_path
from etude.records.rollout import Trace
from etude.records.wire import pack
from etude.stores import MemoryStore


def recorded(tmp_path, kit, **options):
    groups = [
        kit.group("g000000", [1.0, 0.0, None], kit.chain([(3, 4)], [(3, 2), (4, 5)])),
        kit.group("g000001", [1.0, 1.0], kit.chain([(4, 4)])),
        Group("g000002", ("g000002.0", "g000002.1"), (Finished(rollout_id="g000002.0", outcome=kit.invalid),)),
    ]
    batch, _ = record_batch(tmp_path, plan_batch(groups, batch_id="b000005", step=5, **options), kit.read)
    return batch, trace_path(tmp_path, 5)


@pytest.mark.parametrize(("max_lag", "straggler"), [(1, Straggler.WAIT), (0, Straggler.MASK)])
def test_a_batch_comes_back_to_the_byte(tmp_path, kit, max_lag, straggler):
    batch, path = recorded(tmp_path, kit, max_lag=max_lag, straggler=straggler)
    assert pack(read_trace(path).batch) == pack(batch)
    assert len(batch.samples) == 2
    assert batch.samples[0].path.routes.dtype == np.uint8


@pytest.mark.parametrize("kind", [np.uint16, None])
def test_routes_of_two_bytes_and_none_at_all_come_back_to_the_byte(tmp_path, kit, kind):
    trace = kit.chain([(3, 4)])
    [turn] = trace.turns
    done = turn.completion
    routes = done.routes[:0] if kind is None else done.routes.astype(kind) + kind(300)
    done = msgspec.structs.replace(done, routes=routes)
    groups = [kit.group("g000000", [1.0, 0.0], Trace((msgspec.structs.replace(turn, completion=done),)))]
    batch, _ = record_batch(tmp_path, plan_batch(groups, batch_id="b000004", step=4, max_lag=0), kit.read)
    got = read_trace(trace_path(tmp_path, 4)).batch
    assert pack(got) == pack(batch)
    assert len(got.samples[0].path.routes) == (0 if kind is None else 7)


def test_every_consumed_rollout_and_its_outcome_is_kept(tmp_path, kit):
    _, path = recorded(tmp_path, kit, max_lag=1)
    outcomes = {one.rollout_id: one.outcome for one in read_trace(path).rollouts}
    assert outcomes == {
        "g000000.0": kit.graded(1.0),
        "g000000.1": kit.graded(0.0),
        "g000000.2": kit.invalid,
        "g000001.0": kit.graded(1.0),
        "g000001.1": kit.graded(1.0),
        "g000002.0": kit.invalid,
        "g000002.1": None,  # cancelled: it has no outcome
    }
    index = read_index(path)
    assert (index.step, index.batch_id, index.rollout_ids) == (5, "b000005", frozenset(outcomes))
    assert index.trained == {"g000000.0", "g000000.1"}
    assert index.graded == {"g000000.0", "g000000.1", "g000001.0", "g000001.1"}


def test_one_rollout_is_read_with_its_outcome_and_the_tokens_of_its_paths(tmp_path, kit):
    batch, path = recorded(tmp_path, kit, max_lag=1)
    outcome, [tokens] = read_rollout(path, "g000000.0")
    assert outcome == kit.graded(1.0)
    assert tokens.tolist() == batch.samples[0].path.token_ids.tolist()
    outcome, paths = read_rollout(path, "g000001.1")  # of a group without a signal
    assert outcome == kit.graded(1.0)
    assert len(paths) == 1
    assert read_rollout(path, "g000002.1") == (None, [])
    assert read_rollout(path, "g000009.0") is None


def test_the_file_has_the_documented_columns(tmp_path, kit):
    _, path = recorded(tmp_path, kit, max_lag=1)
    assert pq.read_schema(path).names == SCHEMA.names
    page = (Path(__file__).parents[3] / "docs/formats/traces.md").read_text()
    assert [name for name in SCHEMA.names if f"| `{name}` |" not in page] == []


def test_writing_the_same_batch_again_gives_the_same_bytes(tmp_path, kit):
    _, one = recorded(tmp_path / "a", kit, max_lag=1)
    _, two = recorded(tmp_path / "b", kit, max_lag=1)
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("name", ["read_index", "read_trace"])
def test_reading_leaves_no_thread_that_could_abort_the_interpreter_at_its_end(tmp_path, kit, threads_left, name):
    _, path = recorded(tmp_path, kit, max_lag=1)
    assert threads_left(f"etude.experience.traces:{name}", path) == 0


def test_a_missing_trace_is_named(tmp_path):
    with pytest.raises(LedgerError, match="no trace at"):
        read_trace(tmp_path / "batch-000001.parquet")


def test_a_parquet_file_of_something_else_is_refused(tmp_path, kit):
    _, path = recorded(tmp_path, kit, max_lag=1)
    table = pq.read_table(path).drop_columns(["mask"])
    pq.write_table(table.replace_schema_metadata(None), path)
    with pytest.raises(LedgerError, match="columns are not those of a trace"):
        read_trace(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_give_an_error_with_a_hint_or_a_batch(tmp_path, kit, data):
    _, path = recorded(tmp_path, kit, max_lag=1)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(LedgerError):  # anything else is a defect
        assert read_trace(path).batch.step == read_index(path).step
        assert read_rollout(path, "g000000.0") is None or len(read_rollout(path, "g000000.0")) == 2


def test_a_full_disk_leaves_the_old_trace_whole(tmp_path, kit):
    batch, path = recorded(tmp_path, kit, max_lag=1)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
    try:
        with pytest.raises(StoreError, match="cannot be written"):
            recorded(tmp_path, kit, max_lag=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert pack(read_trace(path).batch) == pack(batch)


def test_a_trace_in_a_store_comes_back_as_from_a_folder_and_is_replaced_when_its_step_is_redone(kit):
    store = MemoryStore()
    for reward in (1.0, 0.5):
        groups = [kit.group("g000000", [reward, 0.0])]
        batch, _ = record_batch(store, plan_batch(groups, batch_id="b000003", step=3, max_lag=9), kit.read)
        assert pack(read_trace(trace_path(store, 3)).batch) == pack(batch)
    assert trace_module.recorded(store) == [3]
    assert read_index(trace_path(store, 3)).graded == {"g000000.0", "g000000.1"}
    outcome, _ = read_rollout(trace_path(store, 3), "g000000.0")
    assert outcome.grade == 0.5
    with pytest.raises(LedgerError, match="no trace at batch-000004"):
        read_trace(trace_path(store, 4))


def test_a_step_that_is_written_in_many_parts_reads_as_one(tmp_path, kit, monkeypatch):
    whole, path = recorded(tmp_path / "whole", kit, max_lag=1)
    monkeypatch.setattr(trace_module, "ROW_GROUP_BYTES", 1)
    batch, in_parts = recorded(tmp_path / "parts", kit, max_lag=1)
    assert pq.ParquetFile(in_parts).num_row_groups > pq.ParquetFile(path).num_row_groups == 1
    assert pack(read_trace(in_parts).batch) == pack(batch) == pack(whole)
    assert pq.read_table(in_parts).equals(pq.read_table(path), check_metadata=True)


def test_the_digest_is_of_what_the_page_says(tmp_path, kit):
    batch, path = recorded(tmp_path, kit, max_lag=1)
    names = ("token_ids", "mask", "logprobs", "steps", "kv_epochs", "routes", "digest")
    samples = [(s.rollout_id, s.advantage, *(getattr(s.path, name) for name in names)) for s in batch.samples]
    packed = pack((batch.step, batch.num_loss_tokens, batch.rollout_ids, samples))
    assert read_trace(path).digest == hashlib.sha256(packed).hexdigest()
    assert [trace_module._array_head(n) for n in (15, 16, 70_000)] == [
        pack([0] * n)[:k] for n, k in ((15, 1), (16, 3), (70_000, 5))
    ]
