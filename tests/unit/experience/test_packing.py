from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from etude.errors import LedgerError
from etude.experience import SCHEMES, Straggler, make_batch, plan_batch, record_batch, step_metrics
from etude.experience.credit import AllPairs, BestWorst, DrGrpo, Fork, advantages, turn_advantages
from etude.experience.group_credit import staged_credit
from etude.experience.packing import has_fresh_signal, num_not_plain, paths, reference_samples
from etude.experience.recomputing import recompute
from etude.experience.trace_reader import read_index, read_step, read_trace
from etude.experience.traces import batch_digest, trace_path
from etude.records import Completion, Graded, Trace
from etude.records.reward import K1, SUBMITTED, Reward, Term
from etude.records.rollout import TurnKind
from etude.rewards import Composition


def test_a_batch_holds_samples_of_non_zero_advantage_and_consumes_everybody(kit):
    groups = [kit.group("g000001", [1.0, 0.0, None]), kit.group("g000000", [1.0, 1.0, 1.0])]
    batch = make_batch(plan_batch(groups, batch_id="b000001", step=1, max_lag=0), kit.read)
    assert {s.rollout_id: s.advantages.tolist() for s in batch.samples} == {
        "g000001.0": [0.5] * 4,
        "g000001.1": [-0.5] * 4,
    }
    assert list(batch.rollout_ids) == sorted(i for g in groups for i in g.rollout_ids)
    assert batch.num_loss_tokens == 5 * 4  # five valid rollouts of four sampled tokens


def test_the_order_of_the_groups_does_not_change_the_batch(kit):
    groups = [kit.group("g000001", [1.0, 0.0]), kit.group("g000000", [0.0, 1.0])]
    one, two = (make_batch(plan_batch(g, batch_id="b", step=1, max_lag=0), kit.read) for g in (groups, groups[::-1]))
    assert [s.rollout_id for s in one.samples] == [s.rollout_id for s in two.samples]
    assert one.rollout_ids == two.rollout_ids


def test_in_a_branching_trace_each_sampled_token_is_in_the_loss_once(kit):
    stem = kit.chain([(0, 4)]).turns[0]
    left = kit.turn(0, 2, kit.completion([(0, 5)], context=9))
    right = kit.turn(0, 1, kit.completion([(0, 6)], context=8))
    first, second = paths(Trace((stem, left, right)))
    assert (first.mask.sum(), second.mask.sum()) == (9, 6)
    assert len(second.token_ids) == 3 + 4 + 1 + 6  # the stem is still context
    assert (second.logprobs[~second.mask] == 0).all()
    assert (second.steps == 0).all()  # which version computed it stays known where it carries no loss


def test_side_calls_are_in_no_loss(kit):
    trace = kit.chain([(0, 4)], [(0, 3)])
    side = msgspec.structs.replace(trace.turns[0], kind=TurnKind.SIDE)
    both = list(paths(Trace((side, trace.turns[1]))))
    assert [int(path.mask.sum()) for path in both] == [3]
    assert num_not_plain(Trace((side, trace.turns[1]))) == 4


def test_waiting_for_stragglers_refuses_a_token_past_the_bound(kit):
    groups = [kit.group("g000000", [1.0, 0.0], kit.chain([(2, 4)], [(5, 4)]))]
    with pytest.raises(LedgerError, match="a token of step 2 would be trained at step 5"):
        make_batch(plan_batch(groups, batch_id="b", step=6, max_lag=2), kit.read)


def test_masking_stragglers_trains_only_their_fresh_spans(kit, tmp_path):
    groups = [kit.group("g000000", [1.0, 0.0], kit.chain([(2, 4)], [(2, 1), (5, 3)]))]
    plan = plan_batch(groups, batch_id="b", step=6, max_lag=2, straggler=Straggler.MASK)
    batch, ref = record_batch(tmp_path, plan, kit.read)
    assert [int(s.path.mask.sum()) for s in batch.samples] == [3, 3]
    assert {int(s) for s in batch.samples[0].path.steps} == {2, 5}
    facts = step_metrics(plan, ref)
    assert facts["masked_share"] == pytest.approx(5 / 8)
    assert facts["lag"] == {"3": 2}
    assert facts["token_lag"] == {"0": 6, "3": 10}


