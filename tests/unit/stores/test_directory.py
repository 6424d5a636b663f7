"""The directory store on full and read-only disks, with links, and after killed writers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp, Message

from etude.errors import StoreError
from etude.stores import DirectoryStore, directory
from etude.stores.keys import is_key
from etude.stores.relay import build_relay

UNDER_A_FILE_SIZE_LIMIT = """
import resource, sys
from etude.errors import StoreError
from etude.stores import DirectoryStore
store = DirectoryStore(sys.argv[1])
store.put("small", b"x" * 100)
store.compare_and_swap("pointers/p", None, b"one")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
big = b"x" * 10_000
for attempt in (lambda: store.put("big", big), lambda: store.compare_and_swap("pointers/p", b"one", big)):
    try:
        attempt()
    except StoreError as error:
        print(error)
"""


def test_a_disk_that_takes_no_more_is_a_store_error_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", UNDER_A_FILE_SIZE_LIMIT, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("hint: the process's file size limit") == 2
    store = DirectoryStore(tmp_path)
    assert store.list("") == ["pointers/p", "small"]
    assert store.get("pointers/p") == b"one"
    assert list((tmp_path / ".tmp").iterdir()) == []


ON_A_FULL_DISK = """
import sys
from etude.errors import StoreError
from etude.stores import DirectoryStore
store = DirectoryStore(sys.argv[1])
store.put("small", b"x" * 100)
store.compare_and_swap("pointers/p", None, b"one")
for number in range(100):
    try:
        store.put(f"objects/{number}", b"x" * 10_000)
    except StoreError as error:
        print(error)
        break
kept = store.list("objects/")
print(len(kept) == number > 0, all(len(store.get(key)) == 10_000 for key in kept))
print(store.get("pointers/p"))
"""


A_SWAP_ON_A_FULL_DISK = """
import sys
from etude.errors import StoreError
from etude.stores import DirectoryStore
store = DirectoryStore(sys.argv[1])
store.compare_and_swap("pointers/p", None, b"one")
for size in (10_000, 1):  # until not a byte is free
    for number in range(100):
        try:
            store.put(f"objects/{size}.{number}", b"x" * size)
        except StoreError:
            break
for data in (b"x" * 10_000, b"two"):
    try:
        store.compare_and_swap("pointers/p", b"one", data)
    except StoreError as error:
        print(error)
    print(store.get("pointers/p"))
