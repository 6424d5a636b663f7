"""Build an image from an OCI image layout, or from an archive of `docker save` or `podman save`.

Nothing in it is trusted. Every document has a size limit, the digest of a blob is checked before it is used, and that
of a layer's content is compared with the config's `diff_ids`. Specifications: OCI image 1.1 (image-layout.md,
manifest.md, config.md); for Docker's older archives moby's `image/spec/v1.2.md`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from etude.environments.images.decompression import decompressed
from etude.environments.images.directory import open_folder
from etude.environments.images.layers import apply_layer
from etude.environments.images.limits import BadSource, ImageLimits
from etude.environments.images.openat import open_in
from etude.environments.images.records import ImageRecord
from etude.environments.images.store import ImageStore
from etude.environments.images.tree import Tree
from etude.records.image import Image

_HINT = "write the image again with skopeo copy, docker save or podman save"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_DIGEST = re.compile("sha256:([0-9a-f]{64})")
_MAX_INDEXES = 4  # nested
_TAGS = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
T = TypeVar("T")


class _Platform(msgspec.Struct):
    architecture: str = ""
    os: str = ""


class _Descriptor(msgspec.Struct, rename={"media_type": "mediaType"}):
    digest: str
    size: int = 0
    media_type: str = ""
    platform: _Platform | None = None
    annotations: dict[str, str] = {}

    @property
    def tags(self) -> set[str]:
        """Names of the image: a tag in OCI layouts, the full name in those of containerd."""
        return {self.annotations[key] for key in _TAGS if key in self.annotations}


class _Manifest(msgspec.Struct):
    """A manifest, which has layers, or an index, which has manifests."""

    config: _Descriptor | None = None
    layers: list[_Descriptor] | None = None
    manifests: list[_Descriptor] | None = None


class _Settings(msgspec.Struct, rename="pascal"):
    env: list[str] | None = None
    working_dir: str = ""
    user: str = ""
    cmd: list[str] | None = None
    entrypoint: list[str] | None = None
    labels: dict[str, str] | None = None
    exposed_ports: dict[str, Any] | None = None


class _RootFs(msgspec.Struct):
    diff_ids: list[str]


class _Config(msgspec.Struct):
    rootfs: _RootFs
    config: _Settings | None = None
    architecture: str = ""


class _Saved(msgspec.Struct, rename="pascal"):
    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


def build_from_oci(store: ImageStore, source: str | os.PathLike[str], *, tag: str = "") -> ImageRecord:
    """Build an image from an OCI layout (a folder or archive), or an archive of `docker save` or `podman save`.

    `tag` chooses among several images. Raises `BadSource` if the source is damaged, incomplete or too large."""
    path = Path(source)
    with store.new_image() as building, _layout(path, store) as root:
        config_bytes, layers = _find(root, tag, store.limits)
        config = _decode(config_bytes, _Config, "the config of the image")
        if len(config.rootfs.diff_ids) != len(layers):
            facts = f"{len(layers)} layers, {len(config.rootfs.diff_ids)} digests"
            raise BadSource("the config of the image does not match its layers", facts, hint=_HINT)
        if len(layers) > store.limits.num_layers:
            raise BadSource(
                f"the image has {len(layers)} layers", f"at most {store.limits.num_layers} are allowed", hint=_HINT
            )
        for layer, diff_id in zip(layers, config.rootfs.diff_ids, strict=True):
            _unpack(root, layer, diff_id, building.tree)
        return building.commit(_record(config, path, layers))


def _record(config: _Config, path: Path, layers: list[str]) -> ImageRecord:
    found = config.config or _Settings()
    return ImageRecord(
        image=Image(
            digest="",
            workdir=found.working_dir or "/",
            env=dict(line.split("=", 1) for line in found.env or [] if "=" in line),
            user=found.user,
        ),
        source="oci",
        made=(f"archive {path.name}", *(f"layer {layer}" for layer in layers)),
        command=tuple(found.cmd or ()),
        entrypoint=tuple(found.entrypoint or ()),
        labels=found.labels or {},
        ports=tuple(found.exposed_ports or ()),
    )


@contextmanager
def _layout(path: Path, store: ImageStore) -> Iterator[int]:
    """Open the layout as a folder; an archive is decompressed to a temporary one. Yields its descriptor."""
    if path.is_dir():
        with open_folder(path) as root:
            yield root
        return
    with store.scratch() as folder:
        with Tree(folder, store.limits) as tree:
            try:
                with open(path, "rb") as file:
                    apply_layer(decompressed(file, store.limits), tree, whiteouts=False)
            except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
                hint = "name an OCI layout, or an archive of docker save or podman save"
                raise BadSource(f"{path} cannot be read", str(error.strerror), hint=hint) from None
        with open_folder(folder) as root:
            yield root


def _find(root: int, tag: str, limits: ImageLimits) -> tuple[bytes, list[str]]:
    """Find the image in the layout. Returns the bytes of its config, and the paths of its layers."""
    index = _document(root, "index.json", limits)
    saved = _document(root, "manifest.json", limits)
    if index is not None and (saved is None or not tag):
        return _from_index(root, index, tag, limits)
    if saved is None:
        raise BadSource("no index.json and no manifest.json", "this is not an image layout", hint=_HINT)
    images = _decode(saved, list[_Saved], "manifest.json")
    chosen = [image for image in images if not tag or tag in (image.repo_tags or [])]
    if len(chosen) != 1:
        tags = ", ".join(t for image in images for t in image.repo_tags or [])
        raise BadSource(f"{len(chosen)} images have the tag {tag!r}", f"tags: {tags}", hint="name one of them")
    config = _document(root, chosen[0].config, limits)
    if config is None:
        raise BadSource("the config of the image is missing", chosen[0].config[:80], hint=_HINT)
    return config, chosen[0].layers


def _from_index(root: int, index: bytes, tag: str, limits: ImageLimits) -> tuple[bytes, list[str]]:
    found = _decode(index, _Manifest, "index.json")
    if tag:
        tagged = [m for m in found.manifests or [] if tag in m.tags]
        if not tagged:
            tags = ", ".join(sorted({known for m in found.manifests or [] for known in m.tags})) or "none"
            raise BadSource(f"no image with tag {tag!r}", f"tags: {tags}", hint="name one of them, or none")
        found.manifests = tagged
    for _ in range(_MAX_INDEXES):
        if found.manifests is None:
            break
        chosen = _for_this_host(found.manifests)
        found = _decode(_blob(root, chosen.digest, limits), _Manifest, "a manifest")
    if found.config is None or found.layers is None:
        raise BadSource("the index has no manifest of an image", hint=_HINT)
    return _blob(root, found.config.digest, limits), [_blob_path(layer.digest) for layer in found.layers]


def _for_this_host(manifests: list[_Descriptor]) -> _Descriptor:
    machine = os.uname().machine
    wanted = _ARCHITECTURES.get(machine, machine)
    fits = [m for m in manifests if m.platform is None or (m.platform.os, m.platform.architecture) == ("linux", wanted)]
    if len(fits) != 1:
        there = ", ".join(f"{m.platform.os}/{m.platform.architecture}" for m in manifests if m.platform)
        raise BadSource(f"the index has {len(fits)} images for linux/{wanted}", there, hint="copy a single image")
    return fits[0]


def _blob_path(digest: str) -> str:
    found = _DIGEST.fullmatch(digest)
    if not found:
        raise BadSource(f"{digest[:80]!r} is not a SHA-256 digest", hint=_HINT)
    return f"blobs/sha256/{found[1]}"


def _blob(root: int, digest: str, limits: ImageLimits) -> bytes:
    data = _document(root, _blob_path(digest), limits)
    if data is None:
        raise BadSource("a blob is missing", digest, hint=_HINT)
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise BadSource("a blob does not match its digest", digest, hint=_HINT)
    return data


def _document(root: int, path: str, limits: ImageLimits) -> bytes | None:
    try:
        with open(_open(root, path), "rb") as file:
            data = file.read(limits.document_bytes + 1)
    except FileNotFoundError:
        return None
    if len(data) > limits.document_bytes:
        raise BadSource(f"{path[:80]} is too large", f"more than {limits.document_bytes} bytes", hint=_HINT)
    return data


def _open(root: int, path: str) -> int:
    """Open a file of the layout. Links, which old archives have, are resolved inside of it."""
    try:
        fd = open_in(root, path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise BadSource(f"{path[:80]!r} cannot be opened", str(error), hint=_HINT) from None
    if not os.path.isfile(f"/proc/self/fd/{fd}"):
        os.close(fd)
        raise BadSource(f"{path[:80]!r} is not a file", hint=_HINT)
    return fd


def _decode(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise BadSource(f"{what} is damaged", str(error)[:200], hint=_HINT) from None


def _unpack(root: int, layer: str, diff_id: str, tree: Tree) -> None:
    try:
        fd = _open(root, layer)
    except FileNotFoundError:
        raise BadSource("a layer is missing", layer[:80], hint=_HINT) from None
    with open(fd, "rb") as file:
        if layer.startswith("blobs/sha256/"):
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != layer.rpartition("/")[2]:
                raise BadSource("a layer does not match its digest", layer, hint=_HINT)
            file.seek(0)
        content, read = hashlib.sha256(), decompressed(file, tree.budget.limits)

        def hashing(size: int) -> bytes:
            data = read(size)
            content.update(data)
            return data

        apply_layer(hashing, tree)
    if f"sha256:{content.hexdigest()}" != diff_id:
        raise BadSource("the content of a layer does not match the config", layer[:80], hint=_HINT)