def test_a_wholly_stale_straggler_leaves_no_sample_but_is_consumed_and_told_of(kit, tmp_path):
    groups = [kit.group("g000000", [1.0, 0.0], kit.chain([(0, 4)]))]
    plan = plan_batch(groups, batch_id="b", step=9, max_lag=2, straggler=Straggler.MASK)
    batch, ref = record_batch(tmp_path, plan, kit.read)
    assert batch == make_batch(plan, kit.read)
    assert batch.samples == ()
    assert batch.rollout_ids == ("g000000.0", "g000000.1")
    assert step_metrics(plan, ref)["masked_share"] == 1.0


def test_step_facts_count_what_a_step_saw(kit, tmp_path):
    groups = [kit.group("g000000", [1.0, 0.0, None]), kit.group("g000001", [0.0, 0.0, 0.0]), kit.group("g2", [None])]
    plan = plan_batch(groups, batch_id="b", step=1, max_lag=0)
    _, ref = record_batch(tmp_path, plan, kit.read)
    facts = step_metrics(plan, ref)
    assert facts == {
        "reward_mean": 0.2,
        "best_of_k": 0.5,
        "num_groups": 3,
        "no_signal_share": pytest.approx(2 / 3),
        "lag": {"0": 5},
        "token_lag": {"0": 20},
        "invalid": {"machine": 2},
        "turns_mean": 1.0,
        "sampled_mean": 4.0,
        "masked_share": 0.0,
        "not_plain_share": 0.0,
    }


class OnesForEqual(DrGrpo):
    """Gives advantages where rewards are equal, and none where they differ."""

    def advantages(self, rewards: Any) -> list[float]:
        return [float(len({reward.value for reward in rewards}) == 1)] * len(rewards)


def test_groups_with_signal_are_those_with_an_advantage_whatever_their_rewards(kit, tmp_path):
    groups = [kit.group("g0", [1.0, 1.0]), kit.group("g1", [1.0, 0.0]), kit.group("g2", [0.0, 1.0])]
    plan = plan_batch(groups, batch_id="b", step=1, max_lag=0, scheme=OnesForEqual())
    batch, ref = record_batch(tmp_path, plan, kit.read)
    assert plan.groups_with_signal == {sample.rollout_id.partition(".")[0] for sample in batch.samples} == {"g0"}
    assert step_metrics(plan, ref)["no_signal_share"] == pytest.approx(2 / 3)


def test_a_kl_in_the_reward_gives_signal_where_rewards_alone_have_none(kit):
    group = kit.group("g000000", [1.0, 1.0])
    ids = [rollout.rollout_id for rollout, _ in group.valid]
    assert make_batch(plan_batch([group], batch_id="b", step=1, max_lag=2), kit.read).samples == ()
    assert [s.rollout_id for s in reference_samples(kit.read(rollout) for rollout, _ in group.valid)] == ids
    batch = make_batch(
        plan_batch(
            [group],
            batch_id="b",
            step=1,
            max_lag=2,
            k1={ids[0]: 0.0, ids[1]: 2.0},
            composition=Composition(kl=0.1),
        ),
        kit.read,
    )
    assert {s.rollout_id: s.advantages[0] for s in batch.samples} == pytest.approx({ids[0]: 0.1, ids[1]: -0.1})


def said_nothing(kit: Any) -> Completion:
    """A completion of no token."""
    return msgspec.structs.replace(kit.completion([(0, 1)], context=3), token_ids=np.zeros(0, np.int32), **NOTHING)


NOTHING: dict[str, Any] = {"logprobs": np.zeros(0, np.float32), "spans": (), "routes": np.zeros((2, 2, 2), np.uint8)}


