"""The commands of `etude release`, from the begin to the end of a release, and what they refuse."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.served_answers import served_answer
from tests.unit.releases.played import branches, published
from tests.unit.releases.test_gate import played
from tests.unit.signals.given import add, given

from etude.cli import main
from etude.cli.serve import _stable
from etude.config import build, to_toml
from etude.evals import write_rows
from etude.evals.records import record_path, write_record
from etude.inference.config import EngineConfig
from etude.loop.config import RunConfig
from etude.loop.locations import weights_store
from etude.loop.serving import ModelSource
from etude.numerics.config import NumericsConfig
from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject
from etude.records.completion import Version, VersionSpan
from etude.releases import Releases
from etude.releases.assignment import pseudonym
from etude.run import RunFolder
from etude.signals import FeedbackFile, FeedbackWriter
from etude.stores import DirectoryStore
from etude.weights.chain.branches import drop

SETTINGS = """
shares = [50]
window_s = 0
metrics = [{name = "kept"}]

[[gate]]
suite = "repair"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store of two versions, results of both, and settings; it is the current one."""
    monkeypatch.chdir(tmp_path)
    versions = published(DirectoryStore(tmp_path / "store"))
    (tmp_path / "release.toml").write_text(SETTINGS)
    for label, version, solved in (("new", versions[1], 300), ("worse", versions[1], 200), ("old", versions[0], 300)):
        _write(tmp_path / "evals", label, version, solved)
    return tmp_path


def _write(folder: Path, label: str, version: Version, solved: int, **changed: Any) -> None:
    done = played(version, solved, label=label, **changed)
    write_record(folder, done.record)
    write_rows(record_path(folder, "repair", label).with_suffix(".parquet"), done.rows)


BEGIN = ["release", "begin", "store", "1", "--settings", "release.toml"]
GATE = ["release", "gate", "--candidate", "new", "--stable", "old"]


def test_a_release_from_its_begin_to_its_rollback(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = DirectoryStore(place / "store")
    stable, _ = branches(store)
    assert main(BEGIN) == 0
    assert main(GATE) == 0
    assert "repair: +0.000" in capsys.readouterr().out
    assert main(["release", "advance"]) == 0
    lines = [{"id": f"{i}", "subject": f"user-{i}", "metric": "kept", "value": i % 2} for i in range(50)]
    (place / "outcomes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main(["release", "observe", "outcomes.jsonl"]) == 0
    assert "50 of 50 outcomes" in capsys.readouterr().out
    assert main(["release", "hold", "--reason", "the weekend"]) == 0
    assert main(["release", "resume", "--reason", "monday"]) == 0
    assert main(["release", "advance"]) == 0
    assert "now: wait: kept is not shown to be better" in capsys.readouterr().out
    assert main(["release", "promote", "--reason", "users like it"]) == 0
    candidate = branches(store)[0]
    assert candidate != stable
    assert main(["release", "rollback", "--reason", "they do not"]) == 0
    assert branches(store) == (stable, stable)
    assert main(["release", "list"]) == 0
    assert "release 1: rolled back since" in capsys.readouterr().out
    assert main(["release", "why"]) == 0
    told = capsys.readouterr().out
    for said in ("canary at 50 %, by rules: passed its gate", "held at 50 %, by operator: the weekend", "they do not"):
        assert said in told


def test_why_and_advance_tell_the_dollars_per_kept_change_of_both_versions(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("etude.signals.join.GRACE_S", 0.0)
    (place / "prices.toml").write_text("[models.policy]\ninput = 1.0\ncached_input = 1.0\noutput = 1.0\n")
    assert main([*BEGIN, "--set", "window_s=0.3"]) == 0
    assert main(GATE) == 0
    with (
        PrivacyFolder(place / "privacy") as folder,
        FeedbackFile(place / "f.sqlite", privacy=folder, create=True) as file,
    ):
        folder.consent.set(Subject.of("acme"), Level.METRICS)
        time.sleep(0.01)  # ids have milliseconds, and the consent must be older
        assert main(["release", "advance"]) == 0
        writer = CaptureWriter(folder.path)
        with contextlib.closing(Releases(place / "releases.sqlite")) as releases:
            release = releases.newest()
        for number, (user, version) in enumerate((("bob", release.stable), ("eve", release.candidate)) * 2):
            response_id = file.ids.new("acme", user, "m")
            answer = served_answer(user, said="yes", response_id=response_id)  # 5 tokens read, 3 sampled
            done = msgspec.structs.replace(answer.completion, spans=(VersionSpan(version, 3),))
            writer.offer(msgspec.structs.replace(answer, completion=done))
            add(file, given(response_id, f"s{number}", value=float(number < 3)), user=user)
        assert writer.close(60)
    time.sleep(0.35)
    capsys.readouterr()
    for command in ("why", "advance"):
        assert main(["release", command, "--prices", "prices.toml", "--feedback", "f.sqlite"]) == 0
        told = capsys.readouterr().out
        assert "dollars per kept change, stable: 8e-06; 2 kept, 2 answers of 1 users" in told
        assert "dollars per kept change, canary: 1.6e-05; 1 kept, 2 answers of 1 users" in told
    (place / "prices.toml").write_text("machine_second = 1.0\n")
    assert main(["release", "why", "--prices", "prices.toml", "--feedback", "f.sqlite"]) == 0
    assert "stable: unknown; 2 kept" in capsys.readouterr().out
    FeedbackFile(place / "alone.sqlite", create=True).close()
    for words in (["--prices", "prices.toml"], ["--prices", "prices.toml", "--feedback", "alone.sqlite"]):
        assert main(["release", "why", *words]) == 2
        assert "hint: " in capsys.readouterr().err


def test_a_rollback_takes_effect_while_the_store_is_away(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stable, _ = branches(DirectoryStore(place / "store"))
    assert main(BEGIN) == main(GATE) == 0
    assert main(["release", "promote", "--reason", "hurry"]) == 1
    assert "begin its canary first" in capsys.readouterr().err
    assert main(["release", "advance"]) == 0
    (place / "store").rename(place / "away")
    assert main(["release", "promote", "--reason", "good"]) == 2, "nothing was decided"
    assert main(["release", "rollback", "--reason", "bad"]) == 1
    told = capsys.readouterr().err
    assert "no user gets the canary any more" in told
    assert "hint: bring the store back" in told
    assert not (place / "store").exists()
    with contextlib.closing(Releases(place / "releases.sqlite")) as releases:
        assert releases.newest().share == 0
    (place / "away").rename(place / "store")
    assert main(["release", "advance"]) == 0
    assert "release 1: rolled back since" in capsys.readouterr().out
    assert branches(DirectoryStore(place / "store")) == (stable, stable)


@pytest.mark.parametrize("erased", ["acme/bob", "acme"])
def test_an_erasure_leaves_outcomes_that_count_and_lead_to_nobody(
    place: Path, capsys: pytest.CaptureFixture[str], erased: str
) -> None:
    assert main(BEGIN) == main(GATE) == main(["release", "advance"]) == 0
    with (
        PrivacyFolder(place / "privacy") as folder,
        FeedbackFile(place / "f.sqlite", privacy=folder, create=True) as file,
    ):
        folder.consent.set(Subject.of("acme"), Level.METRICS)
        with contextlib.closing(Releases(place / "releases.sqlite")) as releases:
            release = releases.newest()
        time.sleep(0.3)  # outcomes count for answers that were begun after the share
        writer = FeedbackWriter(place / "f.sqlite", privacy=place / "privacy")
        for user, version in (("bob", release.stable), ("eve", release.candidate)):
            for number in range(2):
                response_id = writer.new_id("acme", user, "m-canary" if user == "eve" else "m")
                answer = served_answer(user, response_id=response_id, model="m-canary" if user == "eve" else "m")
                done = msgspec.structs.replace(answer.completion, spans=(VersionSpan(version, 5),))
                writer.offer(msgspec.structs.replace(answer, completion=done))
                body = {"id": f"{number}", "response_id": response_id, "name": "kept", "value": float(number)}
                writer.receive("acme", user, msgspec.json.encode(body)).result(60)
        assert writer.close(60)
        signals, bob = list(file.signals()), folder.keys.names(Subject.of("acme", "bob")).subject
    capsys.readouterr()
    observe = ["release", "observe", "--feedback", "f.sqlite"]
    assert main(observe) == 0
    assert "4 of 4 outcomes are new" in capsys.readouterr().out

    def values() -> list[tuple[str, str, float]]:
        with contextlib.closing(Releases(place / "releases.sqlite")) as releases:
            return sorted(releases._database.values(release.number, release.share, 1e12, 1e12))

    def on_disk() -> bytes:
        return b"".join(path.read_bytes() for path in sorted(place.glob("releases.sqlite*")))

    before, mine = values(), [one.id.encode() for one in signals if one.subject == bob]
    assert [mean for *_, mean in before] == [0.5, 0.5]
    traces = [pseudonym(release.salt, bob), *mine]
    assert all(one in on_disk() for one in traces)
    for again in (4 if erased == "acme" else 2, 0):
        assert main(["privacy", "erase", erased]) == 0
        assert f"releases.sqlite: {again} outcomes made unlinkable" in capsys.readouterr().out
        assert not any(one in on_disk() for one in traces)
        assert values() == before
    assert main(observe) == 0
    assert "0 of" in capsys.readouterr().out
    assert main(["privacy", "export", "acme/bob"]) == 0
    (place / "releases.sqlite").unlink()
    assert main(["privacy", "erase", erased]) == 1
    assert "its outcomes were not unlinked" in capsys.readouterr().err


def test_a_candidate_that_fails_its_gate_is_refused_with_exit_code_1(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(BEGIN) == 0
    assert main([*GATE[:3], "worse", *GATE[4:]]) == 1
    assert "not passed: repair: solve rate -0.250" in capsys.readouterr().out
    assert main(["release", "promote", "--reason", "hurry"]) == 1
    assert "cannot be promoted" in capsys.readouterr().err


def test_what_cannot_be_done_is_told_in_three_parts(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        (["release", "list"], 2, "releases.sqlite does not exist"),
        ([*BEGIN[:3], "7", *BEGIN[4:]], 2, "no version '7'"),
        (BEGIN, 0, ""),
        (BEGIN, 1, "release 1 is open"),
        (["release", "advance"], 1, "has not passed its gate"),
        (["release", "why", "5"], 2, "there is no release 5"),
        ([*GATE[:3], "none", *GATE[4:]], 1, "no result at"),
        (["release", "hold", "--reason", "x"], 1, "cannot be held"),
        (["release", "observe", "none.jsonl"], 2, "cannot be read"),
    ]
    for argv, code, said in cases:
        assert main(argv) == code, argv
        told = capsys.readouterr().err
        assert said in told
        assert ("hint: " in told) == bool(said)


def test_why_names_each_check_of_a_gate_that_cannot_be_made_with_its_reason_and_what_to_do(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def why() -> str:
        capsys.readouterr()
        assert main(["release", "why"]) == 0
        return capsys.readouterr().out

    (place / "own.toml").write_text('name = "own"\npurpose = "correctness"\n')
    gates = '[{suite="repair", cost_rise=0.1}, {suite="own.toml"}]'
    (place / "evals" / "repair" / "old.json").rename(place / "old.json")
    assert main([*BEGIN, "--set", f"gate={gates}", "--set", "parity=true"]) == 0
    told = why()
    old, new = published(DirectoryStore(place / "store"))
    assert "now: the gate cannot be decided:" in told
    assert f"  repair: no result of the stable version {old} in evals or releases.sqlite.evals\n" in told
    assert f"    hint: etude eval repair --checkpoint CHECKPOINT (one of {old}: its run keeps it as" in told
    assert f"no result of the candidate {new}" in told
    assert f"etude eval {place / 'own.toml'} --checkpoint CHECKPOINT (one of {new}:" in told
    there = place / "checkpoints" / "step-000001"  # beside the store, as in a run
    there.mkdir(parents=True)
    assert f"etude eval {place / 'own.toml'} --checkpoint {there}\n" in why()
    assert f"etude parity {there} --json" in why()
    assert "  parity: the candidate needs" in told
    assert told.count("repair:") == 1, "the candidate's result on it is there"
    (place / "old.json").rename(place / "evals" / "repair" / "old.json")
    assert "  repair: no result" not in why(), "it needs no result any more"
    _write(place / "evals", "old", old, 300, dollars=None)
    assert "  repair: the cost per task is unknown, and cost_rise = 0.1 compares it\n    hint: " in why()
    _write(place / "evals", "old", old, 300, suite_digest="1" * 16)
    assert "  repair: the two versions were not evaluated on the same tasks" in why()
    (place / "own.toml").unlink()
    told = why()
    assert f"  own.toml: no suite '{place / 'own.toml'}'" in told
    assert "hint: restore the file; or end the release" in told
    assert main(["release", "rollback", "--reason", "no suite"]) == 0
    assert "now: " not in why()
    assert main(BEGIN) == 0
    _write(place / "evals", "old", old, 300)
    assert "now: the gate is not decided; every result is there; decide it: etude release gate" in why()


def test_a_suite_is_found_beside_the_file_of_settings_and_not_in_the_working_folder(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "settings").mkdir()
    (place / "settings" / "release.toml").write_text(SETTINGS.replace("repair", "own.toml"))
    begin = [*BEGIN[:-1], "settings/release.toml"]
    suite = 'name = "own"\npurpose = "correctness"\n'
    (place / "own.toml").write_text(suite)
    assert main(begin) == 2
    told = capsys.readouterr().err
    assert "no suite 'own.toml'" in told
    assert f"{place / 'settings' / 'own.toml'} does not exist" in told
    assert f"{place / 'own.toml'} exists, but a path is relative to the file of settings" in told
    assert "hint: write suite = '../own.toml' in settings/release.toml" in told
    (place / "own.toml").rename(place / "settings" / "own.toml")
    assert main(begin) == 0
    assert main(["release", "why"]) == 0
    assert f"etude eval {place / 'settings' / 'own.toml'} " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["promote", "hold", "resume", "rollback"])
def test_a_decision_needs_a_reason(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(BEGIN) == 0
    with pytest.raises(SystemExit) as ended:
        main(["release", command, "--reason", " "])
    assert ended.value.code == 2
    assert "a reason is empty" in capsys.readouterr().err
    assert main(["release", "why"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3, "the release, its begin, and what its gate needs"


def test_a_run_neither_serves_nor_learns_with_the_releases_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "release.toml").write_text(SETTINGS)
    for seed, name in enumerate(("one", "two")):
        run = RunFolder.create(tmp_path / name, config_toml=to_toml(build(RunConfig, {})), seed=seed)
        published(weights_store(run), versions=2 + seed)

    def served(name: str) -> str:
        assert main(["serve", name, "--port", "0", "--releases", "releases.sqlite"]) != 0
        return capsys.readouterr().err

    assert "etude learn RUN --releases FILE" in served("one")
    assert main(["release", "begin", "one", "1", "--settings", "release.toml"]) == 0
    told = served("two")
    assert "releases.sqlite has releases of other weights" in told
    assert f"in {tmp_path / 'one'}; this run has its weights in {Path('two/weights')}" in told
    assert "hint: " in told
    no_engine = "checkpoints/mid is not a checkpoint"  # what comes after
    assert no_engine in served("one")
    (tmp_path / "one").rename(tmp_path / "moved")
    assert no_engine in served("moved")
    (tmp_path / "moved").rename(tmp_path / "one")
    with PrivacyFolder(tmp_path / "privacy"):
        (tmp_path / "learn.toml").write_text('[outcomes]\nkept = 1.0\n[loop]\nrelease = "release.toml"\n')
    words = ["--privacy", "privacy", "--feedback", "f.sqlite", "--settings", "learn.toml"]

    def learnt(name: str) -> str:
        assert main(["learn", name, *words, "--releases", "releases.sqlite"]) != 0
        return capsys.readouterr().err

    assert "releases.sqlite has releases of other weights" in learnt("two")
    assert not (tmp_path / "f.sqlite").exists(), "nothing was begun"
    assert "its RL has not ended" in learnt("one")


def test_a_run_with_a_stable_version_serves_it_and_says_so(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "one", config_toml=to_toml(build(RunConfig, {})), seed=0)
    store = weights_store(run)
    source = ModelSource("one", tmp_path, tmp_path / "one" / "weights", None, NumericsConfig(), EngineConfig())
    assert _stable(source._replace(store=None), newest=False) == (source._replace(store=None), "")
    stable, last = published(store)
    found, line = _stable(source, newest=False)
    assert found.branch == "stable"
    assert line.startswith(f"one: the stable version, {stable}; the newest is {last} (--newest serves it")
    found, line = _stable(source, newest=True)
    assert found.branch == ""
    assert line == f"one: the newest version, {last}; the stable version is {stable}"
    drop(store, "policy", "stable")
    assert _stable(source, newest=False) == (source, "")
