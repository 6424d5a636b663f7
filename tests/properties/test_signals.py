"""Duplicates and any order never change what counts; no id but a given one is accepted."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.signals.given import BEGIN, DAY_S, Clock, add, opened
from tests.unit.signals.given import given as signal

from etude.signals import ResponseIds

CAP = 3
sent = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["kept", "rated"]), st.integers(0, 3)), max_size=24)


@settings(deadline=None, max_examples=25)
@given(sent, st.data())
def test_duplicates_and_order_change_no_count(signals: list[tuple[str, str, int]], data: st.DataObject) -> None:
    """Each signal: a user, a name, and the answer that it is about; the answers are of two days."""
    every = Counter((user, name, answer // 2) for user, name, answer in signals)
    expected = Counter({key: min(CAP, number) for key, number in every.items()})
    numbered = list(enumerate(signals))
    again = data.draw(st.lists(st.sampled_from(numbered), max_size=9)) if numbered else []
    arrivals = data.draw(st.permutations(numbered + again))
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(BEGIN - BEGIN % DAY_S)
        with opened(Path(folder) / "f.sqlite", clock, cap=CAP) as file:
            answers = dict[tuple[str, int], str]()
            for answer in range(4):
                answers |= {(user, answer): file.ids.new("acme", user, "m") for user in "ab"}
                clock.now += DAY_S / 2
            stored = 0
            for number, (user, name, answer) in arrivals:
                value = signal(answers[user, answer], f"s{number}", name=name)
                stored += add(file, value, user=user) == ["stored"]
            users = {response_id: (user, answer // 2) for (user, answer), response_id in answers.items()}
            told = [(users[one.response_id], one.name) for one in file.signals()]
            assert Counter((user, name, day) for (user, day), name in told) == expected
            assert stored == expected.total()


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_an_id_is_of_the_one_sender_that_it_was_given_to(organisation: str, user: str, other: str, eve: str) -> None:
    ids = ResponseIds(bytes(32), clock=Clock())
    given_id = ids.new(organisation, user, "m")
    assert (ids.verify(given_id, other, eve) is not None) == ((other, eve) == (organisation, user))


@given(st.text(max_size=140))
def test_no_text_is_an_id(text: str) -> None:
    assert ResponseIds(bytes(32)).verify(text, "acme", "") is None
