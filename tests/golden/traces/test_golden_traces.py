"""Trace files of formats 1 to 4, written by the etude that wrote that format, are still read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from etude.experience import read_trace
from etude.experience.trace_reader import read_index, read_rollout
from etude.experience.traces import batch_digest
from etude.records import Graded

FILE = Path(__file__).parent / "format-1" / "batch-000005.parquet"
DIGEST = "7b77a34e38413a68fb69c8dad8cbec859fa42fe189f0138b9ed88d1c8e0e0a0e"
DIGEST_2 = "f79db5589aeeba09830b7c140f3b56660d232b97573478db11b2cf3c1c1c91da"


def test_the_batch_of_a_file_of_format_1_equals_the_trained_batch() -> None:
    recorded = read_trace(FILE)
    batch = recorded.batch
    assert (batch.batch_id, batch.step, batch.num_loss_tokens, batch.lr_share) == ("b000005", 5, 30, 1.0)
    given = {sample.rollout_id: sample.advantages.tolist() for sample in batch.samples}
    assert given == {"g000000.0": [0.5] * 5, "g000000.1": [-0.5] * 5}
    path = batch.samples[0].path
    assert path.steps.tolist() == [3] * 12 + [4] * 5
    assert path.mask.tolist() == [False] * 12 + [True] * 5
    assert path.routes.shape == (len(path.token_ids), 2, 2)
    assert (path.routes[-1] == np.iinfo(np.uint8).max).all()
    assert recorded.digest == batch_digest(batch) == DIGEST


def test_the_rollouts_of_a_file_of_format_1_are_found_with_their_outcomes() -> None:
    index = read_index(FILE)
    assert (index.step, len(index.rollout_ids)) == (5, 7)
    assert index.trained == {"g000000.0", "g000000.1"}
    assert index.graded == {"g000000.0", "g000000.1", "g000001.0", "g000001.1"}
    outcomes = {one.rollout_id: one.outcome for one in read_trace(FILE).rollouts}
    assert outcomes["g000002.1"] is None
    found = read_rollout(FILE, "g000000.0")
    assert found is not None
    assert isinstance(found.rollout.outcome, Graded)
    [turn] = found.trace.turns
    assert turn.prompt_ids.tolist() == read_trace(FILE).batch.samples[0].path.token_ids.tolist()
    assert read_rollout(FILE, "g000009.0") is None


def test_the_batch_of_a_file_of_format_2_is_the_one_that_was_trained_on() -> None:
    file = Path(__file__).parent / "format-2" / "batch-000005.parquet"
    recorded = read_trace(file)
    assert recorded.digest == batch_digest(recorded.batch) == DIGEST_2
    assert read_index(file).trained == {"g000000.0", "g000000.1"}
    found = read_rollout(file, "g000000.0")
    assert found is not None
    assert isinstance(found.rollout.outcome, Graded)
    [(leaf, sample)] = found.samples
    assert {turn.start for turn in found.trace.turns} == {None}
    assert (
        found.trace.path(leaf).token_ids.tolist()
        == sample.path.token_ids.tolist()
        == recorded.batch.samples[0].path.token_ids.tolist()
    )


def test_the_batch_of_a_file_of_format_3_is_the_one_that_was_trained_on() -> None:
    file = Path(__file__).parent / "format-3" / "batch-000005.parquet"
    recorded = read_trace(file)
    assert recorded.digest == batch_digest(recorded.batch) == DIGEST_2
    found = read_rollout(file, "g000000.1")
    assert found is not None
    assert (found.rollout.reward, found.first_row, len(found.samples)) == (0.0, 1, 1)
    assert {(turn.start, turn.completion.num_cached) for turn in found.trace.turns} == {(None, 0)}


def test_the_batch_of_a_file_of_format_4_is_the_one_that_was_trained_on() -> None:
    file = Path(__file__).parent / "format-4" / "batch-000005.parquet"
    recorded = read_trace(file)
    assert recorded.digest == batch_digest(recorded.batch) == DIGEST_2
    assert [sample.hints for sample in recorded.batch.samples] == [(), ()]
    assert read_rollout(file, "g000000.1") is not None
