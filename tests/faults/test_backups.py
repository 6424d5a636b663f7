"""SIGKILL of a backup and of a restore at every moment at which something is made durable."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.releases.played import published

from etude.backups import BackupWriter, check_backup, restore
from etude.backups.writer import backups_in
from etude.loop.backup import back_up
from etude.stores import DirectoryStore


def killed_at(limit: int, work: Callable[[], None]) -> bool:
    """Run `work` in a process of its own that is killed at its fsync number `limit`. Returns whether it was."""
    if (pid := os.fork()) == 0:
        try:
            count, sync = 0, os.fsync

            def deadly(descriptor: int) -> None:
                nonlocal count
                count += 1
                if count > limit:
                    os.kill(os.getpid(), signal.SIGKILL)
                sync(descriptor)

            os.fsync = deadly
            work()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def content(folder: Path) -> dict[str, bytes]:
    """The files below a folder; of databases their rows."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            data = path.read_bytes()
            if path.suffix == ".sqlite":
                with contextlib.closing(sqlite3.connect(path)) as database:
                    data = "\n".join(database.iterdump()).encode()
            found[path.relative_to(folder).as_posix()] = data
    return found


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    data = tmp_path / "data"
    published(DirectoryStore(data / "store"), versions=3)
    with contextlib.closing(sqlite3.connect(data / "signals.sqlite")) as database:
        database.executescript("CREATE TABLE a (x); INSERT INTO a VALUES (1)")
    (data / "keys.toml").write_text("[[key]]")
    return {name: data / name for name in ("store", "signals.sqlite", "keys.toml")}


def made(sources: dict[str, Path], backups: Path) -> None:
    with BackupWriter(backups) as writer:
        back_up(writer, sources)
        writer.finish(())


def test_a_backup_that_is_killed_anywhere_goes_on_and_the_one_before_stays_whole(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    kills, limit = 0, 0
    while True:
        backups = tmp_path / f"backups-{limit}"
        made(sources, backups)
        first = backups_in(backups)[0]
        (sources["keys.toml"]).write_text(f"# {limit}")
        if not killed_at(limit, lambda to=backups: made(sources, to)):  # type: ignore[misc]
            break
        kills, limit = kills + 1, limit + 1
        assert check_backup(first) == []
        assert all(check_backup(place) == [] for place in backups_in(backups))
        made(sources, backups)
        newest = backups_in(backups)[-1]
        assert check_backup(newest) == []
        restore(newest, tmp_path / f"again-{limit}")
        assert content(tmp_path / f"again-{limit}") == content(tmp_path / "data")
        assert not (backups / ".unfinished").exists()
    assert kills > 8


def test_a_restore_that_is_killed_anywhere_leaves_no_destination_and_goes_on(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    made(sources, tmp_path / "backups")
    [place] = backups_in(tmp_path / "backups")
    kills, limit = 0, 0
    while killed_at(limit, lambda to=tmp_path / f"again-{limit}": restore(place, to)):  # type: ignore[misc]
        again = tmp_path / f"again-{limit}"
        if again.exists():  # killed behind the rename
            assert content(again) == content(tmp_path / "data")
        else:
            restore(place, again)
            assert content(again) == content(tmp_path / "data")
        kills, limit = kills + 1, limit + 1
    assert kills > 8
