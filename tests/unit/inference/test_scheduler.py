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
    return Scheduler(
        **{"num_slots": 2, "context_tokens": 128, "chunk_tokens": 16, "step_tokens": 32, "max_waiting": 4, **changes}
    )


def compute(plan: Plan) -> None:
    """A fake runner without a model: every sampled token is 7."""
    for s in plan.decode:
        s.num_computed += 1
    for chunk in plan.chunks:
        chunk.sequence.num_computed = chunk.stop
    for s in plan.decode + [c.sequence for c in plan.chunks if c.last]:
        s.token_ids.append(7)
        s.logprobs.append(-1.0)


def context(sequence: Sequence) -> np.ndarray:
    """The tokens whose keys are in its slot."""
    tokens = np.concatenate([sequence.request.prompt_ids, np.array(sequence.token_ids, np.int32)])
    return tokens[: sequence.num_computed].astype(np.int32)


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
    again = join(queue, "again", context(first), session="s")
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
    assert (short.num_computed, len(short.token_ids), short.slot, queue.num_preempted) == (0, 1, None, 1)
    assert long.slot is not None
    compute(plan)
    queue.finish(first)
    queue.plan()
    assert short.slot is not None
    assert list(queue.waiting) == [waiting]


def test_production_takes_no_slot_of_production() -> None:
    queue = scheduler(num_slots=1)
    join(queue, "p0", 10, traffic=Traffic.PRODUCTION)
    compute(queue.plan())
    late = join(queue, "p1", 10, traffic=Traffic.PRODUCTION)
    queue.plan()
    assert late.slot is None
    assert queue.num_preempted == 0


def test_a_preempted_rollout_computes_its_tokens_again_with_its_prompt_and_samples_the_next_one() -> None:
    queue = scheduler(num_slots=1)
    rollout = join(queue, "r", 20, max_tokens=50)
    for _ in range(8):
        compute(queue.plan())
    sampled = list(rollout.token_ids)
    assert len(sampled) > 2
    first = join(queue, "p", 10, max_tokens=1, traffic=Traffic.PRODUCTION)
    compute(queue.plan())
    queue.finish(first)
    assert rollout.token_ids == sampled
    computed: list[int] = []
    while len(rollout.token_ids) == len(sampled):
        plan = queue.plan()
        assert not plan.decode
        computed += [int(t) for c in plan.chunks for t in c.token_ids]
        compute(plan)
    assert computed == [*rollout.request.prompt_ids.tolist(), *sampled]
    assert rollout.token_ids[:-1] == sampled
    assert rollout.num_computed == 20 + len(sampled)


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


def one_turn(queue: Scheduler, name: str, prompt: np.ndarray, **fields: object) -> Sequence:
    """A request alone, to its end."""
    one = join(queue, name, prompt, max_tokens=1, **fields)
    while not one.finished:
        compute(queue.plan())
    queue.finish(one)
    return one


def test_a_request_begins_with_a_copy_of_the_longest_prefix_that_any_slot_holds_and_its_source_stays() -> None:
    queue = scheduler(num_slots=4)
    one_turn(queue, "short", np.arange(20))
    one_turn(queue, "source", np.arange(40))
    branch = join(queue, "branch", np.array([*range(30), 9, 9]))
    plan = queue.plan()
    assert plan.copies == [Copy(1, 2, 30)]
    assert [(c.start, c.stop) for c in plan.chunks] == [(30, 32)]
    assert (branch.num_cached, branch.row) == (30, 2)
    again = join(queue, "again", np.arange(44), session="source")
    compute(plan)
    assert (queue.plan().copies, again.num_cached, again.row) == ([], 40, 1)


def test_what_is_shorter_than_a_copy_is_worth_is_computed() -> None:
    queue = scheduler(num_slots=3)
    one_turn(queue, "source", np.arange(40))
    near = join(queue, "near", np.array([*range(15), 9, 9]))
    assert queue.plan().copies == []
    assert near.num_cached == 0


