from __future__ import annotations

import contextlib
import hashlib
import json
import resource
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.small_rollouts import Kit

from etude.errors import LedgerError, StoreError
from etude.experience import (
    Finished,
    Group,
    Straggler,
    plan_batch,
    read_trace,
    record_batch,
    step_metrics,
    trace_reader,
    trace_writer,
)
from etude.experience import traces as trace_module
from etude.experience.trace_reader import read_index, read_rollout
from etude.experience.traces import SCHEMA, trace_path
from etude.records import Batch, Completion, Sampling, Version, VersionSpan
from etude.records.completion import StopReason
from etude.records.rollout import Start, Trace, Turn, TurnKind
from etude.records.wire import I32, Routes, pack
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
    found = read_rollout(path, "g000000.0")
    assert (found.rollout.outcome, found.rollout.reward, found.first_row) == (kit.graded(1.0), 1.0, 0)
    [(leaf, sample)] = found.samples
    assert leaf == found.trace.leaves()[0]
    same = batch.samples[0]
    assert sample.path.token_ids.tolist() == same.path.token_ids.tolist()
    assert sample.path.mask.tolist() == same.path.mask.tolist()
    assert sample.advantages.tolist() == same.advantages.tolist()
    assert read_rollout(path, "g000000.1").first_row == 1
    found = read_rollout(path, "g000001.1")  # of a group without a signal
    assert (found.rollout.outcome, len(found.trace.turns), found.samples) == (kit.graded(1.0), 1, ())
    found = read_rollout(path, "g000002.1")
    assert (found.rollout.outcome, found.trace.turns) == (None, ())
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
    assert threads_left(f"etude.experience.trace_reader:{name}", path) == 0


def test_a_missing_trace_is_named(tmp_path):
    with pytest.raises(LedgerError, match="no trace at"):
        read_trace(tmp_path / "batch-000001.parquet")


def test_a_parquet_file_of_something_else_is_refused(tmp_path, kit):
    _, path = recorded(tmp_path, kit, max_lag=1)
    table = pq.read_table(path).drop_columns(["mask"])
    pq.write_table(table.replace_schema_metadata(None), path)
    with pytest.raises(LedgerError, match="columns are not those of a trace"):
        read_trace(path)


@pytest.fixture(scope="module")
def trace_bytes(tmp_path_factory):
    _, path = recorded(tmp_path_factory.mktemp("whole"), Kit(), max_lag=1)
    return path.read_bytes()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_give_an_error_with_a_hint_or_a_batch(tmp_path, trace_bytes, data):
    path, content = tmp_path / "batch-000005.parquet", bytearray(trace_bytes)
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(LedgerError):  # anything else is a defect
        assert read_trace(path).batch.step == read_index(path).step
        found = read_rollout(path, "g000000.0")
        assert found is None or found.rollout.rollout_id == "g000000.0"


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
    assert trace_module.recorded_steps(store) == [3]
    assert read_index(trace_path(store, 3)).graded == {"g000000.0", "g000000.1"}
    recorded_tree = read_rollout(trace_path(store, 3), "g000000.0")
    assert recorded_tree is not None
    assert recorded_tree.rollout.outcome.grade == 0.5
    with pytest.raises(LedgerError, match="no trace at batch-000004"):
        read_trace(trace_path(store, 4))


def test_a_step_that_is_written_in_many_parts_reads_as_one(tmp_path, kit, monkeypatch):
    whole, path = recorded(tmp_path / "whole", kit, max_lag=1)
    monkeypatch.setattr(trace_writer, "ROW_GROUP_BYTES", 1)
    batch, in_parts = recorded(tmp_path / "parts", kit, max_lag=1)
    assert pq.ParquetFile(in_parts).num_row_groups > pq.ParquetFile(path).num_row_groups == 1
    assert pack(read_trace(in_parts).batch) == pack(batch) == pack(whole)
    assert pq.read_table(in_parts).equals(pq.read_table(path), check_metadata=True)


