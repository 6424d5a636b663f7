"""Erasing rollouts from a trace: their tokens are gone, what a run proves by the trace is not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.small_rollouts import Kit
from tests.unit.experience.test_traces import recorded

from etude.errors import LedgerError
from etude.experience import read_trace
from etude.experience.trace_erasure import erase_rollouts
from etude.experience.trace_reader import read_index, read_outcomes, read_rollout, read_step
from etude.experience.traces import ARRAYS, METADATA_KEY
from etude.stores import MemoryStore

ERASED = ["g000000.0", "g000000.1", "g000000.2"]


def test_an_erased_rollout_has_no_tokens_and_others_have_theirs(tmp_path: Path, kit: Kit) -> None:
    _, path = recorded(tmp_path, kit, max_lag=1)
    before, outcomes, other = read_index(path), read_outcomes(path)[1], read_rollout(path, "g000001.1")
    assert other is not None
    assert read_rollout(path, "g000000.0").trace.turns
    assert erase_rollouts(path, ["g000000.0", "g000009.9"]) == ERASED  # the group has its prompt
    for row in pq.read_table(path).to_pylist():
        if row["rollout_id"] in ERASED:
            assert [name for name in ARRAYS if row[name] is not None] == []
            assert row["reason"] in (None, "erased")
            assert row["evidence"] in (None, "")
    assert [tree.rollout.rollout_id for tree in read_step(path).trees if not tree.trace.turns][:3] == ERASED
    after, again = read_index(path), read_rollout(path, "g000001.1")
    assert (after.rollout_ids, after.graded) == (before.rollout_ids, before.graded)
    assert after.trained == before.trained - set(ERASED)
    assert [one.reward for one in read_outcomes(path)[1]] == [one.reward for one in outcomes]
    assert again is not None
    for one, same in zip(again.trace.turns, other.trace.turns, strict=True):
        assert one.prompt_ids.tolist() == same.prompt_ids.tolist()
        assert one.completion.token_ids.tolist() == same.completion.token_ids.tolist()


def test_an_erased_step_is_not_replayed_and_erasing_again_changes_nothing(tmp_path: Path, kit: Kit) -> None:
    _, path = recorded(tmp_path, kit, max_lag=1)
    assert erase_rollouts(path, ["nothing"]) == []
    read_trace(path)
    erase_rollouts(path, ["g000000.0"])
    with pytest.raises(LedgerError, match="3 of its rollouts were erased"):
        read_trace(path)
    data = path.read_bytes()
    assert erase_rollouts(path, ["g000000.0"]) == ERASED
    assert path.read_bytes() == data
    assert erase_rollouts(path, ["g000001.0"]) == [*ERASED, "g000001.0", "g000001.1"]
    facts = json.loads(pq.read_schema(path).metadata[METADATA_KEY])
    assert facts["erased"] == [*ERASED, "g000001.0", "g000001.1"]


def test_an_erasure_that_is_killed_leaves_the_file_before_or_after_it_and_no_other(
    tmp_path: Path, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = recorded(tmp_path, kit, max_lag=1)
    data = path.read_bytes()

    class Killed(BaseException):
        pass

    def killed(_: int) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", killed)
        with pytest.raises(Killed):
            erase_rollouts(path, ["g000000.0"])
    assert path.read_bytes() == data
    erase_rollouts(path, ["g000000.0"])
    assert read_index(path).trained == set()
    path.with_suffix(".tmp").write_bytes(data)  # of a process that was killed while it wrote the trace
    erase_rollouts(path, ["g000000.0"])
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith("batch-")] == [path.name]


def test_a_trace_in_a_store_is_erased_and_a_damaged_one_is_named(tmp_path: Path, kit: Kit) -> None:
    from etude.experience.traces import StoredTrace

    _, path = recorded(tmp_path, kit, max_lag=1)
    store = MemoryStore()
    stored = StoredTrace(store, path.name)
    stored.replace(path.read_bytes())
    assert erase_rollouts(stored, ["g000000.0"]) == ERASED
    assert read_index(stored).trained == set()
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(LedgerError, match="not a valid trace"):
        erase_rollouts(path, ["g000000.0"])
