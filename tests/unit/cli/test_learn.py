"""How `etude learn` reads signals."""

from __future__ import annotations

from pathlib import Path

from tests.unit.signals.given import Clock, add, given, opened

from etude.cli.learn import FeedbackSignals
from etude.privacy import Level, PrivacyFolder, Subject

ACME, BOB = Subject.of("acme"), Subject.of("acme", "bob")


def test_a_signal_is_of_the_answer_that_it_names_and_of_no_other_one_of_its_response(tmp_path: Path) -> None:
    clock = Clock()
    with PrivacyFolder(tmp_path / "privacy") as folder:
        folder.consent._clock = clock
        folder.consent.set(ACME, Level.TRAIN)
        with opened(tmp_path / "f.sqlite", clock, privacy=folder) as file:
            one, two = (file.ids.new("acme", "bob", "m", 3) for _ in range(2))
            clock.now += 5
            add(file, given(one, "a", answer=1), given(one, "b", answer=2), given(two, "c", value=0.5))
            found = FeedbackSignals(file).values_of([(one, 0), (one, 1), (two, 0)])
    assert found == {(one, 1): {"kept": [1.0]}, (two, 0): {"kept": [0.5]}}


def test_a_signal_that_was_not_kept_for_training_is_not_trained_on_whatever_its_user_allows_later(
    tmp_path: Path,
) -> None:
    clock = Clock()
    with PrivacyFolder(tmp_path / "privacy") as folder:
        folder.consent._clock = clock
        folder.consent.set(ACME, Level.TRAIN)
        with opened(tmp_path / "f.sqlite", clock, privacy=folder) as file:
            one = file.ids.new("acme", "bob", "m")
            clock.now += 5
            add(file, given(one, "a", name="accepted"))
            clock.now += 5
            folder.consent.set(BOB, Level.METRICS)
            clock.now += 5
            assert add(file, given(one, "b", name="kept")) == ["stored"]
            clock.now += 5
            folder.consent.set(BOB, Level.TRAIN)
            found = FeedbackSignals(file).values_of([(one, 0)])
    assert found == {(one, 0): {"accepted": [1.0]}}
