"""Layers are applied only inside of a tree, and equal changes give equal bytes."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.environments.images.archives import files_of, special, tar_of

from etude.environments.images.decompression import decompressed
from etude.environments.images.layers import apply_layer, write_layer
from etude.environments.images.limits import BadSource, ImageLimits
from etude.environments.images.listing import Owner, encode, scan
from etude.environments.images.tree import Tree

LIMITS = ImageLimits(num_files=1000, total_bytes=1 << 20)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("untouched")
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def apply(root: Path, *layers: bytes) -> dict[str, str]:
    with Tree(root, LIMITS) as tree:
        for layer in layers:
            apply_layer(decompressed(io.BytesIO(layer), LIMITS), tree)
    return files_of(root)


def test_a_layer_adds_replaces_and_takes_away(root):
    first = tar_of([("etc", None), ("etc/a", b"1"), ("etc/b", b"2"), ("bin", "usr/bin")])
    second = tar_of([("etc/.wh.a", b""), ("etc/b", b"3"), ("bin", None), ("bin/sh", b"s")])
    assert apply(root, first, second) == {"bin": "/", "bin/sh": "s", "etc": "/", "etc/b": "3"}


def test_an_opaque_folder_hides_what_was_below_and_not_what_comes_with_it(root):
    first = tar_of([("d", None), ("d/old", b"1"), ("d/e/old", b"1")])
    second = tar_of([("d/e/new", b"2"), ("d/new", b"2"), ("d/.wh..wh..opq", b"")])
    assert apply(root, first, second) == {"d": "/", "d/e": "/", "d/e/new": "2", "d/new": "2"}


def test_a_whiteout_through_a_file_or_of_nothing_is_no_error(root):
    assert apply(root, tar_of([("f", b"1")]), tar_of([("f/.wh.x", b""), (".wh.gone", b"")])) == {"f": "1"}


def test_a_file_where_a_folder_must_be_makes_way(root):
    assert apply(root, tar_of([("a", b"1")]), tar_of([("a/b/c", b"2")])) == {"a": "/", "a/b": "/", "a/b/c": "2"}


def test_links_of_the_image_are_followed_inside_of_it(root):
    layers = tar_of([("usr/lib", None), ("lib", "/usr/lib")]), tar_of([("lib/x", b"1")])
    assert apply(root, *layers)["usr/lib/x"] == "1"


def test_links_lead_no_deeper_than_a_path_may(root):
    deep = "/".join(["d"] * 60)
    entries = [(deep, None), ("l0", deep)]
    for at in range(3):
        entries += [(f"l{at}/{deep}", None), (f"l{at + 1}", f"l{at}/{deep}")]
    with pytest.raises(BadSource, match="is too deep") as caught:
        apply(root, tar_of(entries))
    assert caught.value.hint


def test_two_names_of_one_file_have_one_content(root):
    layer = tar_of([("a", b"1"), special("b", tarfile.LNKTYPE, "a"), special("/c", tarfile.LNKTYPE, "/b")])
    assert apply(root, layer) == {"a": "1", "b": "1", "c": "1"}


@pytest.mark.parametrize(
    "entries",
    [
        [("../outside/secret", b"x")],
        [("a/../../outside/secret", b"x")],
        [("d", "../outside"), ("d/secret", b"x")],
        [("d", "/../../outside"), ("d/secret", b"x")],
        [("l", "../outside/secret"), ("l", b"x")],
        [("l", "../outside/secret"), special("h", tarfile.LNKTYPE, "l"), ("h", b"x")],
        [special("h", tarfile.LNKTYPE, "../outside/secret"), ("h", b"x")],
        [("d", "../outside"), special("h", tarfile.LNKTYPE, "d/secret"), ("h", b"x")],
        [("d", "../outside"), ("d/.wh.secret", b"")],
        [("d", "../outside"), ("d/.wh..wh..opq", b"")],
        [(".wh...", b"")],
        [("a/.wh...", b"")],
        [(".wh..", b"")],
        [("x" * 300, b"")],
        [("a/" * 200 + "b", b"")],
        [special("null", tarfile.CHRTYPE)],
        [special("disk", tarfile.BLKTYPE)],
        [special("pipe", tarfile.FIFOTYPE)],
        [("a", "b"), ("b", "a"), ("a/c", b"x")],
    ],
)
def test_a_hostile_layer_reaches_nothing_outside(root, entries):
    with contextlib.suppress(BadSource):
        apply(root, tar_of(entries))
    assert (root.parent / "outside/secret").read_text() == "untouched"
    assert sorted(p.name for p in root.parent.iterdir()) == ["outside", "root"]
    with Tree(root, LIMITS) as tree:
        scan(tree.root)  # raises for a device


def test_permissions_and_owners_are_those_of_the_archive(root):
    info = special("tool", tarfile.REGTYPE)
    info.mode, info.uid, info.gid = 0o6751, 12, 34
    with Tree(root, LIMITS) as tree:
        apply_layer(decompressed(io.BytesIO(tar_of([info])), LIMITS), tree)
        [entry] = [e for e in scan(tree.root, tree.declared) if e.path == "tool"]
    assert entry.owner == Owner(0o751, 12, 34)


NAMES = st.sampled_from(
    ["a", "b", "a/b", "a/b/c", "l/x", "../x", "/", ".", "a/..", ".wh.a", "a/.wh..wh..opq", "l", "é"]
)
ENTRIES = st.lists(
    st.one_of(
        st.tuples(NAMES, st.one_of(st.none(), st.binary(max_size=20), st.sampled_from(["a", "/", "..", "l", "/a/b"]))),
        st.builds(special, NAMES, st.sampled_from([tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]), NAMES),
    ),
    max_size=12,
)


@settings(max_examples=150)
@given(ENTRIES)
@example([("a", "a"), ("a/.wh..wh..opq", None)])
@example([("a", b""), special("a/b", tarfile.LNKTYPE, "a")])
@example([("a/b", b""), ("a/c", b""), special("a", tarfile.LNKTYPE, "a/b")])
def test_any_layer_is_applied_inside_or_refused(tmp_path_factory, entries):
    root = tmp_path_factory.mktemp("case") / "root"
    root.mkdir()
    (root.parent / "x").write_text("untouched")
    with contextlib.suppress(BadSource):
        apply(root, tar_of(entries))
    assert sorted(p.name for p in root.parent.iterdir()) == ["root", "x"]
    assert (root.parent / "x").read_text() == "untouched"


def test_what_is_written_as_a_layer_makes_the_same_tree_again(root, tmp_path):
    names = ["a", "d/" + "n" * 120, "d/" + "ü" * 100 + "/deep", "with\nnewline"]
    apply(root, tar_of([*((n, n.encode()) for n in names), ("link", "t" * 150), ("empty", None)]))
    if os.geteuid() == 0:
        os.chown(root / "a", 3_000_000, 7)
    data = io.BytesIO()
    folder = os.open(root, os.O_RDONLY)
    write_layer(folder, data.write)
    again = tmp_path / "again"
    again.mkdir()
    apply(again, data.getvalue())
    copy = os.open(again, os.O_RDONLY)
    assert encode(scan(folder))[100:] == encode(scan(copy))[100:]
    os.utime(root / "a", (0, 0))
    later = io.BytesIO()
    write_layer(folder, later.write)
    assert later.getvalue() == data.getvalue()
    with tarfile.open(fileobj=io.BytesIO(data.getvalue())) as tar:
        assert sorted(tar.getnames()) == sorted(str(p.relative_to(root)) for p in root.rglob("*"))
    os.close(folder)
    os.close(copy)
