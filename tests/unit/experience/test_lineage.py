"""Versions of lost lineages: how far away they are, and that no token of one is trained past the bound."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.small_rollouts import graded, read, summary, turn

from etude.experience import Finished, Group, Ledger, Straggler, make_batch, plan_batch, record_batch, step_metrics
from etude.experience.lineage import MAX_VERSIONS, Branches, with_apparent_steps
from etude.records import Completion, Sample, Trace, Version, VersionSpan
from etude.records.completion import StopReason
from etude.records.summary import with_versions_of


def version(step: int, incarnation: str, digest: int | None = None) -> Version:
    """Its bytes are its own, or those of that digest."""
    mine = f"{step:04x}{incarnation}" if digest is None else f"{digest:04x}"
    return Version(step, incarnation * 8, mine.ljust(64, "0"))


def trace(*spans: tuple[Version, int, int]) -> Trace:
    """One turn of two prompt tokens and these spans: version, tokens, epoch of the kept keys."""
    num = sum(tokens for _, tokens, _ in spans)
    completion = Completion(
        request_id="r",
        token_ids=np.arange(num, dtype=np.int32),
        logprobs=np.full(num, -1.0, np.float32),
        routes=np.zeros((0, 0, 0), np.uint8),
        routes_start=0,
        spans=tuple(VersionSpan(*span) for span in spans),
        stop_reason=StopReason.STOP,
        engine="engine-0",
    )
    return Trace((turn(None, 2, completion),))


def group(*traces: Trace) -> Group:
    made = [summary(f"g000000.{i}", one) for i, one in enumerate(traces)]
    finished = [Finished(rollout_id=r.rollout_id, outcome=graded(i % 2), summary=r) for i, r in enumerate(made)]
    return Group("g000000", tuple(r.rollout_id for r in made), tuple(finished))


FIRST = [version(step, "a") for step in range(19)]  # 0 to 18, checkpoint at 10
AGAIN = version(10, "b", 10)  # the checkpoint's own bytes
FIRST[10] = version(10, "a", 10)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_the_distance_is_the_way_along_both_branches(ancestor: int, dead: int, live: int) -> None:
    first = [version(step, "a") for step in range(ancestor + dead + 1)]
    again = [version(ancestor, "b", 7), *(version(ancestor + 1 + step, "b") for step in range(live))]
    branches, head = Branches([*first, *again]), ancestor + live
    assert head - branches.apparent_step(first[-1]) == dead + live
    assert all(branches.apparent_step(one) == one.step for one in [*first[: ancestor + 1], *again])


def test_a_branch_of_a_branch_counts_from_where_it_left() -> None:
    second = [version(10, "b", 10), *(version(step, "b") for step in range(11, 16))]
    third = [version(13, "c", 13), *(version(step, "c") for step in range(14, 17))]
    branches = Branches([*FIRST, *second, *third])
    assert branches.apparent_step(second[2]) == 12
    assert 16 - branches.apparent_step(second[5]) == (15 - 13) + (16 - 13)
    assert 16 - branches.apparent_step(FIRST[18]) == (18 - 10) + (16 - 10)


def test_steps_that_were_repeated_bit_for_bit_are_not_lost() -> None:
    repeated = [version(step, "b", 100 + step) for step in (11, 12)]
    first = [*FIRST[:11], *(version(step, "a", 100 + step) for step in (11, 12)), *FIRST[13:]]
    branches = Branches([*first, AGAIN, *repeated, version(13, "b")])
    assert [branches.apparent_step(one) for one in first[10:14]] == [10, 11, 12, 11], "12 is the last that both have"


def test_what_is_not_known_is_believed_up_to_the_head_and_no_further() -> None:
    branches = Branches([version(5, "b"), version(6, "b")])
    assert branches.apparent_step(version(4, "c")) == 4
    assert branches.apparent_step(version(6, "c")) == 6
    assert branches.apparent_step(version(7, "b")) == 7, "published, and not committed here yet"
    assert branches.apparent_step(version(9, "c")) == 1
    assert Branches().apparent_step(version(9, "c")) == 9


@pytest.mark.parametrize("straggler", Straggler)
def test_tokens_of_a_lost_lineage_past_the_bound_are_masked_and_none_has_a_negative_lag(
    straggler: Straggler, tmp_path: Path
) -> None:
    """The learner is at step 12 after a restart from 10; a version of step 14 lies (14 - 10) + (12 - 10) away."""
    live = [AGAIN, version(11, "b"), version(12, "b")]
    branches = Branches([*FIRST, *live])
    near, far, fresh = (FIRST[11], 3, 0), (FIRST[14], 3, 0), (live[2], 4, 0)
    found = with_apparent_steps(branches, group(trace(far, fresh), trace(near), trace(fresh)))
    plan = plan_batch([found], batch_id="b", step=13, max_lag=3, straggler=straggler)
    batch, ref = record_batch(tmp_path, plan, read)
    assert found.lost == {"g000000.0", "g000000.1"}
    assert {s.rollout_id: int(s.path.mask.sum()) for s in batch.samples} == {
        "g000000.0": 4,
        "g000000.1": 3,
        "g000000.2": 4,
    }
    assert step_metrics(plan, ref)["token_lag"] == {"0": 8, "3": 3, "6": 3}


def test_keys_of_a_lost_lineage_that_were_kept_make_what_comes_after_as_old() -> None:
    """An engine goes on with 12 of the lost lineage, 13 of it, then with the restart's: the keys stay those of 13."""
    branches = Branches([*FIRST, AGAIN, version(11, "b")])
    spans = ((FIRST[12], 2, 0), (FIRST[13], 1, 1), (version(11, "b"), 2, 2))
    found = with_apparent_steps(branches, group(trace(*spans)))
    ((mine, _),) = found.valid
    seen = with_versions_of(read(mine), mine)
    path = seen.trace.path(0)
    assert path.oldest_steps[path.mask].tolist() == [8, 8, 7, 7, 7]
    assert seen.trace.turns[0].completion.oldest_steps.tolist() == [8, 8, 7, 7, 7]
    assert mine.oldest_steps == {7: 3, 8: 2}


