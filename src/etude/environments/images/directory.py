"""Build an image from a folder of this host, and copy folders into a tree."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from etude.environments.images.limits import BadSource
from etude.environments.images.listing import Owner, walk
from etude.environments.images.openat import open_in
from etude.environments.images.records import ImageRecord
from etude.environments.images.store import ImageStore
from etude.environments.images.tree import Tree
from etude.records.image import Image


def build_from_directory(
    store: ImageStore, source: str | os.PathLike[str], *, image: Image | None = None
) -> ImageRecord:
    """Build an image from the content of a folder.

    All files belong to root; permissions and links are kept. `image` has the settings of the new image (working
    directory, environment, user); its digest is ignored. Raises `BadSource` for sockets, pipes and devices.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as at:
    ...     _ = Path(at, "src").mkdir(), Path(at, "src/hello").write_text("hi")
    ...     build_from_directory(ImageStore(f"{at}/images"), f"{at}/src").num_files
    2
    """
    path = Path(source)
    if not path.is_dir():
        raise BadSource(f"no folder at {path}", hint="name a folder with a root filesystem")
    with store.new_image() as building, open_folder(path) as root:
        copy_folder(root, "", building.tree, "")
        settings = image if image is not None else Image(digest="")
        return building.commit(ImageRecord(image=settings, source="directory", made=(f"folder {path.name}",)))


@contextlib.contextmanager
def open_folder(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open a folder of this host and yield its file descriptor, which is closed at the end of the `with` block.

    Raises `BadSource` if it cannot be opened."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BadSource(f"{path} cannot be read", str(error.strerror), hint="name a readable folder") from None
    try:
        yield fd
    finally:
        os.close(fd)


def copy_folder(
    root: int,
    at: str,
    tree: Tree,
    to: str,
    *,
    skip: Callable[[str], bool] = lambda path: False,
    owner: Callable[[os.stat_result], Owner] | None = None,
) -> None:
    """Copy the content of a folder into the folder `to` of a tree.

    The source is the folder `at` below the folder with the descriptor `root`. `skip` gets each path relative to `root`
    and returns whether to leave it out. `owner` gets the stat result of each file and returns the owner of its copy; by
    default all copies belong to root. Raises `BadSource` for unreadable files, sockets, pipes and devices."""
    whose = owner if owner is not None else root_owned
    for path, found, folder, name in walk_at(root, at, skip):
        target = f"{to}/{path}" if path else to
        try:
            copy_one(found, folder, name, tree, target, whose(found))
        except PermissionError as error:
            raise BadSource(f"{at}/{path} cannot be read", str(error.strerror), hint="make it readable") from None


def walk_at(
    root: int, at: str, skip: Callable[[str], bool] = lambda path: False
) -> Iterator[tuple[str, os.stat_result, int, str]]:
    """Yield the folder `at` below the folder with the descriptor `root`, and everything in it, as `listing.walk` does.

    `skip` gets paths relative to `root`."""
    fd = open_in(root, at or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield from walk(fd, lambda below: skip(f"{at}/{below}" if at else below))
    finally:
        os.close(fd)


def copy_one(found: os.stat_result, folder: int, name: str, tree: Tree, target: str, owner: Owner) -> None:
    """Copy one file, link or folder to the path `target` of a tree. A folder is copied without its content.

    The source is the entry `name` of the folder with the descriptor `folder`, and `found` is its lstat result. Raises
    `BadSource` for sockets, pipes and devices."""
    if stat.S_ISDIR(found.st_mode):
        tree.folder(target, owner)
    elif stat.S_ISLNK(found.st_mode):
        tree.link(target, os.readlink(name, dir_fd=folder), owner)
    elif stat.S_ISREG(found.st_mode):
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            tree.copy(target, owner, fd)
        finally:
            os.close(fd)
    else:
        raise BadSource(
            f"{target} is a device, a pipe or a socket", hint="images cannot have any: remove it, or leave it out"
        )


def root_owned(found: os.stat_result) -> Owner:
    """Return an `Owner` with the user root and the permissions in `found`."""
    return Owner(stat.S_IMODE(found.st_mode))
