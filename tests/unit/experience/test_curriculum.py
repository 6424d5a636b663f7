from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.experience import make_batch, plan_batch
from etude.experience.curriculum import FLOOR, Signals


def counted(**groups: list[bool]) -> Signals:
    signals = Signals()
    for family, seen in groups.items():
        for signal in seen:
            signals.add(family, signal=signal)
    return signals


def test_before_anything_is_known_every_task_is_taken() -> None:
    assert Signals().chance("any") == 1.0


def test_a_family_whose_groups_teach_nothing_is_drawn_less_than_one_that_teaches() -> None:
    signals = counted(solved=[False] * 8, learning=[True, False] * 4)
    assert signals.chance("solved") < signals.chance("learning") == 1.0


def test_a_family_that_is_seen_for_the_first_time_is_taken() -> None:
    assert counted(solved=[False] * 8, learning=[True] * 8).chance("new") == 1.0


def test_where_no_family_teaches_none_is_preferred() -> None:
    signals = counted(one=[False] * 50, other=[False] * 50)
    assert signals.chance("one") == signals.chance("other") == 1.0


def test_a_task_that_is_no_longer_solved_is_sampled_again() -> None:
    signals = counted(lost=[False] * 50, learning=[True] * 50)
    low = signals.chance("lost")
    for _ in range(10):
        signals.add("lost", signal=True)
    assert signals.chance("lost") > 5 * low


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200))
def test_chances_stay_between_the_floor_and_one_and_some_family_is_always_taken(seen: list[tuple[str, bool]]) -> None:
    signals = Signals()
    for family, signal in seen:
        signals.add(family, signal=signal)
    chances = [signals.chance(family) for family in "abc"]
    assert all(FLOOR <= chance <= 1.0 for chance in chances)
    assert max(chances) == 1.0


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
    assert signals.counts == {"fix": (1.0, 1.0)}
    ledger.reconcile([])
    train(1)
    assert signals.counts == {"fix": (1.0, 1.0)}


def test_counts_go_on_from_where_they_were_kept() -> None:
    signals = counted(a=[True, False, True], b=[False] * 3)
    again = Signals(signals.counts)
    for one in (signals, again):
        one.add("b", signal=True)
    assert again.chance("b") == pytest.approx(signals.chance("b"), abs=0.0)
