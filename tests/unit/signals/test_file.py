"""A file of signals: what counts, what is refused, consent and erasure, versions, and what is on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.served_answers import VERSION
from tests.unit.signals.given import BEGIN, DAY_S, HOUR_S, Clock, add, given, opened

from etude.errors import InputError, PrivacyError, SignalRefused
from etude.privacy import Level, PrivacyFolder, Subject
from etude.signals import FeedbackFile
from etude.signals.file import Sent
from etude.signals.versions import Observation


def test_a_signal_counts_once_and_another_content_under_its_id_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "f.sqlite") as file:
        answer = file.ids.new("acme", "bob", "m", 2)
        assert add(file, given(f"chatcmpl-{answer}")) == ["stored"]
        assert add(file, given(answer), given(f"msg_{answer}")) == ["duplicate", "duplicate"]
        for other in ({"value": 0.5}, {"name": "rated"}, {"answer": 1}, {"at": BEGIN}):
            with pytest.raises(SignalRefused, match="another content") as refused:
                add(file, given(answer, **other))
            assert (refused.value.reason, refused.value.param) == ("conflict", "id")
        [signal] = file.signals()
        assert (signal.response_id, signal.name, signal.value, signal.answer) == (answer, "kept", 1.0, 0)


def test_a_request_is_accepted_whole_or_not_at_all(tmp_path: Path) -> None:
    with opened(tmp_path / "f.sqlite") as file:
        answer = file.ids.new("acme", "bob", "m")
        good = [given(answer, f"s{i}") for i in range(3)]
        for bad in (given("0" * 64, "x"), given(answer, "s1", value=0.25)):
            with pytest.raises(SignalRefused) as refused:
                add(file, *good, bad)
            assert refused.value.param.startswith("signals[3].")
            assert list(file.signals()) == []
        one, two = file.add([Sent("acme", "bob", [*good, given("0" * 64)]), Sent("acme", "bob", good)])
        assert isinstance(one, SignalRefused)
        assert [receipt.status.value for receipt in two] == ["stored"] * 3  # type: ignore[union-attr]


def test_a_signal_about_an_answer_that_the_response_does_not_have_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "f.sqlite") as file:
        one, three = file.ids.new("acme", "bob", "m"), file.ids.new("acme", "bob", "m", 3)
        for response, number, told in ((one, 1, "1 answer"), (one, 7, "1 answer"), (three, 3, "3 answers")):
            with pytest.raises(SignalRefused, match=f"no answer {number}") as refused:
                add(file, given(response, answer=number))
            assert (refused.value.reason, refused.value.param) == ("unknown", "answer")
            assert refused.value.facts == f"it has {told}"
        with pytest.raises(SignalRefused) as refused:
            add(file, given(three, "a", answer=2), given(one, "b", answer=7))
        assert refused.value.param == "signals[1].answer"
        assert add(file, given(three, answer=2)) == ["stored"]
        assert [signal.answer for signal in file.signals()] == [2]


def test_the_same_id_of_two_users_is_two_signals(tmp_path: Path) -> None:
    with opened(tmp_path / "f.sqlite") as file:
        for user in ("bob", "eve"):
            assert add(file, given(file.ids.new("acme", user, "m"), "1"), user=user) == ["stored"]
        assert len(list(file.signals())) == 2


def test_a_loud_user_counts_by_the_cap_and_costs_no_other(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path / "f.sqlite", clock, cap=5) as file:
        answers = [file.ids.new("acme", "bob", "m") for _ in range(50)]
        told = add(file, *(given(one, f"s{i}") for i, one in enumerate(answers[:7])))
        assert told == ["stored"] * 5 + ["over_cap"] * 2
        assert add(file, given(answers[9], "s9")) == ["over_cap"]
        assert add(file, given(answers[0], "r0", name="rated")) == ["stored"]
        assert add(file, given(answers[0], "s0")) == ["duplicate"]
        assert add(file, given(file.ids.new("acme", "eve", "m")), user="eve") == ["stored"]
        clock.now += DAY_S
        assert add(file, given(answers[9], "s9")) == [
            "over_cap"
        ]  # the day of the answer counts, not that of the signal
        assert add(file, given(file.ids.new("acme", "bob", "m"), "next")) == ["stored"]


@pytest.mark.parametrize(
    ("told", "kept", "clamped"),
    [
        (None, BEGIN + 2 * HOUR_S, False),
        (BEGIN + HOUR_S, BEGIN + HOUR_S, False),
        (BEGIN - HOUR_S, BEGIN, True),
        (BEGIN + 30 * DAY_S, BEGIN + 2 * HOUR_S, True),
        (0.0, BEGIN, True),
    ],
)
def test_a_wrong_clock_of_the_client_is_clamped_between_answer_and_receipt(
    tmp_path: Path, told: float | None, kept: float, clamped: bool
) -> None:
    clock = Clock()
    with opened(tmp_path / "f.sqlite", clock) as file:
        answer = file.ids.new("acme", "bob", "m")
        clock.now += 2 * HOUR_S
        add(file, given(answer, at=told))
        [signal] = file.signals()
        assert (signal.at, signal.clamped, signal.received, signal.began) == (kept, clamped, clock.now, BEGIN)


def test_a_gateway_whose_clock_is_ahead_costs_no_signal(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path / "f.sqlite", clock) as file:
        answer = file.ids.new("acme", "bob", "m")
        clock.now -= 30.0
        assert add(file, given(answer)) == ["stored"]
        [signal] = file.signals()
        assert signal.at == signal.began == BEGIN


def test_a_duplicate_never_comes_after_its_signal_has_expired(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path / "f.sqlite", clock, keep_days=2.0) as file:
        answer = file.ids.new("acme", "bob", "m")
        clock.now += 1.9 * DAY_S
        assert add(file, given(answer)) == ["stored"]
        assert file.expire() == 0
        clock.now += 0.2 * DAY_S
        assert file.expire() == 1
        with pytest.raises(SignalRefused, match=r"2\.1 days ago") as refused:
            add(file, given(answer))
        assert refused.value.reason == "expired"
        assert list(file.signals()) == []


def test_the_version_is_the_one_that_answered_also_if_it_is_known_only_later(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path / "f.sqlite", clock, keep_days=1.0) as file:
        answers = []
        for _ in range(4):
            answers.append(file.ids.new("acme", "bob", "m"))
            clock.now += 10
        add(file, *(given(one, f"s{i}") for i, one in enumerate(answers)))
        assert [(one.model, one.version) for one in file.signals()] == [("", "")] * 4
        file.add([], [Observation("m", BEGIN, "v1"), Observation("m", BEGIN + 20, "v2"), Observation("o", BEGIN, "w")])
        assert [(one.model, one.version) for one in file.signals()] == [("m", "v1")] * 2 + [("m", "v2")] * 2
        assert [(one.name, one.version, one.signals, one.subjects) for one in file.summaries()] == [
            ("kept", "v1", 2, 1),
            ("kept", "v2", 2, 1),
        ]
        clock.now = BEGIN + 25 + DAY_S
        file.expire()
        assert [one.version for one in file.signals()] == ["v2"]  # the observation of before the horizon is kept


def test_the_mean_of_a_summary_gives_each_user_the_same_weight(tmp_path: Path) -> None:
    with opened(tmp_path / "f.sqlite") as file:
        loud = [given(file.ids.new("acme", "loud", "m"), f"s{i}", value=0) for i in range(30)]
        add(file, *loud, user="loud")
        add(file, given(file.ids.new("acme", "quiet", "m"), value=True), user="quiet")
        [summary] = file.summaries()
        assert (summary.signals, summary.answers, summary.subjects, summary.mean) == (31, 31, 2, 0.5)


def test_consent_holds_for_signals_from_the_answer_on(tmp_path: Path) -> None:
    with PrivacyFolder(tmp_path / "privacy") as folder:
        clock = Clock()
        folder.consent._clock = clock
        with opened(tmp_path / "f.sqlite", clock, privacy=folder) as file:
            before = file.ids.new("acme", "bob", "m")
            assert add(file, given(before)) == ["no_consent"]
            clock.now += 10
            folder.consent.set(Subject.of("acme"), Level.TRAIN)
            assert add(file, given(before)) == ["no_consent"]  # its answer was given without consent
            clock.now += 10
            answer = file.ids.new("acme", "bob", "m")
            clock.now += 10
            folder.consent.set(Subject.of("acme", "bob"), Level.METRICS)
            clock.now += 10
            folder.consent.set(Subject.of("acme", "bob"), Level.TRAIN)
            assert add(file, given(answer)) == ["stored"]
            [signal] = file.signals()
            assert signal.level is Level.METRICS  # the lowest since the answer
            folder.consent.set(Subject.of("acme", "bob"), Level.OFF)
            assert list(file.signals()) == []
            assert add(file, given(answer, "s2")) == ["no_consent"]


def test_a_user_who_is_not_named_has_the_lowest_level_of_all(tmp_path: Path) -> None:
    with PrivacyFolder(tmp_path / "privacy") as folder, opened(tmp_path / "f.sqlite", privacy=folder) as file:
        folder.consent._clock = Clock(BEGIN - 10)
        folder.consent.set(Subject.of("acme"), Level.TRAIN)
        answer = file.ids.new("acme", "", "m")
        assert add(file, given(answer), user="") == ["stored"]
        folder.consent._clock = Clock(BEGIN + 1)
        folder.consent.set(Subject.of("acme", "eve"), Level.OFF)
        assert add(file, given(answer, "s2"), user="") == ["no_consent"]


def test_an_erasure_deletes_the_signals_and_those_that_come_later_are_not_kept(tmp_path: Path) -> None:
    with PrivacyFolder(tmp_path / "privacy") as folder:
        clock = Clock(BEGIN)
        folder.consent._clock = clock
        folder.consent.set(Subject.of("acme"), Level.TRAIN)
        clock.now += 1
        with opened(tmp_path / "f.sqlite", clock, privacy=folder) as file:
            answers = {user: file.ids.new("acme", user, "m") for user in ("bob", "eve", "")}
            for user, answer in answers.items():
                assert add(file, given(answer), user=user) == ["stored"]
            clock.now += 1
            done = folder.erase(Subject.of("acme", "bob"))
            assert done.attached == {(tmp_path / "f.sqlite").resolve(): 1}
            assert {one.response_id for one in file.store.signals()} == {answers["eve"], answers[""]}
            clock.now += 1
            folder.consent.set(Subject.of("acme", "bob"), Level.TRAIN)
            assert add(file, given(answers["bob"], "late")) == ["no_consent"]
            assert add(file, given(file.ids.new("acme", "bob", "m"), "new")) == ["stored"]
            assert folder.erase(Subject.of("acme")).attached == {(tmp_path / "f.sqlite").resolve(): 3}
            assert list(file.store.signals()) == []


def test_an_erasure_tells_of_a_file_of_signals_that_is_gone(tmp_path: Path) -> None:
    with PrivacyFolder(tmp_path / "privacy") as folder:
        opened(tmp_path / "f.sqlite", privacy=folder).close()
        (tmp_path / "f.sqlite").rename(tmp_path / "moved.sqlite")
        assert folder.erase(Subject.of("acme")).missing == [(tmp_path / "f.sqlite").resolve()]
        (tmp_path / "f.sqlite").touch()
        assert folder.erase(Subject.of("acme")).missing == []


def test_without_a_privacy_folder_subjects_are_erased_in_the_file(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path / "f.sqlite", clock) as file:
        answer = file.ids.new("acme", "bob", "m")
        assert add(file, given(answer)) == ["stored"]
        clock.now += 10
        assert file.erase(Subject.of("acme", "bob")) == 1
        assert add(file, given(answer)) == ["no_consent"]
        clock.now += 10
        assert add(file, given(file.ids.new("acme", "bob", "m"), "new")) == ["stored"]
        assert file.erase(Subject.of("acme")) == 1
    with (
        PrivacyFolder(tmp_path / "privacy") as folder,
        opened(tmp_path / "g.sqlite", privacy=folder) as file,
        pytest.raises(InputError, match="privacy erase acme"),
    ):
        file.erase(Subject.of("acme"))


def test_a_file_with_another_secret_or_privacy_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.sqlite"
    with pytest.raises(InputError, match="no file of signals"):
        FeedbackFile(path)
    opened(path).close()
    with PrivacyFolder(tmp_path / "privacy") as folder, pytest.raises(InputError, match="one privacy folder"):
        opened(path, privacy=folder)
    shutil.move(tmp_path / "f.sqlite.keys", tmp_path / "away")
    with pytest.raises(PrivacyError, match="is missing"):
        opened(path)
    assert not (tmp_path / "f.sqlite.keys").exists()
    opened(tmp_path / "g.sqlite").close()
    shutil.copytree(tmp_path / "g.sqlite.keys", tmp_path / "f.sqlite.keys")
    with pytest.raises(PrivacyError, match="other keys"):
        opened(path)


def test_only_the_owner_can_read_the_file_and_its_secret(tmp_path: Path) -> None:
    path = tmp_path / "new" / "f.sqlite"
    with opened(path) as file:
        add(file, given(file.ids.new("acme", "bob", "m")))
        for one in (*path.parent.glob("f.sqlite*"), *path.parent.glob("f.sqlite.keys/*")):
            assert not one.stat().st_mode & 0o077, one


def test_no_name_is_on_the_disk(tmp_path: Path) -> None:
    with PrivacyFolder(tmp_path / "privacy") as folder:
        for path, privacy in ((tmp_path / "f.sqlite", None), (tmp_path / "g.sqlite", folder)):
            folder.consent.set(Subject.of("organisation-acme"), Level.TRAIN)
            with FeedbackFile(path, create=True, privacy=privacy) as file:
                answer = file.ids.new("organisation-acme", "bob@example.org", str(VERSION))
                signal = given(answer, "of bob@example.org")
                assert add(file, signal, organisation="organisation-acme", user="bob@example.org") == ["stored"]
                for one in tmp_path.glob(f"{path.name}*"):
                    data = one.read_bytes() if one.is_file() else b""
                    assert b"bob" not in data, one
                    assert b"organisation-acme" not in data, one


def test_another_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with PrivacyFolder(tmp_path / "privacy"):
        pass
    path = tmp_path / "privacy" / "consent.sqlite"
    before = path.read_bytes()
    with pytest.raises(PrivacyError, match="is not a file of signals"):
        FeedbackFile.privacy_of(path)
    assert path.read_bytes() == before
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(PrivacyError, match="cannot be used"):
        FeedbackFile.privacy_of(path)
