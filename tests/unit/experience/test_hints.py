"""Hints in batches: placed in contexts, recorded, read again and computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from etude.experience import SCHEMES, Finished, Group, make_batch, plan_batch, read_trace, record_batch, step_metrics
from etude.experience.credit import Credit
from etude.experience.hints import HintFormat
from etude.experience.recomputing import recompute, recorded_composition
from etude.experience.trace_reader import read_step
from etude.experience.traces import trace_path
from etude.records import Graded, Trace
from etude.records.reward import Hint, Term
from etude.records.rollout import TurnKind
from etude.rewards import DEFAULT_COMPOSITION, Composition

END = np.array([1, 2], np.int32)
"""The last two of the three prompt tokens of each turn of `kit.chain`."""
HOW = Composition(hints={"reads": 0.5})


def encode(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


FORMAT = HintFormat(encode, (END,), context_tokens=64)


def group(kit: Any, *hints: tuple[tuple[int, str], ...], rewards: tuple[float, ...] = (0.0, 0.0)) -> Group:
    """Siblings of two turns with these hints; by default their rewards are equal, so that nothing else has credit."""
    return with_hints(kit.group("g0", rewards, kit.chain([(0, 4)], [(0, 5)])), *hints)


def with_hints(found: Group, *hints: tuple[tuple[int, str], ...]) -> Group:
    finished = []
    for one, own in zip(found.finished, hints, strict=True):
        assert isinstance(one.outcome, Graded)
        graded = one.outcome.with_terms(Term(name="reads", value=-1.0, hints=own))
        finished.append(Finished(rollout_id=one.rollout_id, outcome=graded, summary=one.summary))
    return Group(group_id=found.group_id, rollout_ids=found.rollout_ids, finished=tuple(finished))


def test_a_hint_is_the_end_of_the_message_before_its_turn(kit: Any) -> None:
    trace = kit.chain([(0, 4)], [(0, 5)])
    path, chain = trace.path(1), [0, 1]
    for turn, (at, stop) in enumerate([(1, 7), (8, 15)]):
        placed = FORMAT.place(Hint(turn, "no", 0.5), path, trace, chain)
        assert placed is not None
        assert (placed.at, placed.stop, placed.weight) == (at, stop, 0.5)
        assert placed.token_ids.tolist() == list(b"\nno")
        assert path.token_ids[at : at + 2].tolist() == END.tolist()
        assert path.mask[at:stop].tolist() == [False] * 2 + [True] * (stop - at - 2)


def test_where_the_end_of_a_message_is_merged_with_its_text_the_tokens_of_the_turn_stay_those_that_were_sampled(
    kit: Any,
) -> None:
    """A tokeniser may merge the last character of a tool's output with the newline of its end, so that only the shorter
    end, that of a message of the user, is found. The hint is then behind the tool's own end."""
    trace = kit.chain([(0, 4)], [(0, 5)])
    merged = HintFormat(encode, (np.array([9, *END], np.int32), END), context_tokens=64)
    path = trace.path(1)
    placed = merged.place(Hint(1, "no", 0.5), path, trace, [0, 1])
    assert placed is not None
    completion = trace.turns[1].completion.token_ids
    context = [*path.token_ids[: placed.at], *placed.token_ids, *path.token_ids[placed.at : placed.stop]]
    assert context[-len(END) - len(completion) :] == [*END, *completion]
    assert path.token_ids[placed.at : placed.stop][path.mask[placed.at : placed.stop]].tolist() == completion.tolist()


def test_a_turn_goes_without_a_hint_where_it_cannot_have_one(kit: Any) -> None:
    trace = kit.chain([(0, 4)], [(0, 5)])
    path, hint = trace.path(1), Hint(1, "no", 0.5)
    assert HintFormat(encode, (END,), context_tokens=18).place(hint, path, trace, [0, 1]) is not None
    assert HintFormat(encode, (END,), context_tokens=17).place(hint, path, trace, [0, 1]) is None, "15 tokens, and 3"
    assert HintFormat(encode, (END[::-1],), context_tokens=64).place(hint, path, trace, [0, 1]) is None, "another end"
    assert FORMAT.place(hint, trace.path(0), trace, [0]) is None, "the turn is in another path"
    masked = replace(path, mask=path.mask & (np.arange(15) < 7))
    assert FORMAT.place(hint, masked, trace, [0, 1]) is None, "no token of it has a loss"


def test_rollouts_of_equal_rewards_are_trained_on_where_they_have_hints(kit: Any) -> None:
    one = group(kit, ((1, "no"),), ())
    assert make_batch(plan_batch([one], batch_id="b", step=1, max_lag=0), kit.read).samples == ()
    plan = plan_batch([one], batch_id="b", step=1, max_lag=0, composition=HOW)
    assert plan.groups_with_signal == {"g0"}
    [sample] = make_batch(plan, kit.read, hint_format=FORMAT).samples
    assert sample.rollout_id == "g0.0"
    assert not sample.advantages.any()
    assert [(hint.at, hint.weight) for hint in sample.hints] == [(8, 0.5)]
    with pytest.raises(ValueError, match=r"g0\.0 has hints"):
        make_batch(plan, kit.read)


