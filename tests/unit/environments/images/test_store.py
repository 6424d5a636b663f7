"""The image store: images are named by their content, and complete or absent."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest
from tests.unit.environments.images.archives import files_of

from etude.environments.images import BadSource, ImageLimits, ImageStore, build_from_directory
from etude.environments.images.listing import Owner, decode, digest_of, encode
from etude.errors import InputError, StoreError
from etude.records.image import Image


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/tool").write_text("run me")
    (folder / "bin/tool").chmod(0o755)
    (folder / "sh").symlink_to("/bin/tool")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def test_the_same_tree_has_the_same_digest_whatever_its_times_and_its_order(tmp_path, store, source):
    first = build_from_directory(store, source)
    other = tmp_path / "other"
    shutil.copytree(source, other, symlinks=True)
    os.utime(other / "bin/tool", (0, 0))
    assert build_from_directory(ImageStore(tmp_path / "more"), other).image == first.image


@pytest.mark.parametrize("change", ["content", "mode", "link", "name"])
def test_any_change_is_another_digest(store, source, change):
    before = build_from_directory(store, source).image.digest
    if change == "content":
        (source / "bin/tool").write_text("run mE")
    elif change == "mode":
        (source / "bin/tool").chmod(0o700)
    elif change == "link":
        (source / "sh").unlink()
        (source / "sh").symlink_to("bin/tool")
    else:
        (source / "sh").rename(source / "bash")
    assert build_from_directory(store, source).image.digest != before


def test_an_image_is_found_by_name_and_by_digest_and_says_how_commands_start(store, source):
    record = build_from_directory(store, source, image=Image(digest="", workdir="/bin", env={"A": "1"}, user="u"))
    store.name("tools/base:1", record)
    assert store.get("tools/base:1") == store.get(record.image.digest) == record
    assert (record.image.workdir, record.image.env) == ("/bin", {"A": "1"})
    assert files_of(store.root(record.image.digest)) == {"bin": "/", "bin/tool": "run me", "sh": "->/bin/tool"}
    assert store.names() == {"tools/base:1": record.image.digest}


def test_two_names_of_one_tree_keep_their_own_settings(store, source):
    for name, workdir in (("a", "/a"), ("b", "/b")):
        store.name(name, build_from_directory(store, source, image=Image(digest="", workdir=workdir)))
    assert (store.get("a").image.workdir, store.get("b").image.workdir) == ("/a", "/b")
    assert len(store.images()) == 1


@pytest.mark.parametrize("name", ["../x", "", "A", "a" * 200, "scratch", "0" * 64, "a\0b"])
def test_an_invalid_image_name_is_refused(store, source, name):
    with pytest.raises(InputError):
        store.name(name, build_from_directory(store, source))


def test_an_unknown_image_is_an_error_with_the_nearest_name(store, source):
    store.name("debian", build_from_directory(store, source))
    with pytest.raises(InputError, match=r"(?s)no image 'debain'") as caught:
        store.get("debain")
    assert "debian" in caught.value.hint


def test_no_two_images_share_an_inode(store, source):
    parent = build_from_directory(store, source)
    with store.new_image(parent.image.digest) as building:
        building.tree.file("new", Owner(0o644), (b"1",))
        child = building.commit(parent)
    assert child.parent == parent.image.digest
    inodes = [{p.lstat().st_ino for p in store.root(record.image.digest).rglob("*")} for record in (parent, child)]
    assert not inodes[0] & inodes[1]
    store.verify(parent.image.digest)


@pytest.mark.parametrize("damage", ["content", "added", "gone", "listing"])
def test_verifying_names_what_is_no_more_what_it_was(store, source, damage):
    digest = build_from_directory(store, source).image.digest
    store.get(digest, verify=True)
    root = store.root(digest)
    if damage == "content":
        (root / "bin/tool").write_text("run MY")
    elif damage == "added":
        (root / "bin/more").write_text("")
    elif damage == "gone":
        (root / "sh").unlink()
    else:
        (root.parent / "listing").write_bytes(b"")
    with pytest.raises(StoreError, match="damaged"):
        store.get(digest, verify=True)


def test_an_answer_that_lies_in_an_image_is_found(store, source):
    (source / "site-packages").mkdir()
    (source / "site-packages/fix.py").write_bytes(b"the fix")
    digest = build_from_directory(store, source).image.digest
    assert store.find(digest, [b"the fix", b"run"]) == ["site-packages/fix.py"]
    assert store.find(digest, [b""]) == []


def test_an_image_in_use_stays_until_it_is_let_go(store, source):
    record = build_from_directory(store, source)
    with store.in_use(record.image.digest), pytest.raises(InputError, match="in use"):
        store.remove(record.image.digest)
    assert store.remove(record.image.digest) == len("run me")
    assert store.images() == []


def test_the_files_go_with_the_last_name(store, source):
    record = build_from_directory(store, source)
    store.name("a", record)
    store.name("b", record)
    assert store.remove("a") == 0
    assert store.get("b") == record
    assert store.remove("b") > 0
    with pytest.raises(InputError):
        store.get(record.image.digest)


def test_collecting_takes_what_has_no_name_and_leaves_what_is_in_use(store, source):
    named = build_from_directory(store, source)
    store.name("keep", named)
    (source / "more").write_text("x" * 100)
    loose = build_from_directory(store, source)
    store.cache_step("k" * 64, loose)
    with store.in_use(loose.image.digest):
        assert store.collect() == (0, 0)
    assert store.collect() == (1, 106)
    assert store.cached_step("k" * 64) is None
    assert [record.image.digest for record in store.images()] == [named.image.digest]


def test_a_set_user_id_bit_is_dropped_unless_declared(tmp_path, source):
    (source / "bin/tool").chmod(0o4755)
    for keep, mode in ((False, 0o755), (True, 0o4755)):
        store = ImageStore(tmp_path / f"images-{keep}", keep_setuid=keep)
        digest = build_from_directory(store, source).image.digest
        assert (store.root(digest) / "bin/tool").stat().st_mode & 0o7777 == mode
        store.verify(digest)


@pytest.mark.parametrize(
    "limits", [{"total_bytes": 5}, {"file_bytes": 5}, {"num_files": 2}, {"path_bytes": 16}, {"depth": 2}]
)
def test_a_source_past_a_limit_is_refused_and_leaves_nothing(tmp_path, source, limits):
    (source / "bin/a-long-name/deep").mkdir(parents=True)
    (source / "bin/a-long-name/deep/file").write_text("123456")
    store = ImageStore(tmp_path / "small", limits=ImageLimits(**limits))
    with pytest.raises(BadSource):
        build_from_directory(store, source)
    assert list((store.path / "building").iterdir()) == []
    assert store.images() == []


def test_a_pipe_in_a_folder_is_refused(store, source):
    os.mkfifo(source / "pipe")
    with pytest.raises(BadSource, match="pipe"):
        build_from_directory(store, source)


def test_a_damaged_listing_is_told_from_a_whole_one(store, source):
    digest = build_from_directory(store, source).image.digest
    data = (store.root(digest).parent / "listing").read_bytes()
    assert digest_of(encode(decode(data))) == digest
    for bad in (data + data, b"a\n", b"\0" * 6 + b"\n"):
        with pytest.raises(StoreError):
            decode(bad)


def test_an_image_that_is_named_while_others_are_collected_stays(tmp_path, source):
    class Naming(ImageStore):
        def images(self):
            found = super().images()
            self.name("late", found[0])
            return found

    store = Naming(tmp_path / "naming")
    record = build_from_directory(store, source)
    assert store.collect() == (0, 0)
    store.verify(store.get("late").image.digest)
    store.remove("late")
    with pytest.raises(InputError, match="no image"):
        store.name("again", record)


def test_an_image_taken_away_between_looking_and_holding_is_no_image(store, source, monkeypatch):
    digest = build_from_directory(store, source).image.digest
    real = fcntl.flock

    def late(fd, how):
        if how == fcntl.LOCK_SH:
            monkeypatch.setattr(fcntl, "flock", real)
            assert store.collect()[0] == 1
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(InputError, match="no image"), store.open_root(digest):
        pass


def test_the_same_bytes_taken_away_while_they_are_built_again_are_there_in_the_end(tmp_path, source):
    class Removing(ImageStore):
        def _write(self, path, record):
            if path.parent.parent == self.path and path.name == "image.json" and path.parent.name != "names":
                assert self.collect()[0] == 1
            super()._write(path, record)

    store = ImageStore(tmp_path / "images")
    first = build_from_directory(store, source)
    assert build_from_directory(Removing(tmp_path / "images"), source) == first
    store.verify(first.image.digest)


@pytest.mark.parametrize("place", ["/proc/none", "file/below", "x" * 300])
def test_a_place_that_can_hold_no_images_is_told_with_what_to_do(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="images cannot be stored") as caught:
        ImageStore(tmp_path / place)
    assert "use another folder" in caught.value.hint
