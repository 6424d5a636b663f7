from __future__ import annotations

import pytest

from etude.errors import InputError, PrivacyError
from etude.privacy import Level, PrivacyFolder, Subject

ACME, BOB, EVE = Subject.of("acme"), Subject.of("acme", "bob"), Subject.of("acme", "eve")


def test_consent_is_off_until_it_is_given(tmp_path):
    with PrivacyFolder(tmp_path) as folder:
        assert {folder.consent.level(one) for one in (ACME, BOB)} == {Level.OFF}
        folder.consent.set(BOB, Level.TRAIN)
        assert folder.consent.level(BOB) is Level.OFF
        assert not folder.consent.allowed(BOB, Level.METRICS)


@pytest.mark.parametrize("organisation", list(Level))
@pytest.mark.parametrize("user", [None, *Level])
def test_the_lower_level_of_organisation_and_user_counts(tmp_path, organisation, user):
    with PrivacyFolder(tmp_path) as folder:
        folder.consent.set(ACME, organisation)
        if user is not None:
            folder.consent.set(BOB, user)
        expected = organisation if user is None else min(organisation, user)
        assert folder.consent.level(BOB) is expected
        assert folder.consent.level(EVE) is organisation
        assert folder.consent.level(ACME) is expected  # a request that names no user may be of bob
        assert [folder.consent.allowed(BOB, level) for level in Level] == [level <= expected for level in Level]


def test_a_change_holds_at_once_for_another_process_and_history_keeps_it(tmp_path):
    with PrivacyFolder(tmp_path) as ours, PrivacyFolder(tmp_path) as theirs:
        ours.consent.set(ACME, Level.TRAIN)
        assert theirs.consent.allowed(BOB, Level.TRAIN)
        ours.consent.set(BOB, Level.METRICS)
        assert not theirs.consent.allowed(BOB, Level.CAPTURE)
        ours.consent.set(BOB, Level.TRAIN)
        changes = theirs.consent.history(BOB)
        assert [change.level for change in changes] == [Level.METRICS, Level.TRAIN]
        assert theirs.consent.level(BOB, at=changes[0].at) is Level.METRICS
        assert theirs.consent.organisations() == {"acme": (Level.TRAIN, 1)}
    with PrivacyFolder(tmp_path) as again:
        assert again.consent.level(BOB) is Level.TRAIN


def test_no_file_has_the_name_of_a_user(tmp_path):
    with PrivacyFolder(tmp_path) as folder:
        folder.consent.set(BOB._replace(user="bob-the-user"), Level.TRAIN)
        folder.erase(BOB._replace(user="bob-the-user"))
        for path in tmp_path.rglob("*"):
            assert "bob-the-user" not in path.name
            assert path.is_dir() or b"bob-the-user" not in path.read_bytes()


@pytest.mark.parametrize("text", ["", "/", "/bob", "acme/", "a" * 257, "acme/" + "b" * 257, "acme/b\nb", "acme/b\0"])
def test_what_names_no_subject_is_an_error_with_a_hint(text):
    with pytest.raises(InputError, match="hint"):
        raise_text(lambda: Subject.parse(text))


def raise_text(work):
    try:
        work()
    except InputError as error:
        raise InputError(str(error), hint="") from None


def test_lost_or_exchanged_keys_are_an_error_and_not_another_subject(tmp_path):
    with PrivacyFolder(tmp_path / "a") as folder:
        folder.consent.set(ACME, Level.TRAIN)
    PrivacyFolder(tmp_path / "b").close()
    secret = tmp_path / "a" / "keys" / "secret"
    kept = secret.read_bytes()
    secret.unlink()
    with pytest.raises(PrivacyError, match="missing"):
        PrivacyFolder(tmp_path / "a")
    assert not secret.exists()
    secret.write_bytes((tmp_path / "b" / "keys" / "secret").read_bytes())
    with pytest.raises(PrivacyError, match="was not written with the keys in"):
        PrivacyFolder(tmp_path / "a")
    secret.write_bytes(kept[:5])
    with pytest.raises(PrivacyError, match="damaged"):
        PrivacyFolder(tmp_path / "a")
    secret.write_bytes(kept)
    with PrivacyFolder(tmp_path / "a") as folder:
        assert folder.consent.level(BOB) is Level.TRAIN


def test_a_file_that_is_no_database_is_an_error(tmp_path):
    PrivacyFolder(tmp_path).close()
    (tmp_path / "records.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(PrivacyError, match=r"records\.sqlite cannot be used"):
        PrivacyFolder(tmp_path)
