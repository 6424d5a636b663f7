"""Groups of two stages in the ledger: further siblings wait until the first ones have ended."""

from __future__ import annotations

import pytest

from etude.experience import Ledger
from etude.experience.transitions import State
from etude.records.reward import Term

NAMES = [f"g000000.{i}" for i in range(4)]


def begun(ledger: Ledger, kit) -> None:
    ledger.admit(*map(kit.spec, NAMES), held=set(NAMES[2:]))
    assert [spec.rollout_id for spec in ledger.start(8)] == NAMES[:2], "held rollouts do not start"


def ended(ledger: Ledger, kit, number: int, reward: float | None) -> None:
    outcome = kit.invalid if reward is None else kit.graded(reward)
    assert ledger.finish(kit.summary(NAMES[number]), outcome)


@pytest.mark.parametrize("rewards", [(1.0, 0.0), (1.0, None), (None, None)])
def test_held_siblings_run_unless_the_first_ones_agree(ledger, kit, rewards) -> None:
    begun(ledger, kit)
    ended(ledger, kit, 0, rewards[0])
    assert ledger.start(8) == [], "not before all first siblings have ended"
    ended(ledger, kit, 1, rewards[1])
    assert not ledger.ready_groups(["g000000"])
    assert [spec.rollout_id for spec in ledger.start(8)] == NAMES[2:]
    ended(ledger, kit, 2, 1.0)
    ended(ledger, kit, 3, 1.0)
    assert ledger.ready_groups(["g000000"])


def test_held_siblings_are_cancelled_where_the_first_ones_agree_and_give_their_slots_back(ledger, kit) -> None:
    begun(ledger, kit)
    assert ledger.slots()[0] == 4
    ended(ledger, kit, 0, 1.0)
    ended(ledger, kit, 1, 1.0)
    assert ledger.ready_groups(["g000000"])
    assert [row.state for row in ledger.group_rows("g000000")] == [State.GRADED] * 2 + [State.CANCELLED] * 2
    assert ledger.slots()[0] == 2
    assert len(ledger.group("g000000").valid) == 2


def test_a_first_sibling_whose_workers_died_too_often_lets_the_others_run(ledger, kit) -> None:
    begun(ledger, kit)
    ended(ledger, kit, 0, 1.0)
    ledger.fail(NAMES[1], kit.invalid)
    assert [spec.rollout_id for spec in ledger.start(8)] == NAMES[2:]


def test_a_restart_between_the_stages_keeps_what_is_held(ledger, kit) -> None:
    begun(ledger, kit)
    ended(ledger, kit, 0, 1.0)
    ledger.reconcile([])
    assert [spec.rollout_id for spec in ledger.start(8)] == NAMES[1:2]
    assert ledger.finish(kit.summary(NAMES[1], attempt=1), kit.graded(0.0))
    assert [spec.rollout_id for spec in ledger.start(8)] == NAMES[2:]


def test_a_first_sibling_that_is_quarantined_decides_nothing_and_lets_the_others_run(ledger, kit) -> None:
    begun(ledger, kit)
    ended(ledger, kit, 0, 1.0)
    ledger.move(NAMES[1], "requeued")
    ledger.move(NAMES[1], "quarantined", reason="its record cannot be read")
    assert [spec.rollout_id for spec in ledger.start(8)] == NAMES[2:], "the last of the first ones has ended"


def test_the_reward_of_a_quarantined_first_sibling_is_not_compared(ledger, kit) -> None:
    begun(ledger, kit)
    ended(ledger, kit, 0, 1.0)
    ledger.move(NAMES[0], "quarantined", reason="its record cannot be read")
    ended(ledger, kit, 1, 1.0)
    assert [spec.rollout_id for spec in ledger.start(8)] == NAMES[2:], "only one reward is left"


def later(ledger: Ledger, kit, first: float, second: float) -> None:
    """Two first siblings have ended with these grades, and terms decide."""
    ledger.grades_decide = lambda: False
    begun(ledger, kit)
    ended(ledger, kit, 0, first)
    ended(ledger, kit, 1, second)


@pytest.mark.parametrize(("rewards", "run"), [([1.5, 1.0], True), ([1.0, 1.0], False), ([1.0], True)])
def test_where_terms_decide_held_siblings_wait_for_the_decision_and_terms_are_stored_with_it(
    ledger, kit, rewards, run
) -> None:
    later(ledger, kit, 1.0, 1.0)
    assert ledger.start(8) == [], "grades do not decide"
    assert not ledger.ready_groups(["g000000"])
    assert ledger.ended_groups(["g000000"]) == {"g000000"}
    judged = kit.graded(1.0).with_terms(Term(name="tone", value=0.5))
    assert ledger.decide("g000000", {NAMES[0]: (judged, 1.5)}, rewards) is run
    found = ledger.finished(NAMES[0])
    assert found is not None
    assert found.outcome == judged
    assert ledger.row(NAMES[0]).reward == 1.5
    assert [spec.rollout_id for spec in ledger.start(8)] == (NAMES[2:] if run else [])
    assert ledger.ready_groups(["g000000"]) == (set() if run else {"g000000"})


def test_a_decision_that_cannot_be_stored_leaves_neither_its_terms_nor_itself(ledger, kit, monkeypatch) -> None:
    later(ledger, kit, 1.0, 0.0)
    judged = kit.graded(1.0).with_terms(Term(name="tone", value=0.5))

    def full(*given: object) -> bool:
        raise OSError("the disk is full")

    monkeypatch.setattr(Ledger, "_release", full)
    with pytest.raises(OSError, match="the disk is full"):
        ledger.decide("g000000", {NAMES[0]: (judged, 1.5)}, [1.5, 0.0])
    found = ledger.finished(NAMES[0])
    assert found is not None
    assert found.outcome == kit.graded(1.0)
    assert ledger.row(NAMES[2]).state is State.HELD