@pytest.mark.parametrize("scheme", SCHEMES.values())
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_rollout_without_turns_and_one_that_sampled_nothing_are_consumed_and_count_in_the_baseline(
    kit: Any, tmp_path: Path, scheme: Any, beta: float
) -> None:
    silent = Trace((kit.turn(None, 3, said_nothing(kit)),))
    group = kit.group("g000000", [0.0, 0.0, 1.0])
    finished = [
        msgspec.structs.replace(one, summary=kit.summary(one.rollout_id, trace))
        for one, trace in zip(group.finished, [Trace(()), silent, kit.chain([(0, 4)])], strict=True)
    ]
    group = type(group)(group.group_id, group.rollout_ids, tuple(finished))
    k1 = {sample.rollout_id: 0.25 for sample in reference_samples(kit.read(one) for one, _ in group.valid)}
    assert set(k1) == {"g000000.2"}, "a reference model is asked about sampled tokens alone"
    composition = Composition(kl=beta)
    given = {"scheme": scheme, "k1": k1 if beta else None, "composition": composition}
    plan = plan_batch([group], batch_id="b", step=1, max_lag=0, **given)
    batch, ref = record_batch(tmp_path, plan, kit.read)
    [sample] = batch.samples
    assert sample.rollout_id == "g000000.2"
    rewards = [Reward(value=v, raw=r, reason="") for v, r in ((0.0, 0.0), (0.0, 0.0), (1.0 - beta * 0.25, 1.0))]
    wanted = advantages(rewards, scheme)[2]
    assert sample.advantages.tolist() == pytest.approx([wanted] * 4)
    assert batch.rollout_ids == group.rollout_ids
    assert step_metrics(plan, ref)["lag"] == {"0": 1}
    path = trace_path(tmp_path, 1)
    again = read_trace(path)
    assert [one.outcome.grade for one in again.rollouts] == [0.0, 0.0, 1.0]
    assert read_index(path).trained == {"g000000.2"}


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_groups_whose_rollouts_all_have_no_turns_make_a_step_without_signal(
    kit: Any, tmp_path: Path, beta: float
) -> None:
    group = kit.group("g000000", [1.0, 0.0], Trace(()))
    plan = plan_batch(
        [group], batch_id="b", step=1, max_lag=0, k1={} if beta else None, composition=Composition(kl=beta)
    )
    batch, ref = record_batch(tmp_path, plan, kit.read)
    assert (batch.samples, batch.num_loss_tokens) == ((), 0)
    assert step_metrics(plan, ref)["turns_mean"] == 0.0
    assert read_index(trace_path(tmp_path, 1)).rollout_ids == set(group.rollout_ids)


def test_a_rollout_that_sampled_and_has_no_k1_is_a_defect_that_is_seen(kit: Any) -> None:
    with pytest.raises(KeyError):
        plan_batch(
            [kit.group("g000000", [1.0, 0.0])], batch_id="b", step=1, max_lag=0, k1={}, composition=Composition(kl=0.5)
        )


@pytest.mark.parametrize(("full_groups", "share"), [(0, 1.0), (1, 1.0), (2, 1.0), (4, 0.5), (8, 0.25)])
def test_the_share_of_the_learning_rate_is_that_of_the_groups_with_a_sample_and_is_recorded(
    kit: Any, tmp_path: Path, full_groups: int, share: float
) -> None:
    groups = [kit.group(f"g00000{i}", rewards) for i, rewards in enumerate(([1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.0]))]
    plan = plan_batch(groups, batch_id="b", step=1, max_lag=0, full_groups=full_groups)
    batch, ref = record_batch(tmp_path, plan, kit.read)
    assert batch.lr_share == make_batch(plan, kit.read).lr_share == share
    again = read_trace(trace_path(tmp_path, 1))
    assert (again.batch.lr_share, again.digest) == (share, ref.digest)
    whole = plan_batch(groups, batch_id="b", step=1, max_lag=0)
    assert (record_batch(tmp_path / "whole", whole, kit.read)[1].digest == ref.digest) == (share == 1.0)


