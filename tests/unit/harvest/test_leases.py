"""States of leases: who may be lent, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import EngineError
from etude.harvest.leases import Lease, Leases

NAMES = ("a", "b", "c")


def test_an_engine_that_is_lent_is_not_lent_again() -> None:
    leases = Leases(NAMES)
    leases.move("a", Lease.DRAINING)
    for _ in range(2):
        with pytest.raises(EngineError, match="a cannot be draining now"):
            leases.move("a", Lease.DRAINING)
    leases.move("a", Lease.LOADING)
    leases.move("a", Lease.LENT)
    with pytest.raises(EngineError, match="it is lent"):
        leases.move("a", Lease.DRAINING)


def test_the_last_engines_of_production_stay() -> None:
    leases = Leases(NAMES, min_serving=2)
    leases.move("a", Lease.DRAINING)
    with pytest.raises(EngineError, match="2 must stay"):
        leases.move("b", Lease.DRAINING)
    assert leases.changes(3, dict.fromkeys(NAMES, 0.0)) == ([], [])


def test_the_least_loaded_engines_are_lent_and_those_with_the_least_to_load_come_back() -> None:
    leases = Leases(NAMES)
    load = {"a": 3.0, "b": 1.0, "c": 2.0}
    assert leases.changes(2, load) == (["b", "c"], [])
    for state in (Lease.DRAINING, Lease.LOADING, Lease.LENT):
        leases.move("b", state)
    leases.move("c", Lease.DRAINING)
    assert leases.changes(1, load) == ([], ["c"])
    assert leases.changes(0, load) == ([], ["c", "b"])


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(list(Lease))), max_size=60), st.integers(1, 3))
def test_whatever_is_asked_enough_engines_serve_or_return_and_a_refusal_changes_nothing(
    asked: list[tuple[str, Lease]], stay: int
) -> None:
    leases = Leases(NAMES, min_serving=stay)
    for name, state in asked:
        before = dict(leases.states)
        try:
            leases.move(name, state)
        except EngineError:
            assert leases.states == before
        assert leases.count(Lease.SERVING) >= stay
