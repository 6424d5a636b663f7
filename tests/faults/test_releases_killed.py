"""SIGKILL of a process that changes a release, before and after every write of its file and of the store."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.releases.played import branches, outcomes, passed, published, settings

from etude.releases import Arm, Releases, State
from etude.stores import DirectoryStore

Step = Callable[[Releases, DirectoryStore], None]


class Deadly:
    """Counts writes, and kills its process at one of them. `limit` None: only counts."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.count = limit, 0

    def write(self, _: str = "") -> None:
        self.count += 1
        if self.limit is not None and self.count > self.limit:
            os.kill(os.getpid(), signal.SIGKILL)


class DeadlyStore(DirectoryStore):
    deadly: Deadly

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        self.deadly.write()
        done = super().compare_and_swap(key, expected, data)
        self.deadly.write()
        return done


def kept(i: int, arm: Arm) -> float:
    return 0.9 if arm is Arm.CANARY else 0.1 + (i % 2) * 0.1


def driven(releases: Releases, store: DirectoryStore, end: State) -> None:
    """Bring the release from where it is to its end: as a program does that was started again."""
    now = 0.0
    if not releases.all():
        releases.begin(store, published(store)[1], settings(), location="store", now=now)
    for _ in range(20):
        release = releases.newest()
        now = max(now, release.since) + 20.0
        if release.state is end:
            return
        if release.state is State.CANDIDATE:
            releases.gate(passed(release), now=now)
        elif release.state is State.CANARY and release.share == 50 and end is State.ROLLED_BACK:
            releases.rollback(store, reason="bad", now=now)
        else:
            if release.share:
                releases.observe(outcomes(release, range(300), kept), now=now)
            releases.advance(store, now=now)
    raise AssertionError(f"{releases.newest().state} is not {end}")


def killed_at(limit: int | None, folder: Path, end: State) -> tuple[int, int]:
    """Drive a release in a process that is killed at a write. Returns its wait status, and the writes that it did."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            deadly = Deadly(limit)
            releases, store = Releases(folder / "releases.sqlite"), DeadlyStore(folder / "store")
            store.deadly = deadly
            connection: sqlite3.Connection = releases._database._connection
            connection.set_trace_callback(lambda sql: deadly.write() if _writes(sql) else None)
            driven(releases, store, end)
            os.write(write, str(deadly.count).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        count = int(told.read() or 0)
    return os.waitpid(pid, 0)[1], count


def _writes(sql: str) -> bool:
    """Whether a statement writes, or begins or ends a transaction; of the many outcomes, each begin and end is one."""
    return not sql.startswith("SELECT") and "outcomes" not in sql


@pytest.mark.parametrize("end", [State.PROMOTED, State.ROLLED_BACK])
def test_a_kill_between_any_two_writes_leaves_a_release_that_goes_on(tmp_path: Path, end: State) -> None:
    def prepared(name: str) -> Path:
        folder = tmp_path / name
        published(DirectoryStore(folder / "store"))
        return folder

    status, writes = killed_at(None, prepared("whole"), end)
    assert status == 0
    assert writes > 30
    whole = Releases(tmp_path / "whole" / "releases.sqlite").why(1)
    for limit in range(writes):
        folder = prepared(str(limit))
        status, _ = killed_at(limit, folder, end)
        assert os.WIFSIGNALED(status), f"write {limit}"
        assert os.WTERMSIG(status) == signal.SIGKILL
        releases, store = Releases(folder / "releases.sqlite"), DirectoryStore(folder / "store")
        driven(releases, store, end)
        release, told = releases.newest(), releases.why(1)
        assert [(one.state, one.share) for one in told] == [(one.state, one.share) for one in whole], f"write {limit}"
        served = release.candidate if end is State.PROMOTED else release.stable
        assert branches(store) == (served, served), f"write {limit}"
        assert releases.all() == [release]
        releases.close()
