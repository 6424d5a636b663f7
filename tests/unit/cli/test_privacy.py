from __future__ import annotations

import json
import re
import shutil

import pytest
from tests.served_answers import served_answer

from etude import cli
from etude.cli.privacy import SESSIONS
from etude.errors import Exit
from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject

SECRET = "mail bob@example.org, password=correct-horse"


@pytest.fixture
def privacy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: cli.main(["privacy", *words])


def capture(*answers) -> None:
    from pathlib import Path

    writer = CaptureWriter(Path("privacy"))
    for answer in answers:
        writer.offer(answer)
    assert writer.close(60)


def test_consent_is_set_and_shown_with_its_history(privacy, capsys):
    assert privacy("set", "acme", "train") == 0
    assert privacy("set", "acme/bob", "metrics") == 0
    assert privacy("set", "acme/bob", "capture") == 0
    capture(served_answer("bob"))
    assert privacy("show", "acme/bob") == 0
    out = capsys.readouterr().out
    assert "acme: train\nacme/bob: metrics\nacme/bob: capture\n" in out
    assert "acme/bob: capture (own choice: capture)" in out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("  20")] == ["metrics", "capture"]
    assert "records: 1 (1 capture)" in out
    assert privacy("show") == 0
    assert capsys.readouterr().out == ("acme: train; users with a level of their own: 1\nserved answers: 1 captured\n")


def test_a_user_who_chooses_more_than_the_organisation_is_told_what_holds(privacy, capsys):
    privacy("set", "acme", "metrics")
    privacy("set", "acme/bob", "train")
    assert "acme/bob: metrics\n  set to train, but its organisation's level is lower" in capsys.readouterr().out


def test_an_export_has_everything_and_a_redacted_one_no_secret_and_no_token(privacy, capsys):
    privacy("set", "acme", "train")
    capture(served_answer("bob", said=SECRET))
    capsys.readouterr()
    assert privacy("export", "acme/bob") == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["reply"]["content"] == SECRET
    assert bytes(whole["token_ids"]).decode() == SECRET
    assert privacy("export", "acme/bob", "--redacted") == 0
    redacted = json.loads(capsys.readouterr().out)
    assert redacted["reply"]["content"] == "mail <email>, password=<secret>"
    assert redacted.keys() == whole.keys() - {"prompt_ids", "token_ids", "logprobs"}
    assert "bob" not in str(redacted)
    assert "horse" not in str(redacted)


def test_an_export_has_the_signals_and_sessions_of_a_subject_and_of_no_other(privacy, capsys, tmp_path):
    from tests.unit.signals.given import add, given

    from etude.signals import FeedbackFile
    from etude.tasks.sessions.store import FILE, SessionStore, StoredSession

    assert FILE == SESSIONS
    privacy("set", "acme", "train")
    capture(served_answer("bob", said=SECRET), served_answer("eve"))
    with PrivacyFolder(tmp_path / "privacy") as folder:
        with FeedbackFile(tmp_path / "f.sqlite", privacy=folder, create=True) as file:
            for user in ("bob", "eve"):
                response = file.ids.new("acme", user, "m")
                add(file, given(response, user, name="rated", value=0.25), user=user)
        records = {user: folder.records.of(folder.keys.names(Subject.of("acme", user)))[0] for user in ("bob", "eve")}
    with SessionStore(tmp_path / "privacy") as store:
        for user, record in records.items():
            assert store.add(record, StoredSession(name=f"of {user}", reason=f"mail {user}@example.org"), user)
    privacy("set", "acme/bob", "metrics")  # what is kept is exported, whatever may be done with it now
    capsys.readouterr()
    assert privacy("export", "acme/bob") == 0
    record, *others = map(json.loads, capsys.readouterr().out.splitlines())
    assert record["reply"]["content"] == SECRET
    told = {name: one for one in others for name in ("signal", "session") if name in one}
    assert len(others) == 2
    assert (told["signal"]["signal"], told["signal"]["value"], told["signal"]["level"]) == ("rated", 0.25, "train")
    assert (told["session"]["session"], told["session"]["reason"]) == ("of bob", "mail bob@example.org")
    assert privacy("export", "acme/bob", "--redacted") == 0
    assert "mail <email>" in (out := capsys.readouterr().out)
    assert "example.org" not in out
    assert privacy("export", "acme") == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    (tmp_path / "f.sqlite").rename(tmp_path / "moved.sqlite")
    assert privacy("export", "acme/bob") == Exit.FAILED
    assert "f.sqlite is missing: its signals are not exported" in capsys.readouterr().err


