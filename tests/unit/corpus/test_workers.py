"""Builds in real processes: one that hangs is ended, and a kill at any moment changes no byte of the result."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.unit.corpus import make
from tests.unit.corpus.test_build import digests

from etude import progress
from etude.corpus import build_corpus, workers
from etude.errors import CorpusError, InputError

BUILD = """
import sys
from pathlib import Path
from etude.corpus import build_corpus, sources
from tests.unit.corpus import make

sources.PIECE_BYTES = 2_000
place = Path(sys.argv[1])
build_corpus(make.config(place, fim={"rate": 0.5}, shard_tokens=1_500), place / sys.argv[2], jobs=2)
"""


def test_a_process_that_hangs_is_ended_and_the_build_goes_on_where_it_stopped(tmp_path, monkeypatch):
    make.texts(tmp_path / "texts", 5)
    kind = {"kind": "tests.unit.corpus.blocked:Blocked", "path": str(tmp_path / "texts")}
    config = make.config(tmp_path, sources=[{"name": "own", "kind": kind}])
    build_corpus(config, tmp_path / "whole")
    pipe = tmp_path / "texts" / "module_2.py"
    text = pipe.read_text()
    pipe.unlink()
    os.mkfifo(pipe)  # opening it blocks until somebody writes
    monkeypatch.setattr(workers, "STALL_S", 5.0)
    with pytest.raises(CorpusError, match=r"process \d+ of the build hangs") as error:
        build_corpus(config, tmp_path / "out", jobs=2)
    assert error.value.facts == f"reading {pipe}: no progress for 5 s; it was killed"
    assert "run the same command again" in error.value.hint
    (number,) = re.findall(r"\d+", error.value.what)
    assert not Path(f"/proc/{number}").exists()
    pieces = tmp_path / "out" / "work" / "pieces"
    done = {path.name: path.stat().st_ino for path in pieces.glob("[0-9]*")}
    assert "000000" in done
    assert "000002" not in done
    pipe.unlink()
    pipe.write_text(text)
    kept = []
    monkeypatch.setattr("shutil.rmtree", lambda path, **_: kept.append(path))
    build_corpus(config, tmp_path / "out", jobs=2)
    assert {path.name: path.stat().st_ino for path in pieces.glob("[0-9]*")}.items() >= done.items()
    monkeypatch.undo()
    build_corpus(config, tmp_path / "out")  # removes what is left of its work
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def children(process: int) -> list[int]:
    """Return the ids of the child processes of a process."""
    try:
        found = Path(f"/proc/{process}/task/{process}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(one) for one in found.split()]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def entries(folder: Path) -> set[str]:
    """Return the names of all finished and unfinished files below a folder."""
    return {os.path.join(place, name) for place, _, names in os.walk(folder) for name in names}


def wait_until_ended(processes: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(is_running, processes)):
        assert time.monotonic() < deadline, "a process did not end with its build"
        time.sleep(0.01)


def test_kills_of_the_build_and_of_its_processes_at_any_moment_change_no_byte(tmp_path):
    make.texts(tmp_path / "texts", 40)
    build_corpus(make.config(tmp_path, fim={"rate": 0.5}, shard_tokens=1_500), tmp_path / "whole")
    rng, kills = random.Random(0), list[str]()
    for victim in ("process", "build", "process", "build", "none"):
        out, more = tmp_path / "out", rng.randrange(2, 16)
        before = entries(out)
        running = subprocess.Popen([sys.executable, "-c", BUILD, str(tmp_path), "out"], stderr=subprocess.PIPE)
        seen, own = set(before), list[int]()
        while running.poll() is None and victim != "none":
            own = children(running.pid) or own
            seen |= entries(out)  # also what was renamed or removed since
            if len(seen) - len(before) >= more:
                os.kill(running.pid if victim == "build" else rng.choice(own), signal.SIGKILL)
                kills.append(victim)
                break
            time.sleep(0.002)
        _, errors = running.communicate(timeout=120)
        wait_until_ended(own)
        if running.returncode == 0:
            break
        assert victim == "build" or b"of the build was killed: SIGKILL, while" in errors, errors.decode()
    assert running.returncode == 0, errors.decode()
    assert {*kills} == {"build", "process"}
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


class Sums:
    """Work for the processes: sums that may fail, and ticks of progress."""

    def add(self, one: int, other: int, ticks: int) -> int:
        if one < 0:
            raise InputError("a negative number", hint="give others")
        for _ in range(ticks):
            time.sleep(0.3)
            progress.tick()
        return one + other


def test_long_work_with_progress_is_no_stall_and_an_error_waits_for_what_was_begun():
    done: list[tuple[int, int]] = []
    with workers.Workers(Sums(), 2, stall_s=4.0) as pool:
        assert pool.map("add", [(1, 1, 20), (2, 2, 1), (3, 3, 1)], lambda *one: done.append(one)) == [2, 4, 6]
        assert done == [(1, 3), (2, 3), (3, 3)]
        with pytest.raises(InputError, match="a negative number"):
            pool.map("add", [(-1, 1, 1), (2, 2, 3)], lambda *one: done.append(one))
        assert done[3:] == [(1, 2)]
        with pytest.raises(InputError):
            pool.map("add", [(-1, 1, 1)] * 2 + [(2, 2, 1)], lambda *one: done.append(one))
    assert done[4:] == []
