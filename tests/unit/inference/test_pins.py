"""Sessions that pin a version."""

from __future__ import annotations

from etude.inference.admission import VersionPins


def test_two_requests_of_a_session_hold_until_both_have_left() -> None:
    pins = VersionPins(lease_s=10.0)
    pins.enter("a")
    pins.enter("a")
    pins.leave("a", now=0.0, may_return=False)
    assert pins.held(now=0.0)
    pins.leave("a", now=0.0, may_return=False)
    assert not pins.held(now=0.0)


def test_the_last_call_of_a_session_ends_its_lease() -> None:
    pins = VersionPins(lease_s=10.0)
    for may_return in (True, False):
        pins.enter("a")
        pins.leave("a", now=0.0, may_return=may_return)
    assert not pins.held(now=0.0)


def test_a_session_that_never_comes_back_holds_for_its_lease_only() -> None:
    pins = VersionPins(lease_s=10.0)
    pins.enter("a")
    pins.leave("a", now=100.0, may_return=True)
    assert pins.held(now=109.9)
    assert not pins.held(now=110.0)