def test_a_group_whose_tokens_are_all_past_the_bound_teaches_nothing_and_counts_in_no_share(kit: Any) -> None:
    stale = kit.group("g000000", [1.0, 0.0], kit.chain([(2, 4)]))
    partly = kit.group("g000001", [1.0, 0.0], kit.chain([(2, 4)], [(5, 4)]))
    alike = kit.group("g000002", [1.0, 1.0], kit.chain([(5, 4)]))
    settings = {"learner_step": 5, "max_lag": 2}
    assert [has_fresh_signal(group, **settings) for group in (stale, partly, alike)] == [False, True, False]
    assert has_fresh_signal(stale, learner_step=4, max_lag=2)
    masks: dict[str, Any] = {"max_lag": 2, "straggler": Straggler.MASK, "full_groups": 2}
    batch = make_batch(plan_batch([stale, partly, alike], batch_id="b", step=6, **masks), kit.read)
    assert {sample.rollout_id for sample in batch.samples} == set(partly.rollout_ids)
    assert batch.lr_share == 0.5


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_credit_is_computed_again_from_a_trace_to_the_bit_and_under_other_settings(
    kit: Any, tmp_path: Path, scheme: Any, kl: float
) -> None:
    whole = kit.group("g000000", [1.0, 0.1, 0.7, None])
    left = Term(name=SUBMITTED, value=0.0, evidence="turns")
    finished = list(whole.finished)
    finished[2] = msgspec.structs.replace(finished[2], outcome=finished[2].outcome.with_terms(left))
    group = type(whole)(whole.group_id, whole.rollout_ids, tuple(finished))
    k1 = {f"g000000.{i}": 0.1 * (i + 1) for i in range(3)}
    composition = Composition(kl=kl)
    plan = plan_batch(
        [group], batch_id="b", step=1, max_lag=0, scheme=scheme, k1=k1 if kl else None, composition=composition
    )
    record_batch(tmp_path, plan, kit.read)
    judged = [one.outcome for one in read_trace(trace_path(tmp_path, 1)).rollouts]
    graded = [one for one in judged if isinstance(one, Graded)]
    again = staged_credit(graded, [()] * 3, [True] * 3, composition, scheme)
    assert [one.reward.value for one in again] == [
        1.0 - kl * k1["g000000.0"],
        0.1 - kl * k1["g000000.1"],
        0.0 - kl * k1["g000000.2"],
    ]
    assert [(one.reward, one.advantage) for one in again] == [
        (member.reward, member.advantage) for member in plan.members if member.reward is not None
    ]
    others = Composition(require_submit=False).rewards([one.terms for one in graded])
    assert [one.value for one in others] == [1.0, 0.1, 0.7]
    assert all((K1 in one.values) is bool(kl) for one in graded)


def test_advantages_by_turn_are_in_the_samples_and_computed_again_from_a_trace_to_the_bit(
    kit: Any, tmp_path: Path
) -> None:
    base = kit.group("g000000", [1.0, 0.0, 0.3])
    traces = [kit.chain([(0, 4)], [(0, 3)]), kit.chain([(0, 4)], [(0, 2)]), kit.chain([(0, 5)], [(0, 2)])]
    finished = tuple(
        msgspec.structs.replace(one, summary=kit.summary(one.rollout_id, trace))
        for one, trace in zip(base.finished, traces, strict=True)
    )
    plan = plan_batch(
        [type(base)(base.group_id, base.rollout_ids, finished)], batch_id="b", step=1, max_lag=0, scheme=Fork()
    )
    given = [member.turn_advantages for member in plan.members]
    assert given[0] == pytest.approx((1.0 - 0.15, 1.0 - (0.0 + 4 * 0.15) / 5)), (
        "two siblings sampled the same first turn"
    )
    assert given[2] == pytest.approx((-0.2, -0.2))
    batch, _ = record_batch(tmp_path, plan, kit.read)
    for sample, own in zip(batch.samples, given, strict=True):
        sizes = [len(turn.completion.token_ids) for turn in traces[int(sample.rollout_id[-1])].turns]
        assert sample.advantages.tolist() == np.repeat(np.array(own, np.float32), sizes).tolist()
    recorded = read_trace(trace_path(tmp_path, 1))
    assert [one.advantages.tolist() for one in recorded.batch.samples] == [
        one.advantages.tolist() for one in batch.samples
    ]
    graded = [one.outcome for one in recorded.rollouts if isinstance(one.outcome, Graded)]
    rewards = Composition().rewards([one.terms for one in graded])
    assert turn_advantages(rewards, [one.places for one in recorded.rollouts], Fork()) == given