def test_a_rollout_of_negative_apparent_steps_alone_is_of_one_version_and_trained_if_it_is_near() -> None:
    branches = Branches([version(0, "a"), version(1, "a"), version(0, "b"), version(1, "b")])
    found = with_apparent_steps(branches, group(trace((version(1, "a"), 3, 0)), trace((version(1, "b"), 3, 0))))
    batch = make_batch(plan_batch([found], batch_id="b", step=2, max_lag=2), read)
    assert [sample.oldest_step for sample in batch.samples] == [-1, 1]
    assert all(sample.single_version for sample in batch.samples)
    mixed = msgspec.structs.replace(batch.samples[1].path, steps=np.array([1, 1, -1, 1, 1], np.int32))
    assert not Sample.uniform("r", mixed, 1.0).single_version


def test_a_group_of_the_lineage_is_left_as_it_is() -> None:
    mine = group(trace((FIRST[3], 2, 0)))
    assert with_apparent_steps(Branches(FIRST), mine) is mine


def test_the_ledger_remembers_which_versions_were_published_and_sees_groups_by_them(ledger: Ledger) -> None:
    from tests.small_rollouts import spec

    dead, head = version(2, "a"), version(1, "b", 1)
    one = summary("g000000.0", trace((dead, 3, 0)))
    ledger.admit(spec("g000000.0"))
    ledger.move("g000000.0", "running")
    assert ledger.finish(one, graded(1.0))
    for published in (version(0, "a"), version(1, "a", 1), dead):
        ledger.commit([], published)
    assert ledger.group("g000000").lost == frozenset()
    ledger.reconcile([], head=head)
    assert ledger.versions()[-2:] == [dead, head]
    seen = ledger.group("g000000")
    assert seen.lost == {"g000000.0"}
    assert [one.step for one in seen.valid[0][0].versions] == [0]
    for step in range(2, MAX_VERSIONS + 9):
        ledger.commit([], version(step, "b"))
    assert len(ledger.versions()) == MAX_VERSIONS
