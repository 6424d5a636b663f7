"""`etude feedback import`, `show` and `erase`, `etude privacy erase`, and `etude release observe --feedback`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.cli.test_releases import BEGIN, GATE, place
from tests.unit.signals.given import add, given

from etude.cli import main
from etude.errors import Exit
from etude.privacy import PrivacyFolder
from etude.releases import Releases
from etude.signals import FeedbackFile
from etude.signals.versions import Observation

__all__ = ["place"]
Feedback = Callable[..., int]


@pytest.fixture
def feedback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Feedback:
    monkeypatch.chdir(tmp_path)
    return lambda *words: main(["feedback", *words])


def made(*users: str, privacy: PrivacyFolder | None = None) -> list[str]:
    """Create the file of signals, and give each of these users of "acme" an answer; the ids."""
    with FeedbackFile(Path("feedback.sqlite"), create=True, privacy=privacy) as file:
        return [f"chatcmpl-{file.ids.new('acme', user, 'm')}" for user in users]


def write(*lines: dict[str, object] | str) -> None:
    Path("signals.jsonl").write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))


def line(response_id: str, user: str, signal_id: str, **changes: object) -> dict[str, object]:
    known = {"id": signal_id, "response_id": response_id, "name": "kept", "value": True}
    return known | {"organisation": "acme", "user": user} | changes


def test_a_file_is_imported_once_however_often_and_its_bad_lines_are_told(
    feedback: Feedback, capsys: pytest.CaptureFixture[str]
) -> None:
    bob, eve = made("bob", "eve")
    good = [line(bob, "bob", "1"), line(bob, "bob", "2", name="rated", value=0.5), line(eve, "eve", "1", value=0)]
    write(*good)
    assert feedback("import", "signals.jsonl") == 0
    assert capsys.readouterr().out == "3 signals: 3 stored; 0 lines refused\n"
    bad = [line(eve, "bob", "3"), line(bob, "bob", "1", value=0.1), "{", line(bob, "bob", "4", value=7), "x" * 200_000]
    write(*good, "", *bad, line(bob, "bob", "5"))
    assert feedback("import", "signals.jsonl") == Exit.FAILED
    told = capsys.readouterr()
    assert told.out == "4 signals: 3 duplicate, 1 stored; 5 lines refused\n"
    for number, said in (
        (5, "no answer"),
        (6, "another content"),
        (7, "not a signal"),
        (8, "outside"),
        (9, "not a sig"),
    ):
        assert f"line {number} of signals.jsonl is refused: " in told.err
        assert said in next(one for one in told.err.splitlines() if one.startswith(f"line {number} "))
    assert told.err.count("hint: ") == 5
    assert feedback("show", "--json") == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert (found["kept"]["signals"], found["kept"]["subjects"], found["kept"]["mean"]) == (3, 2, 0.5)
    assert feedback("show") == 0
    assert "rated" in capsys.readouterr().out


def test_a_line_without_organisation_and_user_is_refused_with_the_names_of_these_fields(
    feedback: Feedback, capsys: pytest.CaptureFixture[str]
) -> None:
    [bob] = made("bob")
    write({"id": "1", "response_id": bob, "name": "kept", "value": True}, line(bob, "eve", "1"))
    assert feedback("import", "signals.jsonl") == Exit.FAILED
    told = capsys.readouterr().err
    assert "the line's organisation is 'local' and its user ''" in told
    assert "the line's organisation is 'acme' and its user 'eve'" in told
    assert told.count("hint: set the fields organisation (name of the API key") == 2
    assert "header" not in told


def test_a_subject_is_erased_from_a_file_without_a_privacy_folder(
    feedback: Feedback, capsys: pytest.CaptureFixture[str]
) -> None:
    bob, eve = made("bob", "eve")
    write(line(bob, "bob", "1"), line(eve, "eve", "1"))
    assert feedback("import", "signals.jsonl") == 0
    assert feedback("erase", "acme/bob") == 0
    assert "erased acme/bob: 1 signals deleted" in capsys.readouterr().out
    assert feedback("import", "signals.jsonl") == 0
    assert "2 signals: 1 duplicate, 1 no_consent" in capsys.readouterr().out


def test_an_erasure_of_the_privacy_folder_deletes_signals_and_tells_of_missing_files(
    feedback: Feedback, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["privacy", "set", "acme", "train"]) == 0
    with PrivacyFolder(Path("privacy")) as folder:
        [bob] = made("bob", privacy=folder)
    write(line(bob, "bob", "1"))
    assert feedback("import", "signals.jsonl") == 0  # the file knows its folder of consent
    assert feedback("erase", "acme/bob") == Exit.BAD_INPUT
    assert main(["privacy", "erase", "acme/bob"]) == 0
    assert "feedback.sqlite: 1 signals deleted" in capsys.readouterr().out
    assert feedback("import", "signals.jsonl") == 0
    assert "1 signals: 1 no_consent" in capsys.readouterr().out
    Path("privacy").rename("moved")
    assert feedback("show") == Exit.BAD_INPUT
    assert "--capture DIR" in capsys.readouterr().err
    assert feedback("show", "--capture", "moved") == 0
    Path("feedback.sqlite").rename("away.sqlite")
    assert main(["privacy", "erase", "acme/bob", "--folder", "moved"]) == 1
    assert "its signals were not deleted" in capsys.readouterr().err


def test_a_file_that_does_not_exist_is_not_created(feedback: Feedback, capsys: pytest.CaptureFixture[str]) -> None:
    write("{}")
    for words in (("show",), ("import", "signals.jsonl"), ("erase", "acme")):
        assert feedback(*words) == Exit.BAD_INPUT
        assert "there is no file of signals" in capsys.readouterr().err
    made("bob")
    assert feedback("import", "none.jsonl") == Exit.BAD_INPUT
    assert not Path("none.jsonl").exists()


def test_signals_become_outcomes_of_a_release(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (BEGIN, GATE, ["release", "advance"]):
        assert main(words) == 0
    releases = Releases(Path("releases.sqlite"))
    release = releases.newest()
    releases.close()
    began = float(int(release.since) + 10)
    clock = [began]
    with FeedbackFile(Path("feedback.sqlite"), create=True, clock=lambda: clock[0]) as file:
        versions = {"m": release.stable, "m-canary": release.candidate}
        file.add([], [Observation(model, began, str(version)) for model, version in versions.items()])
        for user in range(10):
            answer = file.ids.new("acme", f"{user}", "m-canary" if user % 2 else "m")
            clock[0] += 1
            assert add(file, given(answer, "1"), given(answer, "2", name="rated"), user=f"{user}") == ["stored"] * 2
    capsys.readouterr()
    assert main(["release", "observe", "--feedback", "feedback.sqlite"]) == 0
    assert capsys.readouterr().out == "10 of 10 outcomes are new and count\n"
    assert main(["release", "observe", "--feedback", "feedback.sqlite"]) == 0
    assert capsys.readouterr().out == "0 of 10 outcomes are new and count\n"
    assert main(["release", "why"]) == 0
    assert main(["release", "observe"]) == Exit.BAD_INPUT
    assert main(["release", "observe", "x.jsonl", "--feedback", "feedback.sqlite"]) == Exit.BAD_INPUT
