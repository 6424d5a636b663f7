"""The scheduler: plans, priorities and forks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import EngineError
from etude.inference.errors import EngineBusy
from etude.inference.scheduler import Copy, Plan, Scheduler, Sequence
from etude.records.completion import Traffic

from .helpers import ask, version


def scheduler(**changes: int) -> Scheduler:
    return Scheduler(**{"num_slots": 2, "chunk_tokens": 16, "step_tokens": 32, "max_waiting": 4, **changes})


def compute(plan: Plan) -> None:
    """A fake runner without a model: every sampled token is 7."""
    for s in plan.decode:
        s.num_computed += 1
    for chunk in plan.chunks:
        chunk.sequence.num_computed = chunk.stop
    for s in plan.decode + [c.sequence for c in plan.chunks if c.last]:
        s.token_ids.append(7)
        s.logprobs.append(-1.0)


def join(
    queue: Scheduler, name: str, prompt: int | np.ndarray = 10, arrived: float = 0.0, **fields: object
) -> Sequence:
    sequence = Sequence(ask(name, prompt, **fields), arrived)
    queue.submit(sequence)
    return sequence


def test_prompts_are_cut_at_multiples_of_the_chunk_whatever_else_runs() -> None:
    def cuts(others: int) -> list[tuple[int, int]]:
        queue, seen = scheduler(num_slots=4), []
        long = join(queue, "long", 40)
        for i in range(others):
            join(queue, f"other{i}", 30)
        while long.num_computed < 40:
            plan = queue.plan()
            seen += [(c.start, c.stop) for c in plan.chunks if c.sequence is long]
            compute(plan)
        return seen

    assert cuts(0) == cuts(3) == [(0, 16), (16, 32), (32, 40)]


def test_a_step_computes_no_more_prompt_tokens_than_its_budget() -> None:
    queue = scheduler(num_slots=8, max_waiting=8)
    for i in range(8):
        join(queue, f"r{i}", 40)
    plan = queue.plan()
    assert sum(c.stop - c.start for c in plan.chunks) == 32


def test_a_chunk_larger_than_the_budget_still_goes_alone() -> None:
    queue = scheduler(step_tokens=4)
    join(queue, "a", 40)
    join(queue, "b", 40)
    assert [(c.start, c.stop) for c in queue.plan().chunks] == [(0, 16)]


def test_a_decoding_sequence_goes_on_beside_the_chunks_of_another() -> None:
    queue = scheduler()
    first = join(queue, "first", 4)
    compute(queue.plan())
    second = join(queue, "second", 40)
    plan = queue.plan()
    assert plan.decode == [first]
    assert [c.sequence for c in plan.chunks] == [second]


def test_requests_wait_for_slots_in_order_of_arrival_and_past_the_queue_are_refused() -> None:
    queue = scheduler(num_slots=1, max_waiting=2)
    first = join(queue, "first")
    compute(queue.plan())
    second, third = join(queue, "second"), join(queue, "third")
    with pytest.raises(EngineBusy, match="fourth"):
        join(queue, "fourth")
    queue.finish(first)
    queue.plan()
    assert second.slot is not None
    assert third.slot is None


def test_a_session_that_holds_a_slot_does_not_wait_behind_those_that_need_one() -> None:
    queue = scheduler(num_slots=2)
    mine = join(queue, "mine", 10, session="s")
    join(queue, "busy")
    compute(queue.plan())
    prompt = mine.request.prompt_ids
    queue.finish(mine)
    stranger = join(queue, "stranger")
    again = join(queue, "again", prompt, session="s")
    queue.plan()
    assert again.slot is not None
    assert again.num_cached == 9
    assert stranger.slot is None


def test_a_cancelled_sequence_frees_its_slot_at_the_next_look() -> None:
    queue = scheduler(num_slots=1)
    first = join(queue, "first")
    compute(queue.plan())
    first.future.cancel()
    assert queue.remove_departed(0.0, stepped=0.0) == [first]
    assert queue.slots.num_available == 1
    assert not queue.plan()


def test_a_late_request_fails_naming_its_deadline_and_its_phase() -> None:
    queue = scheduler(num_slots=1)
    running, waiting = join(queue, "running", arrived=5.0), join(queue, "waiting", arrived=4.0)
    compute(queue.plan())
    assert queue.remove_departed(64.0, stepped=5.0) == []
    assert queue.remove_departed(65.0, stepped=5.0) == [waiting, running], (
        "no step for 60 s, however long it waited before"
    )
    with pytest.raises(
        EngineError,
        match=r"deadline of 60 s without a step of the engine: 1 of 8 tokens",
    ):
        raise running.future.exception(0)
    with pytest.raises(EngineError, match=r"(?s)waiting passed its deadline.*waiting for a KV slot"):
        raise waiting.future.exception(0)


def test_a_swap_closes_spans_and_counts_only_for_kept_keys() -> None:
    queue = scheduler(num_slots=2)
    early = join(queue, "early", 4)
    compute(queue.plan())
    compute(queue.plan())
    late = join(queue, "late", 4)
    queue.swapped(version(0))
    compute(queue.plan())
    early.close_span(version(1))
    late.close_span(version(1))
    assert [(s.version.step, s.num_tokens, s.kv_epoch) for s in early.spans] == [(0, 2, 0), (1, 1, 1)]
    assert [(s.version.step, s.num_tokens, s.kv_epoch) for s in late.spans] == [(1, 1, 0)]


def test_a_version_that_only_read_of_the_prompt_leaves_an_empty_span_and_its_age_counts() -> None:
    queue = scheduler()
    reading = join(queue, "reading", 40)
    compute(queue.plan())
    assert reading.num_computed == 16
    queue.swapped(version(3))
    queue.swapped(version(4))
    compute(queue.plan())
    compute(queue.plan())
    reading.close_span(version(7))
    assert [(s.version.step, s.num_tokens, s.kv_epoch) for s in reading.spans] == [(3, 0, 0), (7, 1, 2)]


def test_a_cached_prefix_that_lives_through_a_swap_before_anything_is_computed_counts_as_old() -> None:
    queue = scheduler()
    first = join(queue, "first", 10, session="s")
    compute(queue.plan())
    queue.finish(first)
    again = join(queue, "again", first.context(), session="s")
    queue.plan()  # it has its slot, and nothing of it is computed yet
    assert again.num_computed == again.num_cached > 0
    queue.swapped(version(3))
    compute(queue.plan())
    again.close_span(version(4))
    assert [(s.version.step, s.num_tokens, s.kv_epoch) for s in again.spans] == [(3, 0, 0), (4, 1, 1)]


def test_while_a_prompt_of_production_is_computed_rollouts_stand_still_and_share_its_steps_afterwards() -> None:
    queue = scheduler(num_slots=4)
    rollouts = [join(queue, f"r{i}", 10) for i in range(2)]
    compute(queue.plan())
    first = join(queue, "p", 40, traffic=Traffic.PRODUCTION)
    while first.num_computed < 40:
        plan = queue.plan()
        assert [c.sequence for c in plan.chunks] == [first] * len(plan.chunks)
        assert not plan.decode
        compute(plan)
    plan = queue.plan()
    assert {*plan.decode} == {first, *rollouts}
    assert all(r.num_computed == 10 and len(r.token_ids) == 1 for r in rollouts), "their KV was kept"


def test_production_takes_the_slot_of_the_rollout_that_loses_least_and_that_one_is_next() -> None:
    queue = scheduler(num_slots=2)
    long, short = join(queue, "long", 30), join(queue, "short", 10)
    compute(queue.plan())
    waiting = join(queue, "waiting", 10)
    first = join(queue, "p", 10, traffic=Traffic.PRODUCTION)
    plan = queue.plan()
    assert [c.sequence for c in plan.chunks] == [first]
    assert list(queue.waiting) == [short, waiting]
    assert (short.num_computed, short.token_ids, short.slot, queue.num_preempted) == (0, [], None, 1)
    assert long.slot is not None
    compute(plan)
    queue.finish(first)
    queue.plan()
    assert short.slot is not None
    assert list(queue.waiting) == [waiting]


def test_production_takes_no_slot_of_production_nor_of_a_rollout_whose_tokens_were_told() -> None:
    queue = scheduler(num_slots=2)
    join(queue, "p0", 10, traffic=Traffic.PRODUCTION)
    told = join(queue, "told", 10)
    told.on_tokens = lambda: None
    compute(queue.plan())
    late = join(queue, "p1", 10, traffic=Traffic.PRODUCTION)
    queue.plan()
    assert late.slot is None
    assert queue.num_preempted == 0


def test_a_queue_full_of_rollouts_refuses_rollouts_and_takes_production() -> None:
    queue = scheduler(num_slots=1, max_waiting=2)
    join(queue, "running")
    queue.plan()
    for i in range(2):
        join(queue, f"r{i}")
    with pytest.raises(EngineBusy, match="2 requests of its class"):
        join(queue, "r2")
    for i in range(2):
        join(queue, f"p{i}", traffic=Traffic.PRODUCTION)
    with pytest.raises(EngineBusy):
        join(queue, "p2", traffic=Traffic.PRODUCTION)


def test_a_fork_begins_with_a_copy_of_what_both_contexts_share_and_its_source_stays() -> None:
    queue = scheduler(num_slots=3)
    source = join(queue, "source", np.arange(10), max_tokens=1)
    compute(queue.plan())
    queue.finish(source)
    branch = join(queue, "branch", np.array([0, 1, 2, 3, 9, 9]), fork_from="source")
    plan = queue.plan()
    assert plan.copies == [Copy(0, 1, 4)]
    assert [(c.start, c.stop) for c in plan.chunks] == [(4, 6)]
    assert (branch.num_cached, branch.row) == (4, 1)
    again = join(queue, "again", np.arange(12), session="source")
    compute(plan)
    assert (queue.plan().copies, again.num_cached, again.row) == ([], 10, 0)


def test_a_fork_whose_prompt_is_all_known_computes_its_last_token() -> None:
    queue = scheduler()
    source = join(queue, "source", np.arange(10), max_tokens=1)
    compute(queue.plan())
    queue.finish(source)
    branch = join(queue, "branch", np.arange(10), fork_from="source")
    queue.plan()
    assert branch.num_cached == 9


def test_the_source_of_a_fork_loses_its_slot_last_and_then_nothing_is_copied() -> None:
    queue = scheduler(num_slots=2)
    for name in ("source", "other"):
        one = join(queue, name, np.arange(10), max_tokens=1)
        compute(queue.plan())
        queue.finish(one)
    first = join(queue, "first", np.arange(8), fork_from="source")
    plan = queue.plan()
    assert (plan.copies, first.row) == ([Copy(0, 1, 7)], 1)
    compute(plan)
    second = join(queue, "second", np.arange(8), fork_from="source")
    plan = queue.plan()
    assert (plan.copies, second.row, second.num_cached) == ([], 0, 7)  # it takes the source's own slot


def test_after_a_swap_nothing_is_forked_from_keys_of_the_old_version() -> None:
    queue = scheduler(num_slots=3)
    idle, running = join(queue, "idle", np.arange(10), max_tokens=1), join(queue, "running", np.arange(10))
    compute(queue.plan())
    queue.finish(idle)
    queue.swapped(version(0))
    for name in ("idle", "running"):
        branch = join(queue, f"of {name}", np.arange(10), fork_from=name)
        plan = queue.plan()
        assert (branch.num_cached, plan.copies) == (0, [])
        queue.finish(branch)
    assert running.stale


CALLS = st.tuples(
    st.sampled_from("abcd"),
    st.sampled_from([None, *"abcd"]),
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.sampled_from(Traffic),
    st.booleans(),
)


@settings(max_examples=300)
@given(st.lists(st.one_of(CALLS, st.just("step"), st.just("swap")), max_size=30))
def test_whatever_is_forked_each_row_holds_the_keys_of_its_own_context(moves: list[Any]) -> None:
    """A model of the runner's memory: a row's key at a position is (version, token)."""
    queue = scheduler(num_slots=3, max_waiting=99)
    rows: list[list[Any]] = [[None] * 64 for _ in range(3)]
    current, number = 0, 0

    def step() -> None:
        plan = queue.plan()
        for copy in plan.copies:
            rows[copy.target][: copy.stop] = rows[copy.source][: copy.stop]
        before = {s: s.num_computed for s in queue.running}
        compute(plan)
        for s in queue.running:
            for at in range(before[s], s.num_computed):
                rows[s.row][at] = (current, int(s.context()[at]))
            assert [token for _, token in rows[s.row][: s.num_computed]] == s.context().tolist()
            if not s.stale:
                assert {made for made, _ in rows[s.row][: s.num_computed]} <= {current}
        for s in [s for s in queue.running if s.finished]:
            queue.finish(s)

    for move in moves:
        if move == "step":
            step()
        elif move == "swap":
            queue.swapped(version(current))
            current += 1
        else:
            session, source, prompt, traffic, keep = move
            number += 1
            fields = {"session": session, "fork_from": source, "traffic": traffic, "keep_session": keep}
            join(queue, f"r{number}", np.array(prompt), max_tokens=3, **fields)
    while queue.running or queue.waiting:
        step()
