"""Backups of stores, privacy folders, databases and files: what is copied, linked, left out, and refused."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.served_answers import served_answer
from tests.small_disk import fill, small_disk
from tests.unit.releases.played import published
from tests.unit.signals.given import add
from tests.unit.signals.given import given as about

from etude import cli
from etude.backups import check_backup, read_manifest, restore
from etude.backups.manifest import MANIFEST, BackupFile, _decode, encode_manifest
from etude.backups.writer import BackupWriter, backups_in
from etude.errors import BackupError, Exit, PrivacyError
from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject
from etude.signals import FeedbackFile
from etude.stores import DirectoryStore
from etude.weights.chain.history import head
from etude.weights.chain.inspect import verify

ACME, BOB = Subject.of("acme"), Subject.of("acme", "bob")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    """A store of weights with two versions."""
    found = DirectoryStore(tmp_path / "store")
    published(found)
    return found


@pytest.fixture
def backups(tmp_path: Path) -> Path:
    return tmp_path / "backups"


def back_up(*words: str | Path, code: int = 0) -> None:
    assert cli.main(["backup", *map(str, words)]) == code


def captured(folder: Path) -> None:
    with PrivacyFolder(folder) as one:
        one.consent.set(ACME, Level.TRAIN)
        writer = CaptureWriter(folder)
        for user in ("bob", "eve"):
            writer.offer(served_answer(user))
        assert writer.close(60)


def test_a_restored_store_has_every_version_and_later_backups_link_what_never_changes(
    store: DirectoryStore, backups: Path, tmp_path: Path
) -> None:
    back_up(store.root, backups)
    published(store, versions=4)
    back_up(store.root, backups)
    first, second = backups_in(backups)
    assert len(read_manifest(second).files) > len(read_manifest(first).files)
    for one in read_manifest(first).files:
        linked = (first / one.path).stat().st_ino == (second / one.path).stat().st_ino
        assert linked is one.fixed, one.path
    for name, place, versions in (("one", first, 2), ("two", second, 4)):
        restore(place, tmp_path / name)
        again = DirectoryStore(tmp_path / name / "store")
        assert head(again, "policy").head.version.step == versions - 1
        assert verify(again, "policy").num_versions == versions


def test_a_fixed_file_that_was_replaced_by_one_of_the_same_size_is_copied_again(tmp_path: Path, backups: Path) -> None:
    file = tmp_path / "trace"
    for content in (b"one", b"two"):
        file.write_bytes(content)
        os.utime(file, ns=(0, len(backups_in(backups)) + 1))
        with BackupWriter(backups) as writer:
            writer.copy(file, "trace", fixed=True)
            writer.finish(())
    assert [(place / "trace").read_bytes() for place in backups_in(backups)] == [b"one", b"two"]


def test_a_database_that_is_written_meanwhile_is_copied_as_of_one_moment(tmp_path: Path, backups: Path) -> None:
    path, end = tmp_path / "signals.sqlite", threading.Event()
    writing = threading.Event()

    def write() -> None:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode=WAL")
            database.executescript("CREATE TABLE a (x); CREATE TABLE b (x)")
            while not end.is_set():
                for sql in ("BEGIN", "INSERT INTO a VALUES (zeroblob(900))", "INSERT INTO b VALUES (1)", "COMMIT"):
                    database.execute(sql)
                writing.set()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert writing.wait(60)
        for _ in range(5):
            back_up(path, backups)
    finally:
        end.set()
        thread.join()
    counts = []
    for place in backups_in(backups):
        assert not list(place.glob("signals.sqlite-*"))
        with contextlib.closing(sqlite3.connect(place / "signals.sqlite")) as copy:
            assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            counts.append([copy.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("a", "b")])
    assert all(a == b > 0 for a, b in counts)
    assert counts == sorted(counts)


def test_an_erasure_holds_against_backups_since_they_have_no_keys(tmp_path: Path, backups: Path) -> None:
    live = tmp_path / "privacy"
    captured(live)
    back_up(live, backups)
    [place] = backups_in(backups)
    assert not (place / "privacy" / "keys").exists()
    restore(place, tmp_path / "again")
    with pytest.raises(PrivacyError, match="secret is missing: digests of subjects"):
        PrivacyFolder(tmp_path / "again" / "privacy")
    with PrivacyFolder(live) as folder:
        folder.erase(BOB)
    shutil.copytree(live / "keys", tmp_path / "again" / "privacy" / "keys", dirs_exist_ok=True)
    with PrivacyFolder(tmp_path / "again" / "privacy") as folder:
        [bobs] = folder.records.of(folder.keys.names(BOB))
        with pytest.raises(PrivacyError):
            folder.records.read(bobs)
        [eves] = folder.records.of(folder.keys.names(Subject.of("acme", "eve")))
        assert folder.records.read(eves).num_sampled == 5


def test_keys_are_in_a_backup_only_where_that_is_asked_for(
    tmp_path: Path, backups: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captured(tmp_path / "privacy")
    back_up(tmp_path / "privacy", backups, "--with-keys")
    assert "must be erased again" in capsys.readouterr().out
    [place] = backups_in(backups)
    assert (place / "privacy" / "keys" / "secret").is_file()
    assert (place.stat().st_mode & 0o777, (place / "privacy" / "keys" / "secret").stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )


def with_signal(folder: Path) -> None:
    """Give bob of acme an answer, and store a signal about it."""
    with (
        PrivacyFolder(folder / "privacy") as privacy,
        FeedbackFile(folder / "feedback.sqlite", privacy=privacy, create=True) as file,
    ):
        add(file, about(file.ids.new("acme", "bob", "m")))


def test_keys_of_signals_are_left_out_of_a_backup_which_says_so(
    tmp_path: Path, backups: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captured(tmp_path / "privacy")
    with_signal(tmp_path)
    back_up(tmp_path / "feedback.sqlite", backups)
    told = capsys.readouterr().out
    assert f"not in it: feedback.sqlite: without its keys; put {tmp_path / 'feedback.sqlite.keys'} beside it" in told
    [place] = backups_in(backups)
    assert [one.path for one in read_manifest(place).files] == ["feedback.sqlite"]


@pytest.mark.parametrize("with_keys", [False, True])
def test_a_folder_with_keys_somewhere_in_it_is_copied_without_them_unless_they_are_asked_for(
    tmp_path: Path, backups: Path, capsys: pytest.CaptureFixture[str], with_keys: bool
) -> None:
    captured(tmp_path / "all" / "privacy")
    with_signal(tmp_path / "all")
    back_up(tmp_path / "all", backups, *(["--with-keys"] if with_keys else []))
    told = capsys.readouterr().out
    [place] = backups_in(backups)
    found = {one.path for one in read_manifest(place).files}
    assert "all/privacy/consent.sqlite" in found
    for folder in ("privacy/keys", "feedback.sqlite.keys"):
        assert (f"all/{folder}/secret" in found) is with_keys
        assert any(one.startswith(f"all/{folder}/") for one in found) is with_keys
        assert (f"without the keys in {tmp_path / 'all' / folder}" in told) is not with_keys


def test_keys_of_signals_are_in_a_backup_where_that_is_asked_for(
    tmp_path: Path, backups: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captured(tmp_path / "privacy")
    with_signal(tmp_path)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "f").symlink_to(tmp_path / "feedback.sqlite")
    file, keys = tmp_path / "feedback.sqlite", tmp_path / "feedback.sqlite.keys"
    ways: list[tuple[list[Path], list[str]]] = [
        ([file], ["--with-keys"]),
        ([file, keys], []),
        ([file, keys], ["--with-keys"]),
        ([tmp_path / "link" / "f"], ["--with-keys"]),
    ]
    for sources, options in ways:
        back_up(*sources, backups, *options)
        told = capsys.readouterr().out
        assert "without its keys" not in told
        assert "feedback.sqlite: subjects that were erased later must be erased again" in told
    for number, place in enumerate(backups_in(backups)):
        assert {one.name for one in read_manifest(place).sources} == {"feedback.sqlite", "feedback.sqlite.keys"}
        again = tmp_path / f"again-{number}"
        restore(place, again)
        assert (again / "feedback.sqlite.keys" / "secret").stat().st_mode & 0o777 == 0o600
        with (
            PrivacyFolder(tmp_path / "privacy") as privacy,
            FeedbackFile(again / "feedback.sqlite", privacy=privacy) as restored,
        ):
            assert [one.name for one in restored.signals()] == ["kept"]
    assert len(backups_in(backups)) == len(ways)


def test_another_folder_under_the_name_of_the_keys_is_refused(
    tmp_path: Path, backups: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captured(tmp_path / "privacy")
    with_signal(tmp_path)
    other = tmp_path / "other" / "feedback.sqlite.keys"
    other.mkdir(parents=True)
    (other / "secret").write_bytes(b"another")
    back_up(tmp_path / "feedback.sqlite", other, backups, "--with-keys", code=Exit.BAD_INPUT)
    assert "the name is taken" in capsys.readouterr().err


@pytest.mark.parametrize("begun", [False, True], ids=["no folder of keys", "an empty folder of keys"])
@pytest.mark.parametrize("guide", ["operations", "feedback"])
def test_a_command_without_keys_creates_nothing_and_the_commands_of_the_guides_put_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], guide: str, begun: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    captured(tmp_path / "privacy")
    with_signal(tmp_path)
    back_up("privacy", "feedback.sqlite", "backups")
    assert cli.main(["restore", "backups", "restored"]) == 0
    Path("signals.jsonl").write_text("{}")
    files = sorted(Path("restored").rglob("*"))
    of_signals = ["--file", "restored/feedback.sqlite"]
    for words in (
        ["privacy", "export", "acme/bob", "--folder", "restored/privacy"],
        ["feedback", "import", "signals.jsonl", *of_signals],
        ["feedback", "show", *of_signals],
    ):
        capsys.readouterr()
        assert cli.main(words) == Exit.FAILED
        told = capsys.readouterr().err
        assert "keys/secret is missing" in told
        assert "copy the original's folder of keys to restored/" in told
        assert sorted(Path("restored").rglob("*")) == files, words
    if begun:
        for one in ("privacy/keys", "feedback.sqlite.keys"):
            Path("restored", one).mkdir()
    text = (Path(__file__).parents[3] / "docs" / "guides" / f"{guide}.md").read_text().replace("/srv/etude/", "")
    lines = text.replace("/srv/restored", "restored").splitlines()
    commands = [
        shlex.split(line, comments=True) for line in lines if line.startswith(("cp -a ", "etude feedback show "))
    ]
    commands = [words for words in commands if any("restored" in word for word in words)]
    assert [words[0] for words in commands] == ["cp", "cp", "etude"]
    for words in commands:
        if words[0] == "cp":
            subprocess.run(words, check=True, timeout=60)
        else:
            assert cli.main(words[1:]) == 0
    for one in ("privacy/keys", "feedback.sqlite.keys"):
        originals = sorted(path.relative_to(one) for path in Path(one).rglob("*"))
        assert sorted(path.relative_to(f"restored/{one}") for path in Path("restored", one).rglob("*")) == originals
    capsys.readouterr()
    assert cli.main(["privacy", "erase", "acme/bob", "--folder", "restored/privacy"]) == 0
    assert "restored/feedback.sqlite: 1 signals deleted" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["changed", "shorter", "missing", "manifest cut", "manifest gone"])
def test_a_damaged_backup_is_named_and_nothing_is_restored(
    store: DirectoryStore, backups: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    back_up(store.root, backups)
    [place] = backups_in(backups)
    file = place / next(one.path for one in read_manifest(place).files if "/objects/" in one.path)
    manifest = place / MANIFEST
    match damage:
        case "changed":
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        case "shorter":
            file.write_bytes(file.read_bytes()[:-1])
        case "missing":
            file.unlink()
        case "manifest cut":
            manifest.write_bytes(manifest.read_bytes()[:-40])
        case _:
            manifest.unlink()
    named = manifest if damage.startswith("manifest") else file
    capsys.readouterr()
    for words in ([str(place), str(tmp_path / "again")], [str(place), "--check"]):
        assert cli.main(["restore", *words]) == Exit.FAILED
        assert str(named) in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


@given(at=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.booleans())
def test_no_bytes_of_a_manifest_raise_anything_but_a_backup_error(at: int, byte: int, cut: bool) -> None:
    file = BackupFile(path="a", size=1, sha256="0", mode=0o600, mtime_ns=1, original_size=1, fixed=True)
    whole = bytearray(encode_manifest(_manifest(file)))
    at %= len(whole)
    changed = bytes(whole[:at]) if cut else bytes(whole[:at]) + bytes([byte]) + bytes(whole[at + 1 :])
    with contextlib.suppress(BackupError):
        assert _decode(changed, Path("m")).files == (file,)


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a/../../out", "", "a\0b"])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path: Path, path: str) -> None:
    file = BackupFile(path=path, size=1, sha256="0", mode=0o600, mtime_ns=1, original_size=1, fixed=True)
    (tmp_path / MANIFEST).write_bytes(encode_manifest(_manifest(file)))
    with pytest.raises(BackupError, match="outside of the backup"):
        read_manifest(tmp_path)


def test_another_format_is_refused_by_its_number(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({"format": 7}))
    with pytest.raises(BackupError, match="has format 7"):
        read_manifest(tmp_path)


def _manifest(*files: BackupFile) -> object:
    from etude.backups import BackupManifest

    return msgspec.convert(
        {
            "format": 1,
            "created": "2026-01-31T02:00:00+00:00",
            "etude": "1",
            "sources": [],
            "left_out": [],
            "damaged": [],
            "files": [msgspec.to_builtins(one) for one in files],
        },
        BackupManifest,
    )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "2m") as found:
        yield found


def test_a_full_disk_leaves_the_backup_before_and_the_next_one_goes_on(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, backups = tmp_path / "data", disk / "backups"
    folder.mkdir()
    for number in range(8):
        (folder / f"part-{number}").write_bytes(os.urandom(100_000))
    back_up(folder, backups)
    ballast = fill(disk, 350_000)
    (folder / "log").write_bytes(bytes(10))
    back_up(folder, backups, code=1)
    assert "free space, or delete old backups; the same command then goes on" in capsys.readouterr().err
    assert check_backup(backups_in(backups)[0]) == []
    assert len(backups_in(backups)) == 1
    ballast.unlink()
    back_up(folder, backups)
    assert [check_backup(place) for place in backups_in(backups)] == [[], []]


def test_a_restore_to_a_full_disk_says_how_much_is_needed_and_goes_on(
    disk: Path, tmp_path: Path, backups: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "big").write_bytes(os.urandom(1_500_000))
    back_up(folder, backups)
    ballast = fill(disk, 700_000)
    assert cli.main(["restore", str(backups), str(disk / "again")]) == Exit.FAILED
    assert "1,500,000 bytes are needed" in capsys.readouterr().err
    assert not (disk / "again").exists()
    ballast.unlink()
    assert cli.main(["restore", str(backups), str(disk / "again")]) == 0
    assert (disk / "again" / "data" / "big").read_bytes() == (folder / "big").read_bytes()
    assert sorted(path.name for path in disk.iterdir()) == ["again"]


def test_what_cannot_be_a_source_or_a_destination_is_refused(
    store: DirectoryStore, backups: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, told in (
        (["s3://bucket/prefix", str(backups)], "the bucket's versioning"),
        ([str(tmp_path / "nothing"), str(backups)], "there is nothing at"),
        ([str(store.root), str(store.root / "backups")], "is inside of"),
        ([str(store.root), str(store.root), str(backups)], "the name is taken"),
    ):
        assert cli.main(["backup", *words]) == Exit.BAD_INPUT
        assert told in capsys.readouterr().err
    back_up(store.root, backups)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert cli.main(["restore", str(backups), str(tmp_path / "full")]) == Exit.BAD_INPUT
    assert "never overwrites" in capsys.readouterr().err


def test_only_the_newest_backups_are_kept_where_a_number_is_given(store: DirectoryStore, backups: Path) -> None:
    for _ in range(4):
        back_up(store.root, backups, "--keep", "2")
    assert len(backups_in(backups)) == 2
    assert [check_backup(place) for place in backups_in(backups)] == [[], []]
    assert sorted(path.name for path in backups.iterdir() if path.name.startswith(".")) == [".lock"]


def test_two_backups_into_one_folder_at_once_are_refused(store: DirectoryStore, backups: Path) -> None:
    with BackupWriter(backups), pytest.raises(BackupError, match="another backup is being written"):
        BackupWriter(backups).__enter__()