def test_an_export_of_an_unknown_name_warns(privacy, capsys):
    privacy("set", "acme", "train")
    capture(served_answer("bob"))
    capsys.readouterr()
    assert privacy("export", "acme/bbo") == 0
    told = capsys.readouterr()
    assert told.out == ""
    assert "warning: nothing was found for acme/bbo" in told.err


def test_a_redacted_prompt_of_token_ids_is_left_out(privacy, capsys):
    privacy("set", "acme", "train")
    capture(served_answer("bob", messages=[1, 2, 3]))
    capsys.readouterr()
    assert privacy("export", "acme/bob", "--redacted") == 0
    assert "messages" not in json.loads(capsys.readouterr().out)


def test_a_damaged_record_is_told_and_the_others_are_exported(privacy, capsys, tmp_path):
    privacy("set", "acme", "train")
    capture(served_answer("bob"), served_answer("bob", said="second"))
    with PrivacyFolder(tmp_path / "privacy") as folder:
        folder.records._db.execute("UPDATE records SET data = zeroblob(99) WHERE rowid = 1")
    capsys.readouterr()
    assert privacy("export", "acme/bob") == Exit.FAILED
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 1
    assert "is damaged" in told.err
    assert "hint:" in told.err


def test_erasing_and_expiring(privacy, capsys):
    privacy("set", "acme", "train")
    capture(served_answer("bob"), served_answer("eve"))
    capsys.readouterr()
    assert privacy("erase", "acme/bob") == 0
    out = capsys.readouterr().out
    assert "erased acme/bob: 1 keys destroyed, 1 records deleted; its level is off" in out
    assert "rollouts that hold its data: none" in out
    assert privacy("export", "acme/bob") == 0
    assert capsys.readouterr().out == ""
    assert privacy("expire") == 0
    assert capsys.readouterr().out == "0 records deleted\n"


def test_erasing_an_unknown_name_warns_and_sets_it_to_off(privacy, capsys, tmp_path):
    privacy("set", "acme", "train")
    privacy("set", "acme/eve", "metrics")
    privacy("set", "globex/ann", "off")  # an organisation of which only a user has a level
    capture(served_answer("bob"))
    capsys.readouterr()
    for subject in ("acme/bob", "acme/eve", "acme", "globex"):
        assert privacy("erase", subject) == 0
        assert capsys.readouterr().err == "", subject
    for subject in ("acme/nosuch", "nosuch"):
        assert privacy("erase", subject) == 0
        told = capsys.readouterr()
        assert f"warning: nothing was found for {subject}: " in told.err
        assert "hint: check the name" in told.err
        assert "its level is off" in told.out
        with PrivacyFolder(tmp_path / "privacy") as folder:
            assert folder.consent.chosen(Subject.parse(subject)) is Level.OFF


def test_a_record_whose_subject_was_erased_is_told_in_full(privacy, capsys, tmp_path):
    privacy("set", "acme", "train")
    capture(served_answer("bob"))
    assert cli.main(["backup", "privacy", "backups"]) == 0
    assert privacy("erase", "acme/bob") == 0
    assert cli.main(["restore", "backups", "restored"]) == 0
    shutil.copytree(tmp_path / "privacy" / "keys", tmp_path / "restored" / "privacy" / "keys")
    capsys.readouterr()
    assert privacy("export", "acme/bob", "--folder", "restored/privacy") == Exit.FAILED
    told = capsys.readouterr().err
    assert re.fullmatch(
        "error: the record [0-9a-f]{32} cannot be read: the key of its subject was destroyed\n"
        "  hint: the subject was erased, and the record cannot be recovered; erase the subject again to delete it\n",
        told,
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["show", "acme"], "not a folder of consent"),
        (["erase", "acme/bob"], "not a folder of consent"),
        (["set", "acme/", "off"], "names no user"),
        (["set", "/bob", "off"], "not the name of an organisation"),
    ],
)
def test_bad_input_is_an_error_with_a_hint_and_makes_nothing(privacy, capsys, tmp_path, words, told):
    assert privacy(*words) == Exit.BAD_INPUT
    err = capsys.readouterr().err
    assert told in err
    assert "hint:" in err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_level_names_the_nearest(privacy, capsys):
    with pytest.raises(SystemExit):
        privacy("set", "acme", "trian")
    assert "'train'" in capsys.readouterr().err


def test_without_the_folder_of_keys_nothing_is_done(privacy, capsys, tmp_path):
    privacy("set", "acme", "train")
    shutil.rmtree(tmp_path / "privacy" / "keys")
    assert privacy("erase", "acme") == Exit.FAILED
    assert "secret is missing" in capsys.readouterr().err
    assert not (tmp_path / "privacy" / "keys").exists()
    assert Subject.parse("acme").user == ""
