"""A store of images: root filesystems in a directory of this host, named by the digest of their content.

::

    <path>/<digest>/root/         the root filesystem; never modified
    <path>/<digest>/listing       the list of its files (`listing`); its SHA-256 is <digest>
    <path>/<digest>/image.json    the `ImageRecord` of its last build
    <path>/names/<name>           the `ImageRecord` of a named image
    <path>/steps/<key>            the `ImageRecord` after a build step: the build cache
    <path>/building/<random>/     a build in progress, locked by its process; deleted if that process has ended

An image is added and removed by one rename, so it is complete or absent. Images share no inodes, since a write through
a hard link would change every image with the file. On filesystems that can clone files (btrfs, xfs) a copy takes no
space; on others it takes its full size.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from etude.environments.images import listing
from etude.environments.images.limits import ImageLimits
from etude.environments.images.listing import Entry
from etude.environments.images.openat import open_in
from etude.environments.images.records import ImageRecord
from etude.environments.images.tree import Tree, remove_below
from etude.errors import InputError, StoreError, nearest

_DIGEST = re.compile("[0-9a-f]{64}")
_NAME = re.compile("[a-z0-9][a-z0-9._/:@-]{0,127}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_REFUSALS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOENT, errno.EEXIST, errno.ELOOP,
             errno.ENAMETOOLONG)  # fmt: skip


def default_store() -> Path:
    """Return the store's folder for the command line: ``$XDG_DATA_HOME/etude/images`` or
    ``~/.local/share/etude/images``."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "etude" / "images"