def test_a_refused_summary_is_masked_only_where_its_own_advantage_is_positive(kit: Any) -> None:
    trace = summarised(kit, refused=True)
    group = kit.group("g000000", [1.0, 0.0], trace)

    class ByTurn(Fork):
        def turn_advantages(self, rewards: Any, turns: Any) -> list[list[float]]:
            return [[0.5, -1.0, 0.5, 0.5, 0.5], [0.0] * 5]

    batch = make_batch(plan_batch([group], batch_id="b", step=1, max_lag=0, scheme=ByTurn()), kit.read)
    assert [one.rollout_id for one in batch.samples] == ["g000000.0"] * 3, "without an advantage there is no sample"
    assert batch.samples[0].advantages.tolist() == [0.5] * 4 + [-1.0] * 3


def summarised(kit: Any, *, refused: bool = False, steps: tuple[int, int, int] = (0, 0, 0)) -> Trace:
    """A rollout of three conversations: a turn and a summary, twice, and a last turn. `steps`: of each."""
    turns = []
    for step in steps:
        turns.append(kit.turn(None, 5, kit.completion([(step, 4)], context=5)))
        if len(turns) < 4:
            kind = TurnKind.REFUSED if refused and len(turns) == 1 else TurnKind.SUMMARY
            last = kit.turn(len(turns) - 1, 2, kit.completion([(step, 3)], context=11))
            turns.append(msgspec.structs.replace(last, kind=kind))
    return Trace(tuple(turns))


def test_the_reward_reaches_every_token_of_a_summarised_rollout_once(kit):
    """A rollout of three conversations weighs as much per token as one of a single conversation."""
    long, short = kit.group("g000000", [1.0, 0.0], summarised(kit)), kit.group("g000001", [1.0, 0.0])
    batch = make_batch(plan_batch([long, short], batch_id="b", step=1, max_lag=0), kit.read)
    mine = [sample for sample in batch.samples if sample.rollout_id == "g000000.0"]
    assert len(mine) == 3
    assert sum(int(sample.path.mask.sum()) for sample in mine) == 4 + 3 + 4 + 3 + 4
    assert {advantage for sample in mine for advantage in sample.advantages} == {0.5}
    assert batch.num_loss_tokens == 2 * 18 + 2 * 4
    assert sum(int(sample.path.mask.sum()) for sample in batch.samples) == batch.num_loss_tokens


def test_one_old_conversation_does_not_make_the_others_stale(kit):
    group = kit.group("g000000", [1.0, 0.0], summarised(kit, steps=(0, 4, 5)))
    plan = plan_batch([group], batch_id="b", step=6, max_lag=2, straggler=Straggler.MASK)
    mine = [sample for sample in make_batch(plan, kit.read).samples if sample.rollout_id == "g000000.0"]
    assert [int(sample.path.mask.sum()) for sample in mine] == [7, 4]


def test_a_refused_summary_gets_blame_and_no_credit(kit):
    group = kit.group("g000000", [1.0, 0.0], summarised(kit, refused=True))
    batch = make_batch(plan_batch([group], batch_id="b", step=1, max_lag=0), kit.read)
    trained = {i: [int(s.path.mask.sum()) for s in batch.samples if s.rollout_id == i] for i in group.rollout_ids}
    assert trained == {"g000000.0": [4, 7, 4], "g000000.1": [7, 7, 4]}


