from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.experience import make_batch, plan_batch
from etude.experience.credit import Grpo, Rloo
from etude.experience.curriculum import FLOOR, Signals


def counted(**groups: list[float]) -> Signals:
    """Signals after these strengths of groups by family, all of rollouts of 100 tokens."""
    signals = Signals()
    for family, seen in groups.items():
        for strength in seen:
            signals.add(family, strength=float(strength), tokens=100)
    return signals


def test_before_anything_is_known_every_task_is_taken() -> None:
    assert Signals().chance("any") == 1.0


def test_a_family_whose_groups_teach_nothing_is_drawn_less_than_one_that_teaches() -> None:
    signals = counted(solved=[0] * 8, learning=[0.25, 0] * 4)
    assert signals.chance("solved") < signals.chance("learning") == 1.0


def test_a_family_with_small_advantages_is_drawn_less_than_one_with_large_ones() -> None:
    """Both have a signal in every group: one at a solve rate of 7/8, the other at 1/2."""
    signals = counted(nearly=[7 / 64] * 8, half=[1 / 4] * 8)
    assert signals.chance("nearly") < 0.6 < signals.chance("half") == 1.0


def test_of_two_families_with_the_same_signal_the_one_with_shorter_rollouts_is_drawn_more() -> None:
    signals = Signals()
    for _ in range(8):
        signals.add("short", strength=0.2, tokens=50)
        signals.add("long", strength=0.2, tokens=200)
    assert 0.2 < signals.chance("long") < 0.35
    assert signals.chance("short") == 1.0


def test_a_family_that_is_seen_for_the_first_time_is_taken() -> None:
    assert counted(solved=[0] * 8, learning=[1] * 8).chance("new") == 1.0


def test_where_no_family_teaches_none_is_preferred() -> None:
    signals = counted(one=[0] * 50, other=[0] * 50)
    assert signals.chance("one") == signals.chance("other") == 1.0


def test_a_task_that_is_no_longer_solved_is_sampled_again() -> None:
    signals = counted(lost=[0] * 50, learning=[1] * 50)
    low = signals.chance("lost")
    for _ in range(10):
        signals.add("lost", strength=1.0, tokens=100)
    assert signals.chance("lost") > 5 * low


def test_where_tasks_repeat_a_solved_one_is_drawn_less_than_its_family() -> None:
    signals = Signals(by_task=True)
    for _ in range(4):
        signals.add("fix", strength=0.0, tokens=100, task="solved")
        signals.add("fix", strength=0.25, tokens=100, task="open")
    assert signals.chance("fix", "solved") < 0.5 < signals.chance("fix", "never tried") == 1.0
    assert signals.chance("fix", "open") == 1.0
    again = Signals(json.loads(json.dumps(signals.state)), by_task=True)
    assert again.chance("fix", "solved") == signals.chance("fix", "solved")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.1, 0.25]), st.integers(0, 99)), max_size=200))
def test_chances_stay_between_the_floor_and_one_and_some_family_is_always_taken(
    seen: list[tuple[str, float, int]],
) -> None:
    signals = Signals()
    for family, strength, tokens in seen:
        signals.add(family, strength=strength, tokens=tokens)
    chances = [signals.chance(family) for family in "abc"]
    assert all(FLOOR <= chance <= 1.0 for chance in chances)
    assert max(chances) == 1.0


def strength_of(kit, values: list[float], min_group_size: int) -> float:
    """What is counted of one group with these rewards."""
    signals = Signals(min_group_size=min_group_size)
    groups = [kit.group("g000000", values)]
    signals.count(plan_batch(groups, batch_id="b", step=1, max_lag=1, scheme=Rloo(), min_group_size=min_group_size), ())
    [counts] = signals.state["families"].values()
    return counts[0]


def test_a_group_that_went_on_counts_as_much_as_its_first_stage_says(kit) -> None:
    """Over all outcomes, the counted strength is p (1 − p) times one factor, whatever p is. With the later siblings it
    would be another factor for each p: whether there are some depends on the rewards."""

    def mean(p: float, counted_size: int) -> float:
        total = 0.0
        for first in itertools.product((0.0, 1.0), repeat=2):
            for rest in itertools.product((0.0, 1.0), repeat=2 if first[0] != first[1] else 0):
                values = [*first, *rest]
                total += math.prod(p if one else 1 - p for one in values) * strength_of(kit, values, counted_size)
        return total / (p * (1 - p))

    assert mean(0.5, 2) == pytest.approx(mean(0.1, 2), abs=1e-12) == pytest.approx(2.0)
    assert mean(0.5, 0) != pytest.approx(mean(0.1, 0), abs=0.02)


@pytest.mark.parametrize("values", [[1.0, None, 0.0, 1.0], [1.0, None, None, None], [None, None, 0.0, 1.0]])
def test_a_first_stage_with_a_single_valid_rollout_says_nothing_about_its_family(kit, values) -> None:
    signals = Signals(min_group_size=2)
    plan = plan_batch([kit.group("g000000", values)], batch_id="b", step=1, max_lag=1, scheme=Rloo(), min_group_size=2)
    signals.count(plan, ())
    assert signals.state["families"] == {}


def test_advantages_are_counted_not_differences_of_rewards(kit) -> None:
    """A scheme that divides by the deviation makes a rare success as strong as a frequent one."""
    rare, even = kit.group("g000000", [1.0] + [0.0] * 7), kit.group("g000001", [1.0, 0.0] * 4)
    for scheme, alike in ((Rloo(), False), (Grpo(), True)):
        found = []
        for group in (rare, even):
            signals = Signals()
            signals.count(plan_batch([group], batch_id="b", step=1, max_lag=1, scheme=scheme), ())
            [counts] = signals.state["families"].values()
            found.append(counts[0])
        assert (found[0] == pytest.approx(found[1], rel=1e-3)) is alike


def test_a_group_that_is_trained_again_after_its_lineage_was_lost_is_counted_once(ledger, kit, finish_group) -> None:
    finish_group("g000000", [1.0, 0.0])
    finish_group("g000001", [None, None])
    signals, ids = Signals(), ("g000000", "g000001")

    def train(step: int) -> None:
        groups = [ledger.group(group_id) for group_id in ids]
        plan = plan_batch(groups, batch_id=f"b{step}", step=step, max_lag=1)
        signals.count(plan, ledger.batched_groups(ids))
        ledger.batch(make_batch(plan, kit.read))

    train(1)
    assert signals.state["families"] == {"fix": (0.25, 4.0, 1.0, 1.0)}
    ledger.reconcile([])
    train(1)
    assert signals.state["families"] == {"fix": (0.25, 4.0, 1.0, 1.0)}


def test_counts_go_on_from_where_they_were_kept() -> None:
    signals = counted(a=[1, 0, 1], b=[0] * 3)
    again = Signals(json.loads(json.dumps(signals.state)))
    for one in (signals, again):
        one.add("b", strength=0.5, tokens=10)
    assert again.chance("b") == pytest.approx(signals.chance("b"), abs=0.0)
