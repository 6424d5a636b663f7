"""The cached store: one download for many readers, and correct bytes whatever happens to the cache."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.errors import StoreError
from etude.stores import CachedStore, DirectoryStore, MemoryStore, cached, open_store

FORK = multiprocessing.get_context("fork")
DATA = bytes(range(256)) * 5000  # more than a piece
KEY = f"objects/policy/ab/{hashlib.sha256(DATA).hexdigest()}-0a1b2c3d"


class Far(MemoryStore):
    """A source store that counts reads, and calls `first` before each."""

    def __init__(self, first: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.first = first

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.asked[key] += 1
        self.first()
        return super().get(key, start, stop)


def far_with(data: bytes = DATA, key: str = KEY, first: Callable[[], None] = lambda: None) -> Far:
    far = Far(first)
    far.put(key, data)
    return far


def copies(near: Path) -> list[Path]:
    return sorted(path for path in near.glob("??/*"))


def test_an_object_is_downloaded_once_whatever_parts_of_it_are_read(tmp_path: Path) -> None:
    far = far_with()
    for _ in range(2):
        store = CachedStore(far, tmp_path)
        assert store.get(KEY, 3, 9) == DATA[3:9]
        assert store.get(KEY) == DATA
        assert store.get(KEY, 0, len(DATA) + 1) == DATA
        assert store.get(KEY, 1 << 20) == DATA[1 << 20 :]
        assert store.get(KEY, (1 << 20) - 1, (1 << 20) + 1) == DATA[(1 << 20) - 1 : (1 << 20) + 1]
        assert store.get(KEY, len(DATA)) == store.get(KEY, 5, 5) == b""
    assert far.asked[KEY] == 1
    assert not store.cache_error


def test_pointers_are_read_from_the_far_store_each_time(tmp_path: Path) -> None:
    far = far_with(b"one", "pointers/policy")
    store = CachedStore(far, tmp_path)
    assert store.get("pointers/policy") == b"one"
    assert far.compare_and_swap("pointers/policy", b"one", b"two")
    assert store.get("pointers/policy") == b"two"
    assert not copies(tmp_path)


def test_two_far_stores_that_share_a_directory_keep_apart(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    DirectoryStore(one).put("objects/a", b"1")
    DirectoryStore(other).put("objects/a", b"2")
    stores = [open_store(place, cache=tmp_path / "near") for place in (one, other, f"file://{one}")]
    for _ in range(2):
        assert [store.get("objects/a") for store in stores] == [b"1", b"2", b"1"]
    assert len(copies(tmp_path / "near")) == 2


def test_a_cached_store_can_be_pickled(tmp_path: Path) -> None:
    DirectoryStore(tmp_path / "far").put("objects/a", b"1")
    again = pickle.loads(pickle.dumps(open_store(tmp_path / "far", cache=tmp_path / "near")))
    assert again.get("objects/a") == b"1"


def test_many_processes_at_once_download_an_object_once(tmp_path: Path) -> None:
    all_there, downloads = FORK.Barrier(6), FORK.Value("i", 0)

    def count() -> None:
        with downloads.get_lock():
            downloads.value += 1

    def read() -> None:
        store = CachedStore(far_with(first=count), tmp_path)
        all_there.wait(30)
        assert store.get(KEY) == DATA

    readers = [FORK.Process(target=read) for _ in range(6)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
        assert reader.exitcode == 0
    assert downloads.value == 1


def test_a_process_killed_in_its_download_is_followed_by_the_next(tmp_path: Path) -> None:
    downloading = FORK.Event()

    def hang() -> None:
        downloading.set()
        signal.pause()

    killed = FORK.Process(target=lambda: CachedStore(far_with(first=hang), tmp_path).get(KEY))
    killed.start()
    assert downloading.wait(30)
    assert killed.pid is not None
    far = far_with()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(CachedStore(far, tmp_path).get, KEY)
        os.kill(killed.pid, signal.SIGKILL)
        assert waiting.result(30) == DATA
    killed.join(30)
    assert far.asked[KEY] == 1
    assert CachedStore(far, tmp_path).get(KEY) == DATA
    assert far.asked[KEY] == 1


KILLED_WHILE_IT_WRITES = """
import os, signal, sys
from pathlib import Path
from etude.stores import CachedStore, MemoryStore
far = MemoryStore()
far.put(sys.argv[2], bytes(range(256)) * 5000)
Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
CachedStore(far, sys.argv[1]).get(sys.argv[2])
"""


def test_files_of_a_killed_writer_are_overwritten(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_WRITES, str(tmp_path), KEY], timeout=300)
    assert ran.returncode == -signal.SIGKILL
    assert [path.suffix for path in copies(tmp_path)] == [".part"]
    far = far_with()
    assert CachedStore(far, tmp_path).get(KEY) == CachedStore(far, tmp_path).get(KEY) == DATA
    assert far.asked[KEY] == 1
    assert [path.suffix for path in copies(tmp_path)] == [""]


def test_an_object_is_read_from_the_far_store_while_another_process_holds_its_lock(tmp_path: Path) -> None:
    far = far_with()
    store = CachedStore(far, tmp_path, lock_timeout_s=0.0)
    with store._disk.lock(store._name(KEY), 0):
        assert store.get(KEY) == DATA
    assert "was not free" in store.cache_error
    assert not copies(tmp_path)


def test_those_who_wait_for_a_download_that_fails_have_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloading, somebody_waits = threading.Event(), threading.Event()
    sleep = time.sleep

    def noted(seconds: float) -> None:  # who waits for a turn sleeps between looks; others' threads may sleep, too
        if threading.current_thread().name.startswith("waits"):
            somebody_waits.set()
        sleep(seconds)

    def time_out() -> None:
        downloading.set()
        assert somebody_waits.wait(30)
        raise StoreError("object cannot be read", "no answer in time", hint="see the network")

    monkeypatch.setattr(time, "sleep", noted)
    far = far_with()
    with ThreadPoolExecutor(thread_name_prefix="waits") as threads:
        leader = threads.submit(CachedStore(far_with(first=time_out), tmp_path).get, KEY)
        assert downloading.wait(30)
        waiter = threads.submit(CachedStore(far, tmp_path).get, KEY)
        for one in (leader, waiter):
            with pytest.raises(StoreError, match="cannot be read") as caught:
                one.result(30)
            assert caught.value.hint == "see the network"
    assert not far.asked[KEY]
    assert CachedStore(far, tmp_path).get(KEY) == DATA, "who comes later asks for himself"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_copy_that_is_torn_or_altered_is_fetched_again(tmp_path: Path, data: Any) -> None:
    far = far_with()
    store = CachedStore(far, tmp_path)
    assert store.get(KEY) == DATA
    (copy,) = copies(tmp_path)
    held = bytearray(copy.read_bytes())
    if data.draw(st.booleans()):
        del held[data.draw(st.integers(0, len(held) - 1)) :]
    else:
        held[data.draw(st.integers(0, len(held) - 1))] ^= data.draw(st.integers(1, 255))
    copy.write_bytes(held)
    far.asked.clear()
    assert store.get(KEY) == DATA
    assert store.get(KEY, 7) == DATA[7:]
    assert far.asked[KEY] == 1


def test_the_least_recently_used_object_is_evicted(tmp_path: Path) -> None:
    far = Far()
    keys = [f"objects/{i}" for i in range(6)]
    for key in keys:
        far.put(key, bytes(1000))
    store = CachedStore(far, tmp_path, limit_bytes=8 * 1100)
    store._disk.limit_bytes = 3 * 1100
    for key in keys[:3]:
        store.get(key)
    for i, key in enumerate((keys[1], keys[0], keys[2])):
        path = tmp_path / store._name(key)[:2] / store._name(key)
        os.utime(path, (i, i))
    store.get(keys[1])  # used: the oldest is now the first
    store.get(keys[3])
    far.asked.clear()
    for key in keys[1:4]:
        store.get(key)
    assert not far.asked
    assert sum(path.stat().st_size for path in copies(tmp_path)) <= 3 * 1100


def test_an_object_that_is_too_large_is_passed_on(tmp_path: Path) -> None:
    store = CachedStore(far_with(), tmp_path, object_bytes=1000)
    assert store.get(KEY, 5) == DATA[5:]
    assert not copies(tmp_path)


def test_bytes_that_are_not_what_their_name_says_are_not_kept(tmp_path: Path) -> None:
    store = CachedStore(far_with(b"other"), tmp_path)
    assert store.get(KEY) == b"other"
    assert not copies(tmp_path)
    assert "does not have the SHA-256" in store.cache_error


def test_an_object_whose_name_is_no_digest_is_fetched_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = far_with(b"damaged", "manifests/policy/v1.json")
    store = CachedStore(far, tmp_path)
    assert store.get("manifests/policy/v1.json") == b"damaged"
    far.delete("manifests/policy/v1.json")
    far.put("manifests/policy/v1.json", b"repaired")
    assert store.get("manifests/policy/v1.json") == b"damaged"
    monkeypatch.setattr(cached, "UNPROVEN_S", -1.0)
    assert store.get("manifests/policy/v1.json") == b"repaired"


UNDER_A_FILE_SIZE_LIMIT = """
import resource, sys
from etude.stores import CachedStore, MemoryStore
far = MemoryStore()
far.put("objects/a", bytes(100_000))
store = CachedStore(far, sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
assert store.get("objects/a", 9) == bytes(99_991)
print(store.cache_error)
"""


def test_a_near_disk_that_takes_no_more_leaves_the_far_store(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", UNDER_A_FILE_SIZE_LIMIT, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert "File too large" in ran.stdout
    assert not copies(tmp_path)


def test_a_near_disk_that_is_gone_leaves_the_far_store(tmp_path: Path) -> None:
    (tmp_path / "near").write_text("a file, not a directory")
    store = CachedStore(far_with(), tmp_path / "near")
    assert store.get(KEY) == store.get(KEY) == DATA
    assert store.cache_error