def test_hints_count_only_where_the_gate_of_their_term_is_open(kit: Any) -> None:
    one = group(kit, ((1, "no"),), ((1, "no"),), rewards=(0.0, 1.0))
    how = Composition(hints={"reads": 0.5}, when={"reads": "grade"})
    plan = plan_batch([one], batch_id="b", step=1, max_lag=0, composition=how)
    assert [member.hints for member in plan.members] == [(), (Hint(1, "no", 0.5),)]


def test_what_is_recorded_is_read_and_computed_again_to_the_bit(kit: Any, tmp_path: Path) -> None:
    long = "no " * 30  # does not fit
    one = group(kit, ((0, "no"), (1, "not so")), ((0, long),), rewards=(1.0, 0.0))
    plan = plan_batch([one], batch_id="b000001", step=1, max_lag=0, composition=HOW)
    batch, ref = record_batch(tmp_path, plan, kit.read, hint_format=FORMAT)
    assert (ref.num_hints, ref.num_unplaced_hints) == (3, 1)
    told = step_metrics(plan, ref)
    assert (told["hints"], told["unplaced_hints"], told["masked_share"]) == (3, 1, 0.0)
    read = read_trace(trace_path(tmp_path, 1))
    assert read.digest == ref.digest
    for again, sample in zip(read.batch.samples, batch.samples, strict=True):
        assert [(h.at, h.stop, h.weight, h.token_ids.tolist()) for h in again.hints] == [
            (h.at, h.stop, h.weight, h.token_ids.tolist()) for h in sample.hints
        ]
    recorded = read_step(trace_path(tmp_path, 1))
    how = recorded_composition(recorded.rewards, DEFAULT_COMPOSITION)
    assert how == HOW
    scheme = SCHEMES[Credit.DR_GRPO]
    assert recompute(recorded, how, scheme, max_lag=0, hint_format=FORMAT).equal
    for other in (Composition(), Composition(hints={"reads": 0.25})):
        assert not recompute(recorded, other, scheme, max_lag=0, hint_format=FORMAT).equal


def test_a_step_tells_the_share_of_the_rollouts_for_which_a_term_is_unknown(kit: Any, tmp_path: Path) -> None:
    one = kit.group("g0", (1.0, 0.0, 1.0, 0.0), kit.chain([(0, 4)], [(0, 5)]))
    values = [(None, 1.0), (0.5, 1.0), (0.5, 0.0), (None, 0.0)]
    finished = []
    for each, (polite, brief) in zip(one.finished, values, strict=True):
        assert isinstance(each.outcome, Graded)
        terms = Term(name="polite", value=polite), Term(name="brief", value=brief)
        outcome = each.outcome.with_terms(*terms)
        finished.append(Finished(rollout_id=each.rollout_id, outcome=outcome, summary=each.summary))
    group = Group(group_id=one.group_id, rollout_ids=one.rollout_ids, finished=tuple(finished))
    for when, shares in (({}, {"polite": 0.5}), ({"polite": "brief"}, {"polite": 0.25})):
        how = Composition(weights={"polite": 0.5, "brief": 0.25}, when=when)
        plan = plan_batch([group], batch_id="b", step=1, max_lag=0, composition=how)
        assert step_metrics(plan, record_batch(tmp_path, plan, kit.read)[1])["unknown_terms"] == shares


def test_a_batch_without_hints_has_the_digest_that_it_had_before_there_were_any(kit: Any, tmp_path: Path) -> None:
    one = group(kit, ((1, "no"),), (), rewards=(1.0, 0.0))
    plans = [plan_batch([one], batch_id="b", step=1, max_lag=0, composition=how) for how in (Composition(), HOW)]
    plain, hinted = (record_batch(tmp_path, plan, kit.read, hint_format=FORMAT)[1] for plan in plans)
    assert plain.digest != hinted.digest
    assert "hints" not in step_metrics(plans[0], plain)


def test_a_turn_of_a_side_call_has_no_hint(kit: Any) -> None:
    trace = kit.chain([(0, 4)], [(0, 5)])
    side = Trace((trace.turns[0], replace(trace.turns[1], kind=TurnKind.SIDE)))
    one = with_hints(kit.group("g0", (0.0, 0.0), side), ((1, "no"),), ())
    plan = plan_batch([one], batch_id="b", step=1, max_lag=0, composition=HOW)
    [sample] = make_batch(plan, kit.read, hint_format=FORMAT).samples
    assert sample.hints == ()
