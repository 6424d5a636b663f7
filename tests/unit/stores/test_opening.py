"""Opening stores from paths and URLs."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import StoreError
from etude.stores import BucketStore, CachedStore, DirectoryStore, MemoryStore, open_store
from etude.stores.locations import parse_bucket_url


def test_a_path_and_a_file_url_are_the_same_directory(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    for place in (folder, str(folder), f"file://{folder}".replace(" ", "%20"), f"file://localhost{folder}"):
        store = open_store(place)
        assert isinstance(store, DirectoryStore)
        assert store.root == folder


@pytest.mark.parametrize("place", ["", " "])
def test_an_empty_place_is_refused_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for cache in (None, "near"):
        with pytest.raises(StoreError, match="URL is empty") as caught:
            open_store(place, cache=cache)
        assert "name a directory" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_can_be_none_is_refused_at_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    for cache in (tmp_path / "file", tmp_path / "file" / "near"):
        with pytest.raises(StoreError, match="cannot be used") as caught:
            open_store("memory://", cache=cache)
        assert "name a directory" in caught.value.hint
    assert (tmp_path / "file").read_text() == "mine"
    assert isinstance(open_store("memory://", cache=tmp_path / "near"), CachedStore)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(StoreError, match="cannot be used"):
        open_store("memory://", cache=tmp_path / "near")


def test_each_memory_store_is_a_new_one() -> None:
    one, other = open_store("memory://"), open_store("memory://")
    assert isinstance(one, MemoryStore)
    one.put("a", b"x")
    assert other.list("") == []


def test_a_bucket_of_each_provider_is_opened_without_asking_it_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    for url in ("s3://models", "gs://models/a/b", "az://models/a"):
        store = open_store(url)
        assert isinstance(store, BucketStore)
        assert repr(store) == f"BucketStore('{url}')"


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("s4://bucket/x", "known: az, file, gs, memory, s3"),
        ("gcs://bucket/x", "'gs'"),
        ("s3://", "s3://bucket/prefix"),
        ("s3:///prefix", "s3://bucket/prefix"),
        ("s3://a bucket/x", "s3://bucket/prefix"),
        ("s3://[bucket/x", "s3://bucket/prefix"),
        ("s3://bucket/../x", "no part may start with a dot"),
        ("s3://bucket//x//y", "no part may start with a dot"),
        ("file://host/x", "file:///path"),
        ("file://x", "file:///path"),
        ("file://[x", "file:///path"),
        ("memory://x", "write memory://"),
    ],
)
def test_a_place_that_is_none_is_named_with_a_hint(url: str, hint: str) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(url)
    assert hint in caught.value.hint


@pytest.mark.parametrize("url", ["s3://id:hunter2@bucket/x", "s3://bucket/x?secret=hunter2", "az://bucket/x#hunter2"])
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StoreError, match="credentials") as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


@given(st.text(max_size=60), st.sampled_from(["s3://", "gs://", "az://", ""]))
def test_any_text_is_a_place_that_reads_back_or_an_error(text: str, scheme: str) -> None:
    try:
        place = parse_bucket_url(scheme + text)
    except StoreError:
        return
    assert parse_bucket_url(str(place)) == place


def test_what_the_environment_does_not_give_is_an_error_that_quotes_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StoreError, match="cannot make a client for az://models") as caught:
        open_store("az://models")
    assert "AZURE_STORAGE_ACCOUNT_NAME" in caught.value.hint
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", '{"private_key": "hunter2')
    with pytest.raises(StoreError, match="cannot make a client for gs://models") as caught:
        open_store("gs://models")
    assert "hunter2" not in str(caught.value)


def test_without_obstore_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("obstore", "obstore.store", "obstore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StoreError, match="is not installed") as caught:
        open_store("s3://models")
    assert caught.value.hint == "pip install 'etude[buckets]'"


def test_a_bucket_store_pickles_with_its_limits_and_without_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "my-id")
    pickled = pickle.dumps(BucketStore("s3://models/a", deadline_s=3.0, max_requests=2))
    assert b"hunter2" not in pickled
    assert b"my-id" not in pickled
    again = pickle.loads(pickled)
    assert repr(again) == "BucketStore('s3://models/a')"
    assert pickle.dumps(again) == pickled


def test_an_object_of_more_than_a_bucket_copies_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.stores.bucket.MAX_OBJECT_BYTES", 10)
    with pytest.raises(StoreError, match="11 bytes"):
        BucketStore("s3://models").put("a", b"x" * 11)


def test_a_pointer_of_more_than_a_part_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(StoreError, match="too many for a pointer"):
        BucketStore("s3://models", part_bytes=5 << 20).compare_and_swap("p", None, bytes((5 << 20) + 1))


@pytest.mark.parametrize(
    "limits", [{"deadline_s": 0}, {"silence_s": 0}, {"attempt_s": -1}, {"max_requests": 0}, {"part_bytes": 1 << 20}]
)
def test_limits_that_cannot_work_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="or more"):
        BucketStore("s3://models", **limits)