def test_the_digest_is_of_what_the_page_says(tmp_path, kit):
    batch, path = recorded(tmp_path, kit, max_lag=1)
    names = ("token_ids", "mask", "logprobs", "steps", "kv_epochs", "routes", "digest")
    samples = [
        (s.rollout_id, s.origin, s.advantages, s.temperatures, *(getattr(s.path, name) for name in names))
        for s in batch.samples
    ]
    packed = pack((batch.step, batch.num_loss_tokens, batch.rollout_ids, samples))
    assert read_trace(path).digest == hashlib.sha256(packed).hexdigest()
    assert [trace_module._array_head(n) for n in (15, 16, 70_000)] == [
        pack([0] * n)[:k] for n, k in ((15, 1), (16, 3), (70_000, 5))
    ]


SAMPLING = Sampling(max_tokens=8, stop_token_ids=(1, 2), temperature=1.0, seed=2**62)


def routes_of(context: I32, version_step: int, kind: Any) -> Routes:
    """Routes that depend on a position's context and on the version, as an engine's do."""
    if kind is None:
        return np.zeros((0, 2, 2), np.uint8)
    seen = np.cumsum(context.astype(np.int64) * 31 + 7) + version_step
    return (seen[:, None, None] * np.array([[1, 3], [5, 7]]) % 200).astype(kind)


def turn_of(
    before: I32,
    prompt: I32,
    sampled: I32,
    *,
    parent: int | None = None,
    version_step: int = 3,
    routes: Any = np.uint8,
    **fields: Any,
) -> Turn:
    """A turn after the context `before`, whose routes its caller has up to the last but one token."""
    known = max(0, len(before) - 1)
    context = np.concatenate([before, prompt, sampled])[:-1]
    done = Completion(
        request_id="r",
        token_ids=sampled,
        logprobs=-np.arange(len(sampled), dtype=np.float32),
        routes=routes_of(context, version_step, routes)[known:],
        routes_start=known,
        spans=(VersionSpan(Version(version_step, "0" * 8, f"{version_step:064d}"), len(sampled)),),
        stop_reason=StopReason.LENGTH,
        engine="engine-1",
        num_cached=known,
    )
    return Turn(parent=parent, prompt_ids=prompt, completion=done, **{"sampling": SAMPLING, **fields})


def ids(*numbers: int) -> I32:
    return np.array(numbers, np.int32)


def of_traces(kit: Any, group_id: str, traces: Sequence[Trace]) -> Group:
    """A group whose members have these traces and different rewards."""
    finished = [
        Finished(rollout_id=f"{group_id}.{i}", outcome=kit.graded(float(i)), summary=kit.summary(f"{group_id}.{i}", t))
        for i, t in enumerate(traces)
    ]
    return Group(group_id, tuple(one.rollout_id for one in finished), tuple(finished))


def written(tmp_path: Path, kit: Any, *groups: Group, **options: Any) -> tuple[Batch, list[dict[str, Any]]]:
    """The batch of some groups, as it comes back to the byte, and the rows of its file."""
    batch, _ = record_batch(tmp_path, plan_batch(groups, batch_id="b", step=5, max_lag=9), kit.read, **options)
    path = trace_path(tmp_path, 5)
    assert pack(read_trace(path).batch) == pack(batch)
    return batch, pq.read_table(path).to_pylist()


def test_a_shared_prefix_of_siblings_is_in_the_file_once(tmp_path, kit):
    stem = np.arange(100, dtype=np.int32)
    traces = [Trace((turn_of(ids(), np.append(stem, ids(i, 7)), ids(i, i, 1)),)) for i in range(3)]
    batch, rows = written(tmp_path, kit, of_traces(kit, "g000000", traces), of_traces(kit, "g000001", traces))
    turns = [row for row in rows if row["row"] == "turn"]
    assert [len(row["prompt_ids"]) for row in turns] == [102, 2, 2] * 2, "groups are apart: each may be read alone"
    assert [(row["shared_with"], row["shared_tokens"]) for row in turns] == [(None, None), (0, 100), (0, 100)] * 2
    for row in turns[1:3]:
        assert row["shared_routes"] == 100
        assert not any(row["routes"][: 100 * 4])
        assert any(row["routes"][100 * 4 :])
    assert [len(sample.path.token_ids) for sample in batch.samples] == [105] * 4, "the second has the mean reward"


