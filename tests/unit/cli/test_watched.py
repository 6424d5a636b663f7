"""The messages of a command while its store does not respond."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from etude.cli.store_locations import ReportingStore
from etude.errors import StoreError
from etude.stores import MemoryStore

CLOCK = r"[0-9]{2}:[0-9]{2}:[0-9]{2}"


class Away(MemoryStore):
    """Answers for a pointer once somebody was told that it does not; then as `fails` says."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        assert self.told.wait(30.0)
        if self.fails:
            raise StoreError("no answer in time", hint="look whether it runs")
        return super().get(key, start, stop)


def watched(store: Away, after_s: float = 0.01) -> tuple[ReportingStore, list[str]]:
    said: list[str] = []

    def tell(line: str) -> None:
        said.append(line)
        store.told.set()

    return ReportingStore(store, "http://relay:8800", 60.0, tell, after_s=after_s), said


def test_one_line_says_what_is_waited_for_and_until_when_and_another_that_it_is_back() -> None:
    store = Away()
    one, said = watched(store)
    assert one.compare_and_swap("pointers/policy", None, b"v1")
    assert one.get("pointers/policy") == b"v1"
    first, last = said
    waiting = rf"waiting: http://relay:8800 has not answered since ({CLOCK}) \(pointers/policy\);"
    found = re.fullmatch(rf"{waiting} retrying until ({CLOCK})", first)
    assert found
    since, until = (sum(int(n) * w for n, w in zip(t.split(":"), (3600, 60, 1), strict=True)) for t in found.groups())
    assert (until - since) % 86_400 == 60
    assert last == "http://relay:8800 answers again"


def test_a_store_that_stays_away_is_told_of_once_and_a_key_that_is_not_there_is_an_answer() -> None:
    store = Away()
    store.fails = True
    one, said = watched(store)
    with pytest.raises(StoreError):
        one.get("pointers/policy")
    store.told.clear()
    threading.Timer(0.1, store.told.set).start()
    with pytest.raises(StoreError):
        one.get("pointers/policy")
    assert len(said) == 1
    store.fails = False
    with pytest.raises(KeyError):
        one.get("branches/policy/canary")
    assert said[1:] == ["http://relay:8800 answers again"]


def test_large_objects_may_take_their_time() -> None:
    store = Away()
    one, said = watched(store)
    one.put("objects/ab", b"many")
    threading.Timer(0.1, store.told.set).start()
    assert one.get("objects/ab") == b"many"
    assert one.list("objects/") == ["objects/ab"]
    one.delete("objects/ab")
    assert said == []


@pytest.mark.parametrize("answers", ["nobody listens", "nobody answers"])
def test_a_follower_of_a_dead_relay_says_at_once_what_it_waits_for(answers: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if answers == "nobody listens":
            listener.close()
        command = ["weights", "follow", url, "--apply", str(tmp_path / "live"), "--once"]
        child = subprocess.Popen([sys.executable, "-m", "etude.cli", *command], stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
        finally:
            child.kill()
            child.communicate()
    assert re.fullmatch(rf"waiting: {url} has not answered since {CLOCK} .*; retrying until {CLOCK}\n", line)
