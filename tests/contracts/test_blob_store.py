"""What every blob store promises. A new one joins with one line in STORES.

The S3-speaking server (moto, see `tests/s3_server.py`) looks at ``If-Match`` and then writes, without a lock between
the two; so it is made to work on one request at a time. That a bucket loses no count here proves that `BucketStore`
says the right conditions and heeds the answers. It does not prove that a server keeps them under concurrent writes:
Amazon, Google and Azure promise that, and whoever runs another should ask its maker.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import StoreError
from etude.seams import BlobStore
from etude.stores import BucketStore, CachedStore, DirectoryStore, MemoryStore, check_key

STORES: dict[str, Callable[[Path], BlobStore]] = {
    "memory": lambda folder: MemoryStore(),
    "directory": lambda folder: DirectoryStore(folder / "store"),
    "cached": lambda folder: CachedStore(DirectoryStore(folder / "store"), folder / "near"),
    "bucket": lambda folder: BucketStore(f"s3://etude/{folder.parent.name}/{folder.name}", part_bytes=5 << 20),
}
SHARED_BETWEEN_PROCESSES: dict[str, Callable[[Path], BlobStore]] = {
    kind: STORES[kind] for kind in ("directory", "cached")
}
pytestmark = pytest.mark.usefixtures("s3")

WILD_KEYS = [
    *("", "/", "a/", "/a", "a//b", ".", "..", "../a", "a/../b", "a/./b", ".tmp/x", "a/.hidden", "a\\b", "a\0b"),
    *("a b", "é", "a\n", "~x", "x" * 201, "/".join(["abcdefgh"] * 60)),
]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return STORES[request.param](tmp_path)


def test_it_is_a_blob_store(store: BlobStore) -> None:
    assert isinstance(store, BlobStore)


def test_an_object_comes_back_whole_and_by_range(store: BlobStore) -> None:
    store.put("objects/ab/cd", b"0123456789")
    assert store.get("objects/ab/cd") == b"0123456789"
    assert store.get("objects/ab/cd", 3) == b"3456789"
    assert store.get("objects/ab/cd", 3, 5) == b"34"
    assert store.get("objects/ab/cd", 8, 99) == b"89"
    assert store.get("objects/ab/cd", 5, 5) == b""
    assert store.get("objects/ab/cd", 50, 60) == b""


def test_a_range_that_counts_from_the_end_is_refused(store: BlobStore) -> None:
    store.put("a", b"0123")
    with pytest.raises(ValueError, match="range"):
        store.get("a", -2)
    with pytest.raises(ValueError, match="range"):
        store.get("a", 2, 1)


def test_an_object_of_many_megabytes_comes_back_whole_and_by_range(store: BlobStore) -> None:
    data = random.Random(0).randbytes((11 << 20) + 3)
    store.put("objects/large", data)
    store.put("objects/large", data)
    assert store.get("objects/large") == data
    assert store.get("objects/large", 3, 9 << 20) == data[3 : 9 << 20]
    assert store.get("objects/large", 10 << 20) == data[10 << 20 :]
    for other in (data[:-1], data[:-1] + b"x"):
        with pytest.raises(StoreError, match="other content"):
            store.put("objects/large", other)
    assert store.list("") == ["objects/large"]


def test_a_key_of_every_allowed_character_comes_back_as_it_was(store: BlobStore) -> None:
    keys = sorted(["a.b/c.d", *(f"a/{character}b{character}/c" for character in "azAZ09_=+@-")])
    for key in keys:
        store.put(key, key.encode())
    assert store.list("") == keys
    assert [store.get(key).decode() for key in keys] == keys


def test_an_empty_object_is_an_object(store: BlobStore) -> None:
    store.put("empty", b"")
    assert store.get("empty") == b""
    assert store.list("") == ["empty"]


def test_a_missing_object_is_a_key_error(store: BlobStore) -> None:
    store.put("folder/object", b"x")
    for key in ("nothing", "folder", "folder/object/below", "folder/nothing"):
        with pytest.raises(KeyError):
            store.get(key)


def test_the_same_bytes_again_change_nothing_and_other_bytes_are_refused(store: BlobStore) -> None:
    store.put("a", b"one")
    store.put("a", b"one")
    with pytest.raises(StoreError, match="other content"):
        store.put("a", b"two")
    assert store.get("a") == b"one"


def test_keys_are_listed_sorted_and_by_prefix(store: BlobStore) -> None:
    for key in ("b/2", "b/1", "a", "b1", "b/c/3"):
        store.put(key, b"")
    assert store.list("") == ["a", "b/1", "b/2", "b/c/3", "b1"]
    assert store.list("b/") == ["b/1", "b/2", "b/c/3"]
    assert store.list("b") == ["b/1", "b/2", "b/c/3", "b1"]
    assert store.list("b/c/") == ["b/c/3"]
    assert store.list("nothing/") == []


def test_deleting_is_idempotent(store: BlobStore) -> None:
    store.put("a/b", b"x")
    store.delete("a/b")
    store.delete("a/b")
    store.delete("never/was")
    assert store.list("") == []
    store.put("a/b", b"y")
    assert store.get("a/b") == b"y"


def test_a_pointer_moves_only_from_what_was_expected(store: BlobStore) -> None:
    assert not store.compare_and_swap("pointers/p", b"old", b"new")
    assert store.compare_and_swap("pointers/p", None, b"one")
    assert not store.compare_and_swap("pointers/p", None, b"two")
    assert not store.compare_and_swap("pointers/p", b"", b"two")
    assert store.compare_and_swap("pointers/p", b"one", b"two")
    assert store.get("pointers/p") == b"two"


@pytest.mark.parametrize("key", WILD_KEYS)
def test_a_wild_key_is_refused_by_every_method(store: BlobStore, key: str) -> None:
    with pytest.raises(StoreError, match="not allowed"):
        store.put(key, b"x")
    with pytest.raises(StoreError, match="not allowed"):
        store.get(key)
    with pytest.raises(StoreError, match="not allowed"):
        store.delete(key)
    with pytest.raises(StoreError, match="not allowed"):
        store.compare_and_swap(key, None, b"x")
    assert store.list("") == []


@pytest.mark.parametrize(
    "prefix", [*(key for key in WILD_KEYS if key not in ("", "a/")), "../../etc/", "/etc/", "a/.."]
)
def test_a_prefix_that_begins_no_key_is_refused(store: BlobStore, prefix: str) -> None:
    store.put("a/b", b"x")
    with pytest.raises(StoreError, match="not allowed"):
        store.list(prefix)


@given(st.text(max_size=40))
def test_an_allowed_key_never_leaves_the_store(key: str) -> None:
    try:
        check_key(key)
    except StoreError:
        return
    resolved = Path("/root/of/store") / key
    assert ".." not in resolved.parts
    assert Path("/root/of/store") in resolved.parents


def test_threads_that_count_by_compare_and_swap_lose_no_count(store: BlobStore) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: _count(store, 5), range(8)))
    assert store.get("pointers/count") == b"40"


@pytest.mark.parametrize("kind", SHARED_BETWEEN_PROCESSES)
def test_processes_that_count_by_compare_and_swap_lose_no_count(kind: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_count_in, args=(kind, tmp_path, 10)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert SHARED_BETWEEN_PROCESSES[kind](tmp_path).get("pointers/count") == b"40"


def test_of_many_writers_of_one_key_one_wins_and_the_others_know(store: BlobStore) -> None:
    def write(i: int) -> bool:
        try:
            store.put("contested", b"%d" % i)
        except StoreError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(write, range(16)))
    assert sum(won) == 1
    assert store.get("contested") == b"%d" % won.index(True)


def _count(store: BlobStore, times: int) -> None:
    done = 0
    while done < times:
        try:
            before: bytes | None = store.get("pointers/count")
        except KeyError:
            before = None
        done += store.compare_and_swap("pointers/count", before, b"%d" % (int(before or b"0") + 1))


def _count_in(kind: str, folder: Path, times: int) -> None:
    _count(SHARED_BETWEEN_PROCESSES[kind](folder), times)