store.delete("objects/10000.0")
print(store.compare_and_swap("pointers/p", b"one", b"two"))
print(store.get("pointers/p"))
"""


def on_a_small_disk(script: str, folder: Path) -> str:
    """Run a script with a disk of 256 KiB at `folder`; return its output."""
    mounted = 'mount -t tmpfs -o size=256k tmpfs "$0" && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, str(folder)]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    ran = subprocess.run(
        [*command, sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_full_disk_is_a_store_error_and_every_object_is_whole(tmp_path: Path) -> None:
    told = on_a_small_disk(ON_A_FULL_DISK, tmp_path)
    assert "hint: the disk is full" in told
    assert told.splitlines()[-2:] == ["True True", "b'one'"]


def test_a_pointer_survives_a_swap_on_a_full_disk_and_moves_once_there_is_room(tmp_path: Path) -> None:
    lines = on_a_small_disk(A_SWAP_ON_A_FULL_DISK, tmp_path).splitlines()
    refused = ["pointer 'pointers/p' cannot be moved: No space left on device", lines[1], "b'one'"]
    assert "hint: the disk is full" in lines[1]
    assert lines == [*refused, *refused, "True", "b'two'"]


def test_a_directory_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be opened"):
        DirectoryStore(tmp_path / "file" / "store")


def test_a_key_below_an_object_is_a_store_error(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("a", b"x")
    with pytest.raises(StoreError) as caught:
        store.put("a/b", b"y")
    assert "already an object" in caught.value.hint
    store.put("c/d", b"x")
    with pytest.raises(StoreError) as caught:
        store.put("c", b"y")
    assert "prefix" in caught.value.hint


def test_a_stray_temporary_file_is_swept_once_it_is_old_and_is_never_a_key(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    fresh, old = tmp_path / ".tmp" / "fresh", tmp_path / ".tmp" / "old"
    fresh.write_bytes(b"half")
    old.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert store.list("") == []
    DirectoryStore(tmp_path)
    assert fresh.exists()
    assert not old.exists()


def test_a_lock_that_never_gets_free_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path)
    monkeypatch.setattr(directory, "LOCK_DEADLINE_S", 0.05)
    with store._locked(), pytest.raises(StoreError, match="was not free within"):
        store.put("a", b"x")
    store.put("a", b"x")


@pytest.mark.parametrize("is_mount_point", [False, True])
def test_a_store_that_is_gone_is_not_an_empty_one(tmp_path: Path, is_mount_point: bool) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.put("a", b"x")
    with pytest.raises(KeyError):
        store.get("b")
    assert store.list("objects/") == []
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    if is_mount_point:
        (tmp_path / "store").mkdir()
    for read in (lambda: store.get("a"), lambda: store.list("")):
        with pytest.raises(StoreError, match="store is gone") as caught:
            read()
        assert "mount it again" in caught.value.hint
    (tmp_path / "elsewhere").rename(tmp_path / "store")  # over an empty directory, too
    assert store.get("a") == b"x"


def test_two_stores_on_one_directory_see_each_other(tmp_path: Path) -> None:
    one, other = DirectoryStore(tmp_path), DirectoryStore(tmp_path)
    one.put("a", b"x")
    assert other.get("a") == b"x"
    assert one.compare_and_swap("p", None, b"1")
    assert not other.compare_and_swap("p", None, b"2")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_write_permission_is_a_store_error(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    (tmp_path / ".tmp").chmod(0o500)
    try:
        with pytest.raises(StoreError, match="cannot be written"):
            store.put("a", b"x")
    finally:
        (tmp_path / ".tmp").chmod(0o700)


def _with_links(folder: Path) -> tuple[DirectoryStore, Path]:
    """A store with three objects, and links to a folder outside of it."""
    host = folder / "host"
    (host / "deep").mkdir(parents=True)
    (host / "secret").write_text("the host's")
    (host / "deep" / "secret").write_text("the host's")
    store = DirectoryStore(folder / "store")
    for key in ("objects/a", "objects/b/c", "pointers/p"):
        store.put(key, b"ours")
    for name, target in {"out": host, "objects/out": host, "objects/file": host / "secret", "up": Path("..")}.items():
        (folder / "store" / name).symlink_to(target)
    return store, host


def _tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() if p.is_file() else "" for p in sorted(folder.rglob("*"))}


def test_links_below_the_root_are_no_objects_and_lead_nowhere(tmp_path: Path) -> None:
    store, host = _with_links(tmp_path)
    before = _tree(host)
    assert store.list("") == ["objects/a", "objects/b/c", "pointers/p"]
    for prefix in ("out/", "objects/out/", "up/host/"):
        with pytest.raises(StoreError, match="is a link"):
            store.list(prefix)
    for key in ("out/secret", "objects/file", "objects/out/deep/secret", "up/host/secret"):
        for use in (
            lambda key=key: store.get(key),
            lambda key=key: store.put(key, b"x"),
            lambda key=key: store.compare_and_swap(key, None, b"x"),
        ):
            with pytest.raises(StoreError, match="is a link"):
                use()
    for key in ("out/secret", "objects/out/deep/secret"):
        with pytest.raises(StoreError, match="is a link"):
            store.delete(key)
    with pytest.raises(StoreError, match="is a link"):
        store.put("out/new/one", b"x")
    assert _tree(host) == before


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    store = DirectoryStore(tmp_path / "store")
    store.put("a/b", b"x")
    assert store.list("") == ["a/b"]
    assert store.get("a/b") == (tmp_path / "disk/a/b").read_bytes() == b"x"


def test_a_file_whose_name_is_no_key_is_not_listed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("a", b"x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "two words").write_text("x")
    (tmp_path / ("x" * 201)).write_text("x")
    assert store.list("") == ["a"]


def asked(relay: ASGIApp, path: str = "", prefix: str = "") -> tuple[int, bytes]:
    """The response of a relay to a raw path; an HTTP client would normalise ``..``."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    query = urlencode({"prefix": prefix}).encode()
    scope = {
        "type": "http",
        "method": "GET",
        "path": f"/{path}",
        "raw_path": b"/",
        "query_string": query,
        "headers": [],
    }
    asyncio.run(relay(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


PARTS = st.one_of(
    st.sampled_from(
        ["..", ".", "", "objects", "out", "up", "host", "secret", "deep", "file", "a", ".tmp", ".lock", "etc"]
    ),
    st.text(max_size=5),
)
PATHS = st.lists(PARTS, max_size=6).map("/".join)


@settings(max_examples=150, deadline=None)
@given(paths=st.lists(PATHS, min_size=1, max_size=8))
def test_no_key_and_no_prefix_leads_out_of_the_store(
    paths: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    store, host = _with_links(folder)
    relay = build_relay(store)
    before = _tree(host)
    outside = sorted(path.name for path in folder.iterdir())
    for path in paths:
        for get in (lambda path=path: store.get(path), lambda path=path: asked(relay, path)[1]):
            with contextlib.suppress(StoreError, KeyError):
                assert b"the host's" not in get()
        try:
            found = store.list(path)
            assert all(is_key(key) and key.startswith(path) for key in found)
            assert json.loads(asked(relay, prefix=path)[1]) == found
        except StoreError:
            assert asked(relay, prefix=path)[0] in (400, 502)
        for change in (lambda path=path: store.put(path, b"x"), lambda path=path: store.delete(path)):
            try:
                change()
                assert is_key(path)
            except StoreError:
                pass
    assert _tree(host) == before
    assert sorted(path.name for path in folder.iterdir()) == outside