def test_a_request_whose_prompt_is_all_known_computes_its_last_token() -> None:
    queue = scheduler()
    one_turn(queue, "source", np.arange(40))
    branch = join(queue, "branch", np.arange(40))
    queue.plan()
    assert branch.num_cached == 39


def test_a_kept_session_is_copied_and_loses_its_slot_last_and_one_that_ended_first() -> None:
    queue = scheduler(num_slots=2)
    one_turn(queue, "source", np.arange(40))
    one_turn(queue, "other", np.arange(50, 60))
    first = join(queue, "first", np.arange(38))
    plan = queue.plan()
    assert (plan.copies, first.row) == ([Copy(0, 1, 37)], 1)
    compute(plan)
    second = join(queue, "second", np.arange(38))
    plan = queue.plan()
    assert (plan.copies, second.row, second.num_cached) == ([], 0, 37)  # it takes the source's own slot

    queue = scheduler(num_slots=2)
    one_turn(queue, "kept", np.arange(40))
    one_turn(queue, "ended", np.arange(50, 90), keep_session=False)
    third = join(queue, "third", np.arange(50, 88))
    assert (queue.plan().copies, third.row, third.num_cached) == ([], 1, 37)


def test_a_frequently_used_prefix_stays_cached_longer_than_others() -> None:
    queue = scheduler(num_slots=3)
    for name in "abc":
        one_turn(queue, name, np.full(40, ord(name)), keep_session=False)
    for i in range(4):
        new = one_turn(queue, f"d{i}", np.array([*[ord("a")] * 30, *[i] * 5]), keep_session=False)
        assert new.num_cached == 30
        assert new.row != 0


def test_after_a_swap_nothing_begins_with_keys_of_the_old_version() -> None:
    queue = scheduler(num_slots=3)
    idle, running = join(queue, "idle", np.arange(40), max_tokens=1), join(queue, "running", np.arange(50, 90))
    while not running.token_ids:
        compute(queue.plan())
    queue.finish(idle)
    queue.swapped(version(0))
    for prompt in (np.arange(40), np.arange(50, 90)):
        branch = join(queue, f"of {prompt[0]}", prompt)
        plan = queue.plan()
        assert (branch.num_cached, plan.copies) == (0, [])
        queue.finish(branch)
    queue.finish(running)
    assert one_turn(queue, "later", np.arange(50, 90)).num_cached == 0


SYSTEM = np.arange(100)


def sibling(number: int) -> np.ndarray:
    return np.array([*SYSTEM, *[200 + number] * 10])


def prompt_tokens(queue: Scheduler, until: list[Sequence]) -> int:
    """Compute until all of these have a token. Returns how many prompt tokens were computed for that."""
    total = 0
    while not all(s.token_ids for s in until):
        plan = queue.plan()
        assert plan
        total += sum(c.stop - c.start for c in plan.chunks)
        compute(plan)
    return total


def test_siblings_that_arrive_at_once_compute_their_common_prompt_once() -> None:
    queue = scheduler(num_slots=16, max_waiting=16)
    siblings = [join(queue, f"r{i}", sibling(i)) for i in range(16)]
    assert prompt_tokens(queue, siblings) == 100 + 16 * 10
    assert [s.num_cached for s in siblings] == [0, *[100] * 15]


def test_siblings_that_arrive_while_their_prompt_is_computed_wait_for_the_rest_of_it() -> None:
    queue = scheduler(num_slots=4)
    first = join(queue, "r0", sibling(0))
    compute(queue.plan())
    others = [join(queue, f"r{i}", sibling(i)) for i in range(1, 4)]
    assert prompt_tokens(queue, [first, *others]) == 110 - 16 + 3 * 10


def test_who_waits_for_nothing_goes_before_who_waits_for_a_prompt() -> None:
    queue = scheduler(num_slots=4)
    join(queue, "r0", sibling(0))
    join(queue, "r1", sibling(1))
    stranger = join(queue, "stranger", np.arange(300, 330))
    assert [c.sequence.request.request_id for c in queue.plan().chunks] == ["r0", "stranger"]
    assert stranger.begun


