"""The commands ``etude machines image build``, ``packages``, ``list``, ``show``, ``remove``, ``collect`` and
``microvm``."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from etude.dashboard.formatting import size
from etude.environments.backends import open_memory_bounded
from etude.environments.images import ImageRecord, ImageStore, build_from_directory, default_store
from etude.environments.images.debian import build_from_debian
from etude.environments.images.dockerfile_build import build_from_dockerfile
from etude.environments.images.oci import build_from_oci
from etude.environments.images.repository import build_from_repository
from etude.environments.microvm import build as build_microvm
from etude.environments.microvm import cache_folder
from etude.environments.microvm.packages import MIRRORS
from etude.environments.network.build_network import PACKAGES, build_network_of
from etude.environments.network.packages import Packages, parse_package_spec
from etude.errors import InputError, MachineError, nearest
from etude.records.image import Image
from etude.seams import Runtime


def build(args: argparse.Namespace) -> int:
    """Build an image for machines and print its digest. Returns 0.

    The kind of SOURCE is detected, or given with `--from`."""
    store = ImageStore(args.store or default_store(), keep_setuid=args.keep_setuid)
    kind = args.kind or _kind_of(args.source)
    if kind not in BUILDERS:
        raise InputError(f"images cannot be built from {kind!r}", hint=nearest(kind, BUILDERS))
    record = BUILDERS[kind](store, args)
    if args.name:
        store.name(args.name, record)
    print(f"{record.image.digest}  {record.num_files} files, {size(record.num_bytes)}{_named(args.name)}")
    return 0


def _named(name: str | None) -> str:
    return f", {name}" if name else ""


def _kind_of(source: str) -> str:
    path = Path(source)
    if source == "debian" or source.startswith("debian:"):
        return "debian"
    if path.is_file():
        return "dockerfile" if "dockerfile" in path.name.lower() else "oci"
    marks = {"Dockerfile": "dockerfile", "index.json": "oci", "manifest.json": "oci", ".git": "repository"}
    for mark, kind in marks.items():
        if (path / mark).exists():
            return kind
    if path.is_dir():
        return "directory"
    hint = "give a folder, a Dockerfile, an archive, or debian:SUITE"
    raise InputError(f"nothing at {source}", "it is not the name of a kind of image either", hint=hint)


def _from_directory(store: ImageStore, args: argparse.Namespace) -> ImageRecord:
    return build_from_directory(store, args.source, image=Image(digest="", workdir=args.workdir or "/"))


def _from_repository(store: ImageStore, args: argparse.Namespace) -> ImageRecord:
    workdir = args.workdir or "/testbed"
    return build_from_repository(store, args.source, args.commit, parent=args.parent, workdir=workdir)


def _from_dockerfile(store: ImageStore, args: argparse.Namespace) -> ImageRecord:
    path = Path(args.source)
    context, name = (path.parent, path.name) if path.is_file() else (path, args.file)
    invalid = [text for text in args.arg if "=" not in text]
    if invalid:
        raise InputError(f"--arg {invalid[0]} has no value", hint="write --arg NAME=VALUE")
    given = dict(text.split("=", 1) for text in args.arg)

    async def main() -> ImageRecord:
        runtime: Runtime | None = None
        refused = ""
        try:
            runtime = open_memory_bounded(args.backend, accepts_unbounded=args.unbounded_memory, images=store)
        except MachineError as error:  # only RUN needs a machine, and reports this error
            refused = str(error)
        try:
            return await build_from_dockerfile(
                store,
                context,
                dockerfile=name,
                arguments=given,
                target=args.target,
                runtime=runtime,
                refused=refused,
                outlets=build_network_of(store.path, args.allow),
            )
        finally:
            if runtime is not None:
                await runtime.close()

    return asyncio.run(main())


def _from_oci(store: ImageStore, args: argparse.Namespace) -> ImageRecord:
    return build_from_oci(store, args.source, tag=args.tag)


def _from_debian(store: ImageStore, args: argparse.Namespace) -> ImageRecord:
    suite = args.source.partition(":")[2]
    return build_from_debian(store, suite, args.package, mirror=args.mirror)


BUILDERS: dict[str, Callable[[ImageStore, argparse.Namespace], ImageRecord]] = {
    "directory": _from_directory,
    "repository": _from_repository,
    "dockerfile": _from_dockerfile,
    "oci": _from_oci,
    "debian": _from_debian,
}
"""Kinds of sources, each with the function that builds an image from it."""


def packages(args: argparse.Namespace) -> int:
    """Add packages to the store of images, for RUN instructions of Dockerfiles. Returns 0.

    They are local wheels, and packages fetched from the registries of this host."""
    stored = Packages(ImageStore(args.store or default_store()).path / PACKAGES)
    wheels = [Path(text) for text in args.packages if text.endswith(".whl")]
    requested = [parse_package_spec(text) for text in args.packages if not text.endswith(".whl")]
    for wheel in wheels:
        stored.take(wheel)
    if requested:
        stored.fetch(requested, dependencies=args.dependencies)
    for package in sorted(stored.known, key=lambda package: (package.kind, package.name, package.version)):
        print(f"{package.kind}  {package.name} {package.version}  {size(package.size)}")
    return 0


def _existing_store(given: Path | None) -> ImageStore:
    """Open the image store; never creates one. Raises `InputError`."""
    path = given or default_store()
    if not path.is_dir():
        raise InputError(f"no images in {path}", hint="build one: etude machines image build SOURCE --name NAME")
    return ImageStore(path)


def list_images(args: argparse.Namespace) -> int:
    """Print a line for each image: digest, size, kind of source, names. Returns 0."""
    store = _existing_store(args.store)
    names: dict[str, list[str]] = {}
    for name, digest in store.names().items():
        names.setdefault(digest, []).append(name)
    for record in store.images():
        digest = record.image.digest
        print(f"{digest[:16]}  {size(record.num_bytes):>10}  {record.source:<11} {' '.join(names.get(digest, ['-']))}")
    return 0


def show(args: argparse.Namespace) -> int:
    """Print the record of an image as JSON; with `--verify` verify every file first. Returns 0."""
    record = _existing_store(args.store).get(args.image, verify=args.verify)
    print(msgspec.json.format(msgspec.json.encode(record), indent=2).decode())
    return 0


def remove(args: argparse.Namespace) -> int:
    """Remove a name of an image; an image without a name is deleted. Returns 0."""
    freed = _existing_store(args.store).remove(args.image)
    print(f"deleted, {size(freed)} freed" if freed else "the name is removed; the image has other names")
    return 0


def collect(args: argparse.Namespace) -> int:
    """Delete every image without a name: the cache of earlier builds. Returns 0."""
    num_images, num_bytes = _existing_store(args.store).collect()
    print(f"{num_images} images deleted, {size(num_bytes)} freed")
    return 0


def microvm(args: argparse.Namespace) -> int:
    """Build the guest image of microVMs from Debian packages, unless it exists for the current packages. Returns 0."""
    mirrors = [f"{args.mirror} {args.suite}"] if args.mirror else MIRRORS
    image = build_microvm(args.folder, mirrors=mirrors, log=lambda line: print(line, file=sys.stderr, flush=True))
    print(image.digest)
    print(f"  kernel {image.kernel_release}, in {(args.folder or cache_folder()) / 'microvm'}")
    return 0