def test_what_branches_of_a_rollout_begin_with_is_in_the_file_once(tmp_path, kit):
    first = turn_of(ids(), ids(1, 2, 3), ids(4, 5))
    before = ids(1, 2, 3, 4, 5)
    branches = [turn_of(before, ids(6, 7, 8, i), ids(9, i), parent=0, kind=TurnKind.SUMMARY) for i in range(2)]
    again = turn_of(ids(), ids(1, 2, 8), ids(4))  # another context, which begins like the first one
    trace = Trace((first, *branches, again))
    batch, rows = written(tmp_path, kit, of_traces(kit, "g000000", [trace, Trace((first,))]))
    turns = [row for row in rows if row["row"] == "turn"]
    assert [(row["shared_with"], row["shared_tokens"], row["prompt_ids"]) for row in turns] == [
        (None, None, [1, 2, 3]),
        (None, None, [6, 7, 8, 0]),
        (1, 3, [1]),
        (0, 2, [8]),
        (0, 3, []),
    ]
    assert [row["kind"] for row in turns] == ["act", "summary", "summary", "act", "act"]
    leaves = [row["leaf"] for row in rows if row["row"] == "sample" and row["rollout_id"] == "g000000.0"]
    assert leaves == [1, 2, 3]
    assert [int(sample.path.mask.sum()) for sample in batch.samples] == [4, 2, 1, 2], "a token has loss once"


def test_a_sibling_is_stored_relative_to_one_of_its_own_version(tmp_path, kit):
    stem = np.arange(50, dtype=np.int32)
    traces = [Trace((turn_of(ids(), stem, ids(i), version_step=step),)) for i, step in enumerate((3, 4, 4, 3, 4))]
    _, rows = written(tmp_path, kit, of_traces(kit, "g000000", traces))
    turns = [row for row in rows if row["row"] == "turn"]
    assert [row["shared_with"] for row in turns] == [None, 0, 1, 0, 1]
    assert [any(row["routes"]) for row in turns] == [True, True, False, False, False]


def test_the_temperature_of_a_token_is_kept_where_it_is_not_the_runs(tmp_path, kit):
    def sampled_at(temperature: float) -> Sampling:
        return msgspec.structs.replace(SAMPLING, temperature=temperature)

    first = turn_of(ids(), ids(1, 2), ids(3, 4), sampling=sampled_at(0.5))
    second = turn_of(ids(1, 2, 3, 4), ids(5), ids(6), parent=0, sampling=sampled_at(0.0))
    both, alike = Trace((first, second)), Trace((first,))
    batch, rows = written(tmp_path, kit, of_traces(kit, "g000000", [both, alike]), temperature=0.5)
    assert batch.samples[0].temperatures.tolist() == [0.5, 0.5, 1.0], "greedy ones are compared at 1"
    assert batch.samples[1].temperatures is None
    assert [row["sampling"]["temperature"] for row in rows if row["row"] == "turn"] == [0.5, 0.0, 0.5]
    facts = json.loads(pq.read_schema(trace_path(tmp_path, 5)).metadata[b"etude.batch"])
    assert (facts["format"], facts["temperature"]) == (5, 0.5)