def test_less_than_a_block_is_not_waited_for() -> None:
    queue = scheduler()
    join(queue, "one", np.array([*range(30), 1, 1]))
    join(queue, "two", np.array([*range(30), 2, 2]))
    assert len(queue.plan().chunks) == 2


def test_when_who_computes_the_prompt_is_gone_the_next_goes_on_from_there() -> None:
    queue = scheduler(num_slots=3)
    siblings = [join(queue, f"r{i}", sibling(i)) for i in range(3)]
    for _ in range(3):
        compute(queue.plan())
    siblings[0].future.cancel()
    queue.remove_departed(0.0, stepped=0.0)
    assert prompt_tokens(queue, siblings[1:]) == 110 - 48 + 10


def test_a_swap_lets_go_of_who_waits_and_one_of_them_computes_the_prompt_anew() -> None:
    queue = scheduler(num_slots=4)
    siblings = [join(queue, f"r{i}", sibling(i)) for i in range(4)]
    compute(queue.plan())
    queue.swapped(version(0))
    assert prompt_tokens(queue, siblings) == 110 - 16 + 110 + 2 * 10
    assert [s.kv_epoch for s in siblings] == [1, 0, 0, 0]


def test_production_does_not_wait_for_the_prompt_of_a_rollout_and_a_rollout_waits_for_productions() -> None:
    queue = scheduler(num_slots=3)
    rollout = join(queue, "r", sibling(0))
    compute(queue.plan())
    first = join(queue, "p", sibling(1), traffic=Traffic.PRODUCTION)
    compute(queue.plan())
    assert (first.num_cached, first.num_computed) == (16, 32)
    late = join(queue, "late", sibling(2))
    assert prompt_tokens(queue, [rollout, first, late]) <= 2 * 110 + 10
    assert late.num_cached == 100


STEMS = st.tuples(st.integers(0, 2), st.integers(0, 140)).map(lambda s: ((np.arange(s[1]) * 7 + s[0]) % 50).tolist())
CALLS = st.tuples(
    st.sampled_from("abcd"),
    st.builds(lambda stem, tail: stem + tail, STEMS, st.lists(st.integers(0, 2), min_size=1, max_size=24)),
    st.sampled_from(Traffic),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(CALLS, st.sampled_from(["step", "step", "swap", "cancel"])), max_size=30))
def test_whatever_is_forked_each_row_holds_the_keys_of_its_own_context(moves: list[Any]) -> None:
    """A model of the runner's memory: a row's key at a position is (version, token)."""
    queue = scheduler(num_slots=3, max_waiting=99, context_tokens=256)
    rows: list[list[Any]] = [[None] * 256 for _ in range(3)]
    current, number = 0, 0

    def step() -> None:
        plan = queue.plan()
        assert plan or not queue.running
        for copy in plan.copies:
            rows[copy.target][: copy.stop] = rows[copy.source][: copy.stop]
        first = {c.sequence: c.start for c in plan.chunks} | {s: s.num_computed for s in plan.decode}
        compute(plan)
        for s in first:
            for at in range(first[s], s.num_computed):
                rows[s.row][at] = (current, int(context(s)[at]))
        for s in queue.running:
            assert [token for _, token in rows[s.row][: s.num_computed]] == context(s).tolist()
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
        elif move == "cancel":
            for s in queue.running[:1]:
                s.future.cancel()
            queue.remove_departed(0.0, stepped=0.0)
        else:
            session, prompt, traffic, keep = move
            number += 1
            fields = {"session": session, "traffic": traffic, "keep_session": keep}
            join(queue, f"r{number}", np.array(prompt), max_tokens=3, **fields)
    while queue.running or queue.waiting:
        step()
    assert queue.slots.num_available == 3
