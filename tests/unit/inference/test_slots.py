"""Assignment of KV slots to sessions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from etude.inference.scheduler import Slot, SlotTable


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def take(table: SlotTable, session: str, prompt: np.ndarray) -> tuple[Slot, int]:
    got = table.acquire(session, prompt)
    assert got is not None
    return got


def test_a_session_finds_its_slot_and_its_tokens_again() -> None:
    table = SlotTable(3)
    first, cached = take(table, "a", ids(1, 2))
    assert cached == 0
    table.release(first, ids(1, 2, 3))
    again, cached = take(table, "a", ids(1, 2, 3, 4))
    assert (again, cached) == (first, 3)


def test_a_prompt_that_goes_another_way_reuses_the_slot_and_nothing_in_it() -> None:
    table = SlotTable(1)
    slot, _ = take(table, "a", ids(1, 2, 3))
    table.release(slot, ids(1, 2, 3))
    assert take(table, "a", ids(1, 9, 3, 4))[1] == 0


def test_a_shorter_prompt_reuses_nothing() -> None:
    table = SlotTable(1)
    slot, _ = take(table, "a", ids(1, 2, 3))
    table.release(slot, ids(1, 2, 3))
    assert take(table, "a", ids(1, 2))[1] == 0


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    table = SlotTable(1)
    slot, _ = take(table, "a", ids(1, 2, 3))
    table.release(slot, ids(1, 2, 3))
    assert take(table, "a", ids(1, 2, 3))[1] == 2


def test_the_session_unused_for_longest_loses_its_slot_first() -> None:
    table = SlotTable(2)
    for name in "ab":
        slot, _ = take(table, name, ids(1))
        table.release(slot, ids(1))
    slot, _ = take(table, "a", ids(1, 2))
    table.release(slot, ids(1, 2))
    take(table, "c", ids(5))
    assert table.idle("a") is not None
    assert table.idle("b") is None


def test_no_slot_is_given_while_all_are_busy() -> None:
    table = SlotTable(1)
    take(table, "a", ids(1))
    assert table.acquire("b", ids(1)) is None


def test_after_a_swap_no_session_finds_anything_and_running_slots_are_not_kept() -> None:
    table = SlotTable(2)
    idle, _ = take(table, "idle", ids(1))
    running, _ = take(table, "running", ids(1))
    table.release(idle, ids(1))
    table.swapped()
    table.release(running, ids(1, 2))
    assert take(table, "idle", ids(1, 2))[1] == 0
    assert take(table, "running", ids(1, 2, 3))[1] == 0


def test_two_calls_of_one_session_at_once_leave_one_slot_kept_and_the_other_free() -> None:
    table = SlotTable(2)
    one, _ = take(table, "a", ids(1))
    two, _ = take(table, "a", ids(2))
    table.release(one, ids(1, 7))
    table.release(two, ids(2, 7))
    assert table.num_available == 2
    assert take(table, "a", ids(2, 7, 8))[1] == 2
    assert take(table, "b", ids(1))[0] is one


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["take", "keep", "drop", "swap"])), max_size=60))
def test_slots_are_neither_lost_nor_given_twice(moves: list[tuple[str, str]]) -> None:
    table, held = SlotTable(3), []
    for session, move in moves:
        if move == "swap":
            table.swapped()
        elif move == "take":
            got = table.acquire(session, ids(1, 2))
            assert (got is None) == (len(held) == 3)
            held += [got[0]] if got else []
        elif held:
            table.release(held.pop(0), ids(1, 2, 3) if move == "keep" else None)
        assert len(set(held)) == len(held)
        assert table.num_available == 3 - len(held)
