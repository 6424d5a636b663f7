"""OCI layouts and saved archives: read if all digests match, else refused."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.environments.images.archives import files_of, oci_layout, tar_of

from etude.environments.images import BadSource, ImageStore
from etude.environments.images.oci import build_from_oci

LAYERS = [tar_of([("etc", None), ("etc/a", b"1")]), tar_of([("etc/.wh.a", b""), ("etc/b", b"2")])]
CONFIG = {
    "Env": ["PATH=/bin", "A=b=c"],
    "WorkingDir": "/etc",
    "User": "1000:1000",
    "Cmd": ["sh"],
    "Entrypoint": None,
    "Labels": {"k": "v"},
    "ExposedPorts": {"80/tcp": {}},
}


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return oci_layout(tmp_path / "layout", LAYERS, CONFIG)


def test_a_layout_becomes_an_image_with_its_settings(store, layout):
    record = build_from_oci(store, layout)
    assert files_of(store.root(record.image.digest)) == {"etc": "/", "etc/b": "2"}
    image = record.image
    assert (image.workdir, image.env, image.user) == ("/etc", {"PATH": "/bin", "A": "b=c"}, "1000:1000")
    assert (record.command, record.entrypoint, record.labels, record.ports) == (("sh",), (), {"k": "v"}, ("80/tcp",))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_archive_of_a_layout_is_the_same_image(tmp_path, store, layout, pack):
    entries = [(str(p.relative_to(layout)), None if p.is_dir() else p.read_bytes()) for p in sorted(layout.rglob("*"))]
    (tmp_path / "image.tar").write_bytes(pack(tar_of(entries)))
    found = build_from_oci(store, tmp_path / "image.tar").image
    assert found == build_from_oci(store, layout).image
    assert list((store.path / "building").iterdir()) == []


def test_a_tag_chooses_among_the_images_of_a_layout(tmp_path, store, layout):
    other = oci_layout(tmp_path / "other", LAYERS[:1])
    shutil.copytree(other / "blobs", layout / "blobs", dirs_exist_ok=True)
    found = []
    for folder, tag in ((layout, "two"), (other, "one")):
        [manifest] = json.loads((folder / "index.json").read_text())["manifests"]
        found.append({**manifest, "annotations": {"org.opencontainers.image.ref.name": tag}})
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": found}))
    names = {
        tag: set(files_of(store.root(build_from_oci(store, layout, tag=tag).image.digest))) for tag in ("one", "two")
    }
    assert names == {"one": {"etc", "etc/a"}, "two": {"etc", "etc/b"}}
    with pytest.raises(BadSource, match=r"no image with tag 'three': tags: one, two"):
        build_from_oci(store, layout, tag="three")
    with pytest.raises(BadSource, match="2 images"):
        build_from_oci(store, layout)


def saved(tmp_path: Path) -> Path:
    """An archive as of `docker save` before version 25: a repeated layer is a link."""
    diff_ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in (*LAYERS, LAYERS[1])]
    config = json.dumps({"rootfs": {"diff_ids": diff_ids}, "config": CONFIG}).encode()
    layers = ["a/layer.tar", "b/layer.tar", "c/layer.tar"]
    manifest = [{"Config": "c.json", "RepoTags": ["tool:1"], "Layers": layers}]
    entries = [("manifest.json", json.dumps(manifest).encode()), ("c.json", config), *zip(layers, LAYERS, strict=False)]
    path = tmp_path / "saved.tar"
    path.write_bytes(tar_of([*entries, ("c/layer.tar", "../b/layer.tar")]))
    return path


def test_what_docker_saves_is_the_same_image(tmp_path, store, layout):
    path = saved(tmp_path)
    assert build_from_oci(store, path, tag="tool:1").image == build_from_oci(store, layout).image
    with pytest.raises(BadSource, match="tool:2"):
        build_from_oci(store, path, tag="tool:2")


@pytest.mark.parametrize(
    "what", ["blob", "layer", "missing", "diff_ids", "count", "index", "huge", "no layout", "link"]
)
def test_a_damaged_or_dishonest_layout_is_refused(tmp_path, store, layout, what):
    blobs = {p.name: p for p in (layout / "blobs/sha256").iterdir()}
    layer = blobs[hashlib.sha256(LAYERS[0]).hexdigest()]
    if what == "blob":
        config = next(p for p in blobs.values() if b"rootfs" in p.read_bytes())
        config.write_bytes(config.read_bytes() + b" ")
    elif what == "layer":
        layer.write_bytes(LAYERS[1])
    elif what == "missing":
        layer.unlink()
    elif what in ("diff_ids", "count"):
        other = oci_layout(tmp_path / "other", [LAYERS[1], LAYERS[0]][: 2 if what == "diff_ids" else 1])
        _with_config_of(layout, other)
    elif what == "index":
        (layout / "index.json").write_text("[" * 100_000)
    elif what == "huge":
        (layout / "index.json").write_text(" " * (5 << 20))
    elif what == "link":
        layer.unlink()
        layer.symlink_to("/etc/passwd")
    else:
        shutil.rmtree(layout)
        layout.mkdir()
    with pytest.raises(BadSource):
        build_from_oci(store, layout)
    assert store.images() == []
    assert list((store.path / "building").iterdir()) == []


def _with_config_of(layout: Path, other: Path) -> None:
    """A manifest with the layers of one layout and the config of another."""

    def read(folder: Path, digest: str) -> dict:
        return json.loads((folder / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes())

    def manifest(folder: Path) -> dict:
        return read(folder, json.loads((folder / "index.json").read_bytes())["manifests"][0]["digest"])

    mixed = {**manifest(layout), "config": manifest(other)["config"]}
    shutil.copytree(other / "blobs", layout / "blobs", dirs_exist_ok=True)
    data = json.dumps(mixed).encode()
    digest = hashlib.sha256(data).hexdigest()
    (layout / "blobs/sha256" / digest).write_bytes(data)
    (layout / "index.json").write_text(json.dumps({"manifests": [{"digest": f"sha256:{digest}"}]}))


def test_an_index_of_several_platforms_gives_this_hosts(tmp_path, store, layout):
    index = json.loads((layout / "index.json").read_text())
    one = index["manifests"][0]
    import os

    mine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    index["manifests"] = [
        {**one, "platform": {"os": "linux", "architecture": mine}},
        {"digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "s390x"}},
        {"digest": "sha256:" + "1" * 64, "platform": {"os": "unknown", "architecture": "unknown"}},
    ]
    (layout / "index.json").write_text(json.dumps(index))
    assert build_from_oci(store, layout).num_files == 3
    index["manifests"].pop(0)
    (layout / "index.json").write_text(json.dumps(index))
    with pytest.raises(BadSource, match="s390x"):
        build_from_oci(store, layout)


@pytest.mark.parametrize("path", ["absent.tar", ".", "text"])
def test_an_invalid_image_is_an_error_with_a_hint(tmp_path, store, path):
    (tmp_path / "text").write_text("not an archive")
    with pytest.raises(BadSource):
        build_from_oci(store, tmp_path / path)


@settings(max_examples=60)
@given(st.data())
def test_mutated_documents_are_read_or_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("case")
    layout = oci_layout(folder / "layout", LAYERS[:1], {"Env": ["A=1"]})
    path = data.draw(st.sampled_from(sorted(p for p in layout.rglob("*") if p.is_file())))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    store = ImageStore(folder / "images")
    try:
        build_from_oci(store, layout)
    except BadSource:
        assert store.images() == []
