"""Which version answered, from few observations."""

from __future__ import annotations

import random

import msgspec
from tests.served_answers import VERSION, served_answer

from etude.records import Version, VersionSpan
from etude.signals.versions import KEPT, Observation, Observations, only_version


def test_every_answer_of_one_version_has_it_whatever_the_order_in_which_they_end() -> None:
    chance = random.Random(0)
    for _ in range(50):
        swaps = sorted(chance.uniform(0, 1000) for _ in range(5))
        truth = [
            (began, sum(began >= swap for swap in swaps)) for began in (chance.uniform(0, 1000) for _ in range(300))
        ]
        known, recorded = Observations(), list[Observation]()
        for began, number in chance.sample(truth, len(truth)):
            one = Observation("m", began, f"v{number}")
            recorded += [one] if known.add(one) else []
        assert len(recorded) < 150
        for began, number in truth:
            told = max((one for one in recorded if one.began <= began), key=lambda one: one.began)
            assert told.version == f"v{number}"


def test_answers_in_order_are_recorded_once_for_each_change() -> None:
    known = Observations([Observation("m", 0.0, "v0")])
    added = [i for i in range(1000) if known.add(Observation("m", float(i), f"v{i // 100}"))]
    assert added == [100 * i for i in range(1, 10)]


def test_memory_is_bounded() -> None:
    known = Observations()
    for i in range(2000):
        assert known.add(Observation("m", float(i), f"v{i}"))
    assert not known.add(Observation("m", 1.0, "old"))
    assert len(known._by_model["m"]) == KEPT


def test_an_answer_of_two_versions_says_nothing() -> None:
    completion = served_answer().completion
    assert only_version(completion) == str(VERSION)
    other = Version(8, VERSION.incarnation, VERSION.digest)
    mixed = (VersionSpan(VERSION, 3), VersionSpan(other, 2))
    assert only_version(msgspec.structs.replace(completion, spans=mixed)) == ""
