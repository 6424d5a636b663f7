"""Assignment of KV slots to sessions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.inference.slots import BLOCK, Prefix, Slot, SlotTable, num_shared_tokens


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def take(table: SlotTable, session: str, prompt: np.ndarray) -> tuple[Slot, int]:
    """Begin a request. Returns its slot and the number of tokens whose keys it began with, in whatever slot."""
    slot = table.acquire(session, prompt[:-1])
    assert slot is not None
    prefix = table.longest(slot, prompt[:-1], table.shared(prompt[:-1]))
    table.begin(slot, prompt, prefix)
    return slot, prefix.num_tokens


def end(table: SlotTable, slot: Slot, sampled: list[int] | None = None, *, keep: bool = True) -> None:
    """Everything is computed."""
    num_prompt = table.written(slot)
    table.extend(slot, sampled or [], held=num_prompt + len(sampled or []))
    table.release(slot, keep=keep)


def test_a_session_finds_its_slot_and_its_tokens_again() -> None:
    table = SlotTable(3, 64)
    first, cached = take(table, "a", ids(1, 2))
    assert cached == 0
    end(table, first, [3])
    again, cached = take(table, "a", ids(1, 2, 3, 4))
    assert (again, cached) == (first, 3)


def test_a_prompt_that_goes_another_way_reuses_what_it_has_in_common() -> None:
    table = SlotTable(1, 64)
    slot, _ = take(table, "a", ids(1, 2, 3))
    end(table, slot)
    assert take(table, "a", ids(1, 9, 3, 4))[1] == 1


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    table = SlotTable(1, 64)
    slot, _ = take(table, "a", ids(1, 2, 3))
    end(table, slot)
    assert take(table, "a", ids(1, 2, 3))[1] == 2


def test_the_session_unused_for_longest_loses_its_slot_first() -> None:
    table = SlotTable(2, 64)
    for name in "aba":
        slot, _ = take(table, name, ids(1))
        end(table, slot)
    take(table, "c", ids(5))
    assert table.idle("a") is not None
    assert table.idle("b") is None


def test_no_slot_is_given_while_all_are_busy() -> None:
    table = SlotTable(1, 64)
    take(table, "a", ids(1))
    assert table.acquire("b", ids(1)) is None


def test_after_a_swap_no_session_finds_anything() -> None:
    table = SlotTable(2, 64)
    idle, _ = take(table, "idle", ids(1))
    end(table, idle)
    table.swapped()
    assert table.idle("idle") is None
    assert take(table, "idle", ids(1, 2))[1] == 0


def test_of_two_concurrent_calls_of_a_session_the_last_keeps_its_slot_and_the_other_slot_is_free() -> None:
    table = SlotTable(2, 64)
    one, _ = take(table, "a", ids(1))
    two, _ = take(table, "a", ids(2))
    end(table, one, [7])
    end(table, two, [7])
    assert table.num_available == 2
    assert take(table, "a", ids(2, 7, 8)) == (two, 2)
    assert take(table, "b", ids(1))[0] is one


def test_tokens_that_a_request_has_not_computed_yet_are_nobodys_prefix() -> None:
    table, prompt = SlotTable(2, 256), np.arange(200, dtype=np.int32)
    slot, _ = take(table, "a", prompt)
    table.extend(slot, [], held=100)
    assert table.shared(prompt)[0] == 200
    assert take(table, "b", prompt)[1] == 100


def test_without_sharing_every_prompt_is_computed_whole() -> None:
    table, prompt = SlotTable(2, 64, share=False), np.arange(40, dtype=np.int32)
    slot, _ = take(table, "a", prompt)
    end(table, slot)
    assert take(table, "a", prompt)[1] == 0
    assert take(table, "b", prompt)[1] == 0


def test_equal_hashes_of_other_tokens_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.inference.slots._hashes", lambda ids: np.ones(len(ids) // BLOCK, np.uint64))
    table = SlotTable(2, 256)
    slot, _ = take(table, "a", np.arange(200, dtype=np.int32))
    end(table, slot)
    other = np.array([*range(40), *[7] * 100], np.int32)
    assert take(table, "b", other)[1] == 40


FEW = st.lists(st.integers(0, 1), max_size=3)
TEXTS = st.builds(
    lambda stem, cut, tail: (stem * 70)[:cut] + tail, st.sampled_from([[0], [0, 1]]), st.integers(0, 130), FEW
)


@given(st.lists(TEXTS, min_size=1, max_size=8), TEXTS, st.data())
def test_the_number_of_shared_tokens_is_that_of_a_plain_comparison(texts, asked, data) -> None:
    table = SlotTable(len(texts), 256)
    for i, text in enumerate(texts):
        slot = table.acquire(f"{i}", ids())
        assert slot is not None
        cut = data.draw(st.integers(0, len(text)))
        table.begin(slot, ids(*text[:cut]), Prefix(slot.index, 0))
        table.extend(slot, text[cut:], held=data.draw(st.integers(0, len(text))))
    expected = [num_shared_tokens(ids(*text), ids(*asked)) for text in texts]
    assert table.shared(ids(*asked)).tolist() == expected
    found = table.longest(None, ids(*asked), table.shared(ids(*asked)))
    assert found.num_tokens == max(min(n, held) for n, held in zip(expected, table.held.tolist(), strict=True))


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["take", "keep", "drop", "swap"])), max_size=60))
def test_slots_are_neither_lost_nor_given_twice(moves: list[tuple[str, str]]) -> None:
    table, held = SlotTable(3, 64), []
    for session, move in moves:
        if move == "swap":
            table.swapped()
        elif move == "take":
            assert (table.num_available == 0) == (len(held) == 3)
            held += [take(table, session, ids(1, 2))[0]] if len(held) < 3 else []
        elif held:
            table.release(held.pop(0), keep=move == "keep")
        assert len(set(held)) == len(held)
        assert table.num_available == 3 - len(held)
