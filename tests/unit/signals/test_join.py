"""Captured answers with their signals, after a window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.served_answers import served_answer
from tests.unit.signals.given import Clock, add, given, opened

from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject
from etude.signals import Cursor, FeedbackFile, settled_answers
from etude.signals.join import GRACE_S

WINDOW_S = 3600.0


class Product:
    """A product whose users' answers are captured now, and whose signals come at any time."""

    def __init__(self, folder: PrivacyFolder, file: FeedbackFile, clock: Clock) -> None:
        self.folder, self.file, self.clock = folder, file, clock
        self.begin = clock.now

    def answers(self, *users: str) -> list[str]:
        """Serve an answer to each of these users, a second apart, and capture it; their ids."""
        writer, ids = CaptureWriter(self.folder.path), list[str]()
        for user in users:
            ids.append(self.file.ids.new("acme", user, "laptop"))
            writer.offer(served_answer(user, response_id=ids[-1], at=self.clock.now))
            self.clock.now += 1
        assert writer.close(60)
        return ids

    def signal(self, response_id: str, user: str, after_s: float, **fields: object) -> None:
        """Receive a signal so long after the begin."""
        self.clock.now = self.begin + after_s
        number = f"{after_s}-{sorted(fields.items())}"
        assert add(self.file, given(response_id, number, **fields), user=user) == ["stored"]

    def settled(self, after_s: float, **options: object) -> list[tuple[str, dict[str, float], int]]:
        """The ids, outcomes and number of late signals of the answers that are settled so long after the begin."""
        now = Clock(self.begin + after_s)
        found = settled_answers(self.folder, self.file, settle_s=WINDOW_S, clock=now, **options)  # type: ignore[arg-type]
        return [(one.record.response_id, one.outcomes(), len(one.late)) for one in found]


@pytest.fixture
def product(tmp_path: Path) -> Iterator[Product]:
    import time

    clock = Clock(time.time() - 10)  # records expire by the true time
    with PrivacyFolder(tmp_path / "privacy") as folder:
        folder.consent._clock = Clock(clock.now - 10)
        folder.consent.set(Subject.of("acme"), Level.TRAIN)
        with opened(tmp_path / "f.sqlite", clock, privacy=folder) as file:
            yield Product(folder, file, clock)


def test_an_answer_is_settled_after_its_window_with_the_signals_that_came_within_it(product: Product) -> None:
    bob, eve = product.answers("bob", "eve")
    product.signal(bob, "bob", 10, name="accepted")
    product.signal(bob, "bob", 60, name="kept")
    product.signal(bob, "bob", WINDOW_S - 1, name="kept", value=0.0)
    product.signal(bob, "bob", WINDOW_S + 1, name="reverted")
    assert product.settled(WINDOW_S) == []
    assert product.settled(WINDOW_S + GRACE_S) == [(bob, {"accepted": 1.0, "kept": 0.0}, 1)]
    end = WINDOW_S + GRACE_S + 10
    assert product.settled(end) == [(bob, {"accepted": 1.0, "kept": 0.0}, 1), (eve, {}, 0)]  # who never rates counts
    product.signal(eve, "eve", 2 * WINDOW_S, name="kept")
    assert product.settled(end) == [(bob, {"accepted": 1.0, "kept": 0.0}, 1), (eve, {}, 1)]
    first, *_ = settled_answers(product.folder, product.file, settle_s=WINDOW_S, clock=Clock(product.begin + end))
    assert first.outcomes(with_late=True) == {"accepted": 1.0, "kept": 0.0, "reverted": 1.0}
    assert product.folder.records.read(first.record).num_sampled == 5


def test_a_join_goes_on_after_its_cursor_and_gives_every_answer_once(product: Product) -> None:
    ids = product.answers(*(f"user-{i}" for i in range(7)))
    cursor, seen = Cursor(), list[str]()
    for after_s in (0, 2.5, 2.5, 4, 100):
        now = Clock(product.begin + after_s + WINDOW_S + GRACE_S)
        for one in settled_answers(product.folder, product.file, settle_s=WINDOW_S, after=cursor, clock=now):
            seen.append(one.record.response_id)
            cursor = one.cursor
    assert seen == ids


def test_many_answers_are_joined_page_by_page(product: Product) -> None:
    ids = product.answers(*["bob"] * 600)
    add(product.file, *(given(one, f"s{i}", value=i / 600) for i, one in enumerate(ids)))
    found = product.settled(700 + WINDOW_S + GRACE_S)
    assert [(one, outcomes) for one, outcomes, _ in found] == [(one, {"kept": i / 600}) for i, one in enumerate(ids)]


def test_signals_are_of_the_answer_that_they_name(product: Product) -> None:
    writer = CaptureWriter(product.folder.path)
    response_id = product.file.ids.new("acme", "bob", "laptop", 3)
    for index in range(3):
        writer.offer(served_answer("bob", response_id=response_id, index=index, at=product.clock.now + index))
    assert writer.close(60)
    product.signal(response_id, "bob", 10, answer=2, value=0.5)
    found = product.settled(100 + WINDOW_S + GRACE_S)
    assert [outcomes for _, outcomes, _ in found] == [{}, {}, {"kept": 0.5}]


def test_a_signal_before_its_answer_is_captured_is_joined(product: Product) -> None:
    """Such as of a stream that is not complete yet, or while the capture's queue is long."""
    response_id = product.file.ids.new("acme", "bob", "laptop")
    product.clock.now += 1
    assert add(product.file, given(response_id)) == ["stored"]
    writer = CaptureWriter(product.folder.path)
    writer.offer(served_answer("bob", response_id=response_id, at=product.clock.now + 5))
    assert writer.close(60)
    assert product.settled(10 + WINDOW_S + GRACE_S) == [(response_id, {"kept": 1.0}, 0)]


def test_what_its_subject_does_not_allow_is_not_joined(product: Product) -> None:
    bob, eve, ann = product.answers("bob", "eve", "ann")
    for user, one in (("bob", bob), ("ann", ann)):
        product.signal(one, user, 10)
    consent, after = product.folder.consent, WINDOW_S + GRACE_S + 100
    consent._clock = product.clock
    consent.set(Subject.of("acme", "eve"), Level.METRICS)
    consent.set(Subject.of("acme", "ann"), Level.METRICS)
    product.clock.now += 1
    assert add(product.file, given(ann, "under metrics", name="rated"), user="ann") == ["stored"]
    product.clock.now += 1
    consent.set(Subject.of("acme", "ann"), Level.TRAIN)
    assert product.settled(after) == [(bob, {"kept": 1.0}, 0), (ann, {"kept": 1.0}, 0)]
    assert [one for one, _, _ in product.settled(after, level=Level.METRICS)] == [bob, eve, ann]
    product.folder.erase(Subject.of("acme", "bob"))
    assert product.settled(after) == [(ann, {"kept": 1.0}, 0)]