def test_pairs_of_a_group_are_in_its_batch_and_trace_and_computed_again_to_the_bit(kit: Any, tmp_path: Path) -> None:
    groups = [kit.group("g000000", [0.5, 0.0, 1.0, None, 0.5]), kit.group("g000001", [1.0, 1.0])]
    twelve = kit.group("g000002", [float(i % 3) for i in range(12)])  # by id, .10 comes before .2
    plan = plan_batch([*groups, twelve], batch_id="b", step=2, max_lag=1, scheme=AllPairs())
    record_batch(tmp_path, plan, kit.read)
    assert recompute(read_step(trace_path(tmp_path, 2)), Composition(), AllPairs(), max_lag=1).equal
    plan = plan_batch(groups, batch_id="b", step=1, max_lag=0, scheme=AllPairs())
    batch, _ = record_batch(tmp_path, plan, kit.read)
    better = {"0": "1", "2": "014", "4": "1"}
    assert batch.pairs == tuple((f"g000000.{i}", f"g000000.{j}") for i, of in better.items() for j in of)
    assert batch.sampled == {f"g000000.{i}" for i in (0, 1, 2, 4)}, "also those that win as often as they lose"
    path = trace_path(tmp_path, 1)
    recorded = read_trace(path)
    assert recorded.batch.pairs == batch.pairs
    assert batch_digest(msgspec.structs.replace(batch, pairs=batch.pairs[1:])) != recorded.digest
    again = recompute(read_step(path), Composition(), AllPairs(), max_lag=0)
    assert again.equal
    assert not recompute(read_step(path), Composition(), BestWorst(), max_lag=0).equal
    made = make_batch(plan_batch(groups, batch_id="b", step=1, max_lag=0, scheme=BestWorst()), kit.read)
    assert made.pairs == (("g000000.2", "g000000.1"),)
    assert made.sampled == {"g000000.1", "g000000.2"}


def test_a_pair_of_which_one_rollout_is_too_old_is_left_out(kit: Any) -> None:
    group = kit.group("g000000", [1.0, 0.0, 0.0], kit.chain([(3, 4)]))
    finished = list(group.finished)
    finished[1] = msgspec.structs.replace(finished[1], summary=kit.summary("g000000.1", kit.chain([(0, 4)])))
    group = type(group)(group.group_id, group.rollout_ids, tuple(finished))

    def pairs(max_lag: int) -> tuple[tuple[str, str], ...]:
        masks: dict[str, Any] = {"max_lag": max_lag, "straggler": Straggler.MASK}
        return make_batch(plan_batch([group], batch_id="b", step=4, scheme=AllPairs(), **masks), kit.read).pairs

    assert pairs(max_lag=3) == (("g000000.0", "g000000.1"), ("g000000.0", "g000000.2"))
    assert pairs(max_lag=2) == (("g000000.0", "g000000.2"),)


def test_a_rollout_that_has_lost_a_part_to_the_lag_bound_is_in_no_pair(kit: Any, tmp_path: Path) -> None:
    """Its margin would be that of a part of it, against the whole of its sibling."""
    group = kit.group("g000000", [1.0, 0.0, 0.0, 0.5], kit.chain([(3, 4)], [(3, 4)]))
    partly = kit.summary("g000000.1", kit.chain([(0, 4)], [(3, 4)]))
    finished = list(group.finished)
    finished[1] = msgspec.structs.replace(finished[1], summary=partly)
    group = type(group)(group.group_id, group.rollout_ids, tuple(finished))
    masks: dict[str, Any] = {"max_lag": 2, "straggler": Straggler.MASK}
    plan = plan_batch([group], batch_id="b", step=4, scheme=AllPairs(), **masks)
    batch, _ = record_batch(tmp_path, plan, kit.read)
    assert {one for pair in batch.pairs for one in pair} == {"g000000.0", "g000000.2", "g000000.3"}
    extremes = plan_batch([group], batch_id="b", step=4, scheme=BestWorst(), **masks)
    assert make_batch(extremes, kit.read).pairs == (("g000000.0", "g000000.2"),), "the worst one of the others"
    assert recompute(read_step(trace_path(tmp_path, 4)), Composition(), AllPairs(), max_lag=2).equal


def test_both_rollouts_of_a_pair_are_trained_on_whatever_their_advantages(kit: Any, tmp_path: Path) -> None:
    class Unweighted(AllPairs):
        """A plug-in of which only the pairs count."""

        def advantages(self, rewards: Sequence[Reward]) -> list[float]:
            return [0.0] * len(rewards)

    groups = [kit.group("g000000", [1.0, 0.0, None]), kit.group("g000001", [1.0, 1.0])]
    plan = plan_batch(groups, batch_id="b", step=1, max_lag=0, scheme=Unweighted())
    batch, _ = record_batch(tmp_path, plan, kit.read)
    assert batch.pairs == (("g000000.0", "g000000.1"),)
    assert batch.sampled == {"g000000.0", "g000000.1"}
    assert recompute(read_step(trace_path(tmp_path, 1)), Composition(), Unweighted(), max_lag=0).equal