class ImageStore:
    """A store of images in the directory `path`, which is created if it does not exist. Several processes can use it.

    `limits` are the size limits of the images built with this object. `keep_setuid` keeps the set-user-id bits of
    sources, which are removed otherwise. Raises `StoreError` if the directory cannot be used."""

    def __init__(
        self, path: str | os.PathLike[str], *, limits: ImageLimits | None = None, keep_setuid: bool = False
    ) -> None:
        self.path, self.limits = Path(path).absolute(), limits if limits is not None else ImageLimits()
        self._keep_setuid = keep_setuid
        with _on_disk(self.path):
            for folder in ("names", "steps", "building"):
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            if self.path.stat().st_mode & 0o777 != 0o700:
                self.path.chmod(0o700)  # images can contain set-user-id programs and secrets
            self._sweep()

    @contextlib.contextmanager
    def new_image(self, parent: str | None = None) -> Iterator[ImageBuild]:
        """Yield the build of a new image, which starts empty or as a copy of the image with digest `parent`.

        Call `ImageBuild.commit` in the `with` block; otherwise the build is deleted at its end. Raises `StoreError` if
        the disk is full or refuses a write."""
        with self.scratch() as folder:
            (folder / "root").mkdir(mode=0o755)
            with Tree(folder / "root", self.limits, keep_setuid=self._keep_setuid) as tree:
                tree.folder("", listing.Owner(0o755))
                if parent is not None:
                    with self.open_root(parent) as source:
                        copy_entries(source, self.listing(parent), tree)
                    tree.budget.num_bytes = tree.budget.num_files = 0
                yield ImageBuild(self, folder, tree, parent)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield an empty temporary folder on the disk of the store, and delete it at the end of the `with` block.

        After a crash it is deleted when a store is opened again. Raises `StoreError` if the disk is full."""
        with _on_disk(self.path, ()):
            folder, lock = self._claim()
            try:
                yield folder
            finally:
                with contextlib.suppress(OSError):  # the rest is deleted by a later `_sweep`
                    _remove(folder)
                os.close(lock)

    def get(self, name: str, *, verify: bool = False) -> ImageRecord:
        """Return the record of the image with this name or digest.

        With `verify`, every file is read and checked, and the error names the first that has changed. Raises
        `InputError` if there is no such image, `StoreError` if it is damaged."""
        digest_only = _DIGEST.fullmatch(name) is not None
        if not digest_only and not _NAME.fullmatch(name):
            raise InputError(f"{name[:80]!r} is not a valid image name", hint="use a-z, 0-9 and . _ / : @ -")
        path = self.path / name / "image.json" if digest_only else self._name_path(name)
        try:
            record = msgspec.json.decode(path.read_bytes(), type=ImageRecord)
        except FileNotFoundError:
            names = self.names()
            hint = nearest(name, names) if names else "it has no images: etude machines image build SOURCE --name NAME"
            raise InputError(f"no image {name!r} in {self.path}", hint=hint) from None
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise StoreError(f"{path} is damaged", str(error), hint="build the image again") from None
        if not self.root(record.image.digest).is_dir():
            raise InputError(f"the files of image {name!r} are missing", record.image.digest, hint="build it again")
        if verify:
            self.verify(record.image.digest)
        return record

    def root(self, digest: str) -> Path:
        """Return the path of the root filesystem of an image, which must not be changed."""
        if not _DIGEST.fullmatch(digest):
            raise InputError(
                f"{digest[:80]!r} is not a digest of an image", hint="list the images: etude machines image list"
            )
        return self.path / digest / "root"

    def listing(self, digest: str) -> list[listing.Entry]:
        """Return the entries of all files of an image. Raises `StoreError` if the listing is damaged."""
        path = self.root(digest).with_name("listing")
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise self._gone(digest) from None
        if listing.digest_of(data) != digest:
            raise StoreError(f"{path} is damaged", "its digest does not match", hint="remove it and build it again")
        return listing.decode(data)

    def verify(self, digest: str) -> None:
        """Read and check every file of an image. Raises `StoreError` that names the first path that has changed."""
        known = {entry.path: entry for entry in self.listing(digest)}
        with self.open_root(digest) as root:
            declared = {} if os.geteuid() == 0 else {path: entry.owner for path, entry in known.items()}
            found = {entry.path: entry for entry in listing.scan(root, declared)}
        for path in sorted(known.keys() | found.keys()):
            if known.get(path) != found.get(path):
                what = "is missing" if path not in found else "was added" if path not in known else "has changed"
                facts = f"{path!r} {what}"
                raise StoreError(f"image {digest[:16]} is damaged", facts, hint="remove it and build it again")

    def find(self, digest: str, contents: Collection[bytes]) -> list[str]:
        """Return the paths of the files of an image whose content equals one of `contents`.

        It is used to check that an image does not contain the answer of a task."""
        wanted = {hashlib.sha256(content).hexdigest() for content in contents}
        return [entry.path for entry in self.listing(digest) if entry.kind == "f" and entry.content in wanted]

    @contextlib.contextmanager
    def open_root(self, digest: str) -> Iterator[int]:
        """Yield a descriptor of the root folder of an image, which cannot be removed during the `with` block.

        Raises `InputError` if there is no such image."""
        with self.in_use(digest):
            fd = os.open(self.root(digest), _FOLDER)
            try:
                yield fd
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def in_use(self, digest: str) -> Iterator[None]:
        """Prevent the removal of an image, by any process, during the `with` block.

        Raises `InputError` if there is no such image."""
        folder = self.root(digest).parent
        try:
            fd = os.open(folder, _FOLDER)
        except FileNotFoundError:
            raise self._gone(digest) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            try:
                same = os.path.samestat(os.fstat(fd), folder.stat())
            except FileNotFoundError:  # removed before it was locked
                raise self._gone(digest) from None
            if not same:  # and built again
                raise self._gone(digest)
            yield
        finally:
            os.close(fd)

    def _gone(self, digest: str) -> InputError:
        return InputError(f"no image {digest[:16]} in {self.path}", hint="build it: etude machines image build")

    def images(self) -> list[ImageRecord]:
        """Return the records of all images, sorted by digest."""
        with _on_disk(self.path):
            digests = sorted(path.name for path in self.path.iterdir() if _DIGEST.fullmatch(path.name))
        found = []
        for digest in digests:
            with contextlib.suppress(InputError):  # removed meanwhile
                found.append(self.get(digest))
        return found

    def names(self) -> dict[str, str]:
        """Return the digest of each named image, by name."""
        found = {}
        for path in sorted((self.path / "names").iterdir()):
            with contextlib.suppress(msgspec.DecodeError, OSError):
                record = msgspec.json.decode(path.read_bytes(), type=ImageRecord)
                found[path.name.replace("%2f", "/")] = record.image.digest
        return found

    def name(self, name: str, record: ImageRecord) -> None:
        """Give a name to an image; if another image has it, the name is moved.

        Raises `InputError` if the name is invalid or the image does not exist."""
        if not _NAME.fullmatch(name) or _DIGEST.fullmatch(name) or name == "scratch":
            hint = "use a-z, 0-9 and . _ / : @ -; neither a digest nor `scratch`"
            raise InputError(f"{name[:80]!r} is not a valid image name", hint=hint)
        with self.in_use(record.image.digest):
            self._write(self._name_path(name), record)

    def cached_step(self, key: str) -> ImageRecord | None:
        """Return the image after the build step with this key; None if it is not cached or its image was removed."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            record = msgspec.json.decode((self.path / "steps" / key).read_bytes(), type=ImageRecord)
            if self.root(record.image.digest).is_dir():
                return record
        return None

    def cache_step(self, key: str, record: ImageRecord) -> None:
        """Store the image after a build step under the step's key."""
        self._write(self.path / "steps" / key, record)

    def remove(self, name: str) -> int:
        """Remove a name of an image, or, given a digest, all names of that image. An image without a name is deleted.

        Returns the number of deleted bytes. Raises `InputError` if the image does not exist or is in use."""
        record = self.get(name)
        digest = record.image.digest
        others = [known for known, meant in self.names().items() if meant == digest and known != name]
        if not _DIGEST.fullmatch(name):
            self._name_path(name).unlink(missing_ok=True)
            if others:
                return 0
        if not self._try_remove(digest, only_unnamed=False):
            raise InputError(f"image {digest[:16]} is in use", hint="close the machines that were made from it")
        for known in others:
            self._name_path(known).unlink(missing_ok=True)
        return record.num_bytes

    def collect(self) -> tuple[int, int]:
        """Delete all images that have no name and are not in use, and their cached build steps.

        Returns the numbers of deleted images and bytes."""
        num_images = num_bytes = 0
        for record in self.images():
            if self._try_remove(record.image.digest, only_unnamed=True):
                num_images, num_bytes = num_images + 1, num_bytes + record.num_bytes
        for path in (self.path / "steps").iterdir():
            if self.cached_step(path.name) is None:
                path.unlink(missing_ok=True)
        self._sweep()
        return num_images, num_bytes

    def _try_remove(self, digest: str, *, only_unnamed: bool) -> bool:
        """Remove an image that is not in use. `only_unnamed`: not if it has a name, checked under the lock. Returns
        whether it is gone."""
        try:
            fd = os.open(self.path / digest, _FOLDER)
        except FileNotFoundError:
            return not only_unnamed
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            if only_unnamed and digest in self.names().values():
                return False
            gone = self.path / "building" / f"{secrets.token_hex(8)}"
            os.rename(self.path / digest, gone)
            _remove(gone)
            return True
        finally:
            os.close(fd)

    def _claim(self) -> tuple[Path, int]:
        while True:
            folder = self.path / "building" / secrets.token_hex(8)
            folder.mkdir(mode=0o700)
            try:
                fd = os.open(folder, _FOLDER)
            except FileNotFoundError:  # swept before it was opened
                continue
            with contextlib.suppress(BlockingIOError, FileNotFoundError):  # swept before it was locked
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), folder.stat()):
                    return folder, fd
            os.close(fd)

    def _sweep(self) -> None:
        for folder in (self.path / "building").iterdir():
            with contextlib.suppress(OSError):
                fd = os.open(folder, _FOLDER)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(folder)
                finally:
                    os.close(fd)

    def _name_path(self, name: str) -> Path:
        return self.path / "names" / name.replace("/", "%2f")

    def _write(self, path: Path, record: ImageRecord) -> None:
        with self.scratch() as folder:
            with open(folder / "record", "xb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(folder / "record", path)


class ImageBuild:
    """An image that is being built; `ImageStore.new_image` makes it. Write its files to `tree`, then call `commit`."""

    def __init__(self, store: ImageStore, folder: Path, tree: Tree, parent: str | None) -> None:
        self.tree, self._store, self._folder, self._parent = tree, store, folder, parent

    def commit(self, record: ImageRecord) -> ImageRecord:
        """Add the image to the store, and return `record` with the image's digest and sizes. Call it once."""
        entries = listing.scan(self.tree.root, self.tree.declared)
        data = listing.encode(entries)
        digest = listing.digest_of(data)
        record = msgspec.structs.replace(
            record,
            image=msgspec.structs.replace(record.image, digest=digest),
            parent=self._parent,
            num_files=len(entries),
            num_bytes=sum(entry.size for entry in entries if entry.kind == "f"),
        )
        (self._folder / "listing").write_bytes(data)
        self._store._write(self._folder / "image.json", record)
        _flush(self._folder)
        while not self._moved_to(self._store.path / digest, record):
            pass
        return record

    def _moved_to(self, folder: Path, record: ImageRecord) -> bool:
        """Move the image to its final place, or find the same image there. False if that was removed meanwhile."""
        try:
            os.rename(self._folder, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            try:
                self._store._write(folder / "image.json", record)
            except FileNotFoundError:
                return False
        return True


def _flush(folder: Path) -> None:
    """Sync the filesystem, so that after a power loss no name points to missing bytes."""
    fd = os.open(folder, _FOLDER)
    try:
        ctypes.CDLL(None).syncfs(fd)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    parent = os.open(path.parent, _FOLDER)
    try:
        remove_below(parent, path.name)
    finally:
        os.close(parent)


@contextlib.contextmanager
def _on_disk(path: Path, refusals: Collection[int] = _REFUSALS) -> Iterator[None]:
    """Convert `OSError` of a full or read-only disk to `StoreError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            hint = "free space (etude machines image collect removes unnamed images), or check the disk"
        elif error.errno in refusals:
            hint = "give this user write access there, or use another folder"
        else:
            raise
        raise StoreError(f"images cannot be stored in {path}", str(error), hint=hint) from None


def copy_entries(source: int, entries: Iterable[Entry], tree: Tree) -> None:
    """Copy the listed entries from the folder with the descriptor `source` into `tree`, with owners and permissions."""
    for entry in sorted(entries, key=lambda e: e.path.count("/") if e.path else -1):
        if entry.kind == "d":
            tree.folder(entry.path, entry.owner)
        elif entry.kind == "l":
            tree.link(entry.path, entry.content, entry.owner)
        else:
            fd = open_in(source, entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, follow=False)
            try:
                tree.copy(entry.path, entry.owner, fd)
            finally:
                os.close(fd)