def test_a_turn_that_was_not_sampled_plainly_is_recorded_and_counted_but_not_trained(tmp_path, kit):
    odd = msgspec.structs.replace(
        SAMPLING, top_p=0.5, logit_bias=((3, -1.5),), grammar="{}", min_tokens=2, top_logprobs=4
    )
    first = turn_of(ids(), ids(1, 2), ids(3, 4, 5), sampling=odd)
    second = turn_of(ids(1, 2, 3, 4, 5), ids(6), ids(7, 8), parent=0)
    both, alone = Trace((first, second)), Trace((first,))
    groups = [of_traces(kit, "g000000", [both, alone])]
    batch, rows = written(tmp_path, kit, *groups)
    assert [(s.rollout_id, int(s.path.mask.sum())) for s in batch.samples] == [("g000000.0", 2)]
    turns = [row["sampling"] for row in rows if row["row"] == "turn"]
    assert [bool(row["others"]) for row in turns] == [True, False, True]
    table, _ = trace_reader.read_table(trace_path(tmp_path, 5))
    found = [turn.sampling for _, trace, _ in trace_reader._rollouts(table) for turn in trace.turns]
    assert found == [odd, SAMPLING, odd]
    (tmp_path / "again").mkdir()
    plan = plan_batch(groups, batch_id="b", step=5, max_lag=4)
    _, ref = record_batch(tmp_path / "again", plan, kit.read)
    assert (ref.num_trained, ref.num_not_plain, ref.num_masked) == (2, 6, 0)
    assert step_metrics(plan, ref)["not_plain_share"] == 6 / 8


def grown(rng: np.random.Generator, stem: I32, kind: Any) -> Trace:
    """A tree of a few turns, many of whose prompts begin alike."""
    turns, contexts = list[Turn](), list[I32]()
    for _ in range(int(rng.integers(1, 6))):
        parent = None if not turns or rng.random() < 0.3 else int(rng.integers(len(turns)))
        before = ids() if parent is None else contexts[parent]
        tail = rng.integers(0, 3, int(rng.integers(1, 4)), np.int32)
        prompt = np.concatenate([stem[: int(rng.integers(len(stem) + 1))], tail])
        sampled = rng.integers(0, 700, int(rng.integers(0, 4)), np.int32)
        turns.append(
            turn_of(
                before,
                prompt,
                sampled,
                parent=parent,
                version_step=int(rng.integers(3, 5)),
                routes=kind,
                kind=list(TurnKind)[int(rng.integers(3))],
                start=[None, *Start][int(rng.integers(7))],
            )
        )
        contexts.append(np.concatenate([before, prompt, sampled]))
    return Trace(tuple(turns))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])  # of eight trees each
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from([np.uint8, np.uint16, None]),
    group_bytes=st.sampled_from([1, trace_writer.ROW_GROUP_BYTES]),
)
def test_every_turn_of_any_tree_is_read_back(tmp_path, kit, seed, kind, group_bytes):
    rng = np.random.default_rng(seed)
    stem = rng.integers(0, 700, 12, np.int32)
    traces = [[grown(rng, stem, kind) for _ in range(4)] for _ in range(2)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trace_writer, "ROW_GROUP_BYTES", group_bytes)
        written(tmp_path, kit, *(of_traces(kit, f"g00000{i}", some) for i, some in enumerate(traces)))
    table, _ = trace_reader.read_table(trace_path(tmp_path, 5))
    found = [trace.turns for _, trace, _ in trace_reader._rollouts(table)]
    assert len(found) == 8
    for turns, was in zip(found, (trace for some in traces for trace in some), strict=True):
        for turn, written_turn in zip(turns, was.turns, strict=True):
            done = msgspec.structs.replace(turn.completion, request_id="r")
            if not len(done.routes):
                done = msgspec.structs.replace(done, routes=written_turn.completion.routes)
            assert pack(msgspec.structs.replace(turn, completion=done)) == pack(written_turn)


def test_a_file_of_a_later_format_is_refused_by_name(tmp_path, kit):
    _, path = recorded(tmp_path, kit, max_lag=1)
    table = pq.read_table(path)
    facts = json.loads(table.schema.metadata[b"etude.batch"]) | {"format": 6}
    pq.write_table(table.replace_schema_metadata({b"etude.batch": json.dumps(facts).encode()}), path)
    for read in (read_trace, read_index, lambda path: read_rollout(path, "g000000.0")):
        with pytest.raises(LedgerError, match="a trace has format 6"):
            read(path)
