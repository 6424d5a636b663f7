"""Images of tasks that have a Dockerfile: built before a run starts, and found by name in each of its processes.

An image's name is the digest of its build folder, so that another Dockerfile has another name, and images that runs use
are not garbage-collected."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from etude.environments.images import ImageStore, build_from_dockerfile
from etude.environments.network.build_network import build_network_of
from etude.errors import InputError, TaskError
from etude.records.image import Image
from etude.seams import Runtime
from etude.tasks.harbor import HarborSource
from etude.tasks.text_files import open_no_link, refuse_link

BUILD_S = 1_800.0
_KINDS = {stat.S_IFLNK: "link", stat.S_IFDIR: "folder", stat.S_IFREG: "file"}


async def with_images(
    source: HarborSource, store: ImageStore, runtime: Runtime, on_built: Callable[[str], None] = lambda _: None
) -> HarborSource:
    """Build the images of a source's tasks, and return the source with these images.

    A RUN instruction can reach only the packages that the store has. `on_built` is called with the folder name of each
    task once its image exists. Raises `BadSource`, which names the line."""
    for context in _contexts(source):
        record = await build_from_dockerfile(
            store, context, runtime=runtime, run_deadline_s=BUILD_S, outlets=build_network_of(store.path)
        )
        store.name(_name_of(context), record)
        on_built(context.parent.name)
    return with_built_images(source, store)


def with_built_images(source: HarborSource, store: ImageStore) -> HarborSource:
    """Return the source with the images that `with_images` has built. Raises `TaskError` when one is missing."""
    images: dict[Path, Image] = {}
    for context in _contexts(source):
        try:
            images[context.parent] = store.get(_name_of(context)).image
        except InputError as error:
            hint = f"build it: etude tasks check harbor:{source.path} --images {store.path}"
            raise TaskError(f"the image of {context.parent} is not built", error.what, hint=hint) from None
    return HarborSource(source.path, images.get)


def num_images(source: HarborSource) -> int:
    """Count the tasks with a Dockerfile."""
    return len(_contexts(source))


def _contexts(source: HarborSource) -> list[Path]:
    folders = [folder / "environment" for folder in source.folders()]
    for folder in folders:
        refuse_link(folder)  # a task from another machine could otherwise copy any folder of this host into its image
    return [folder for folder in folders if (folder / "Dockerfile").is_file()]


def _name_of(context: Path) -> str:
    """The name of an image: a digest over path, mode and content of every file; links are not followed. Raises
    `TaskError` for anything that is not a file, folder or link: reading a pipe would block."""
    digest = hashlib.sha256()
    for path in sorted(context.rglob("*")):
        found = path.lstat()
        kind = _KINDS.get(stat.S_IFMT(found.st_mode))
        if kind is None:
            raise TaskError(f"{path} is neither a file nor a folder", hint="take it out of the task's folder")
        data = os.readlink(os.fsencode(path)) if kind == "link" else b""
        size = found.st_size if kind == "file" else len(data)
        head = (path.relative_to(context).as_posix(), kind, found.st_mode & 0o777, size)
        digest.update(repr(head).encode("utf-8", "surrogateescape") + data)
        if kind == "file":
            with open(path, "rb", opener=open_no_link) as file:
                while part := file.read(1 << 20):
                    digest.update(part)
    return f"task/{digest.hexdigest()[:40]}"
