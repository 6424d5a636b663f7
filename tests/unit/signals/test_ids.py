"""Signed ids of responses: none that the gateway did not give is accepted."""

from __future__ import annotations

import random
import secrets

from tests.unit.signals.given import BEGIN, Clock

from etude.signals import ResponseIds
from etude.signals.ids import PREFIXES, began_at, model_digest

SECRET = bytes(range(32))


def test_an_id_says_when_and_by_which_model_for_whom_it_was_given() -> None:
    ids = ResponseIds(SECRET, clock=Clock(BEGIN + 0.123))
    response_id = ids.new("acme", "bob", "laptop", 3)
    for prefix in ("", *PREFIXES):
        found = ids.verify(prefix + response_id, "acme", "bob")
        assert found is not None
        assert found == (response_id, BEGIN + 0.123, 3, model_digest("laptop"))
    assert began_at(response_id) == BEGIN + 0.123


def test_ids_are_different_also_within_a_millisecond() -> None:
    ids = ResponseIds(SECRET, clock=Clock())
    made = [ids.new("acme", "", "laptop") for _ in range(10_000)]
    assert len(set(made)) == len({one[-12:] for one in made}) == 10_000  # ids of tool calls end with the last 12


def test_no_id_is_accepted_from_another_sender_or_with_any_change() -> None:
    ids, chance = ResponseIds(SECRET, clock=Clock()), random.Random(0)
    good = ids.new("acme", "bob", "laptop")
    for organisation, user in (("acme", ""), ("acme", "eve"), ("acm", "ebob"), ("acmeb", "ob"), ("", "acmebob")):
        assert ids.verify(good, organisation, user) is None
    for bit in range(4 * len(good)):
        data = bytearray(bytes.fromhex(good))
        data[bit // 8] ^= 1 << bit % 8
        assert ids.verify(data.hex(), "acme", "bob") is None, bit
    assert ResponseIds(bytes(32)).verify(good, "acme", "bob") is None
    changed = (good[:-1], good + "0", good.upper(), f" {good}", f"{good}\n", f"chatcmpl-chatcmpl-{good}", "", "x" * 999)
    for forged in changed:
        assert ids.verify(forged, "acme", "bob") is None, forged
    for _ in range(20_000):
        own = ids.new("other", "mallory", "laptop")  # a true id of somebody else, cut and joined
        joined = good[: (cut := 2 * chance.randrange(32))] + own[cut:]
        assert joined == good or ids.verify(joined, "acme", "bob") is None
        assert ids.verify(secrets.token_hex(32), "acme", "bob") is None
