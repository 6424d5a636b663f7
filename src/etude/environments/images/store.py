"""Root filesystems on this host, under the digest of their content.

::

    <path>/<digest>/root/         the tree; never written to again
    <path>/<digest>/listing       what it holds (`listing`); its SHA-256 is <digest>
    <path>/<digest>/image.json    the `ImageRecord` of its last build
    <path>/names/<name>           the `ImageRecord` that a name means
    <path>/steps/<key>            the `ImageRecord` that a step of a build led to: its cache
    <path>/building/<random>/     what is being made, locked by its maker; without a holder it is swept

An image appears and disappears by one rename, so it is whole or not there. Two images share no inode: a hard link has
one owner, one mode and one content for all who share it, and one write through it, by whomever, would change every
image with that file while each still had its name. Where the filesystem can clone a file (btrfs, xfs) a copy costs no
space; elsewhere it costs the bytes, and `collect` takes back what no name leads to.
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
    """Where the command line keeps images: ``$XDG_DATA_HOME/etude/images`` or ``~/.local/share/etude/images``."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "etude" / "images"


class ImageStore:
    """Images in a folder, made if it is not there. Safe for several processes at once.

    `limits` hold for what is built through this object. `keep_setuid` keeps set-user-id bits of sources.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, limits: ImageLimits | None = None, keep_setuid: bool = False
    ) -> None:
        self.path, self.limits = Path(path).absolute(), limits if limits is not None else ImageLimits()
        self._keep_setuid = keep_setuid
        with _on_disk(self.path):
            for folder in ("names", "steps", "building"):
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            if self.path.stat().st_mode & 0o777 != 0o700:
                self.path.chmod(0o700)  # set-user-id files and others' secrets are not for everyone on the host
            self._sweep()

    @contextlib.contextmanager
    def building(self, parent: str | None = None) -> Iterator[Building]:
        """A root filesystem to be filled, empty or a copy of an image's; it is gone at the end unless `keep` was
        called. `StoreError` where the disk is full or refuses."""
        with self.scratch() as folder:
            (folder / "root").mkdir(mode=0o755)
            with Tree(folder / "root", self.limits, keep_setuid=self._keep_setuid) as tree:
                tree.folder("", listing.Owner(0o755))
                if parent is not None:
                    with self.opened(parent) as source:
                        copy_entries(source, self.listing(parent), tree)
                    tree.budget.num_bytes = tree.budget.num_files = 0
                yield Building(self, folder, tree, parent)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder on the store's disk, for as long as it is needed; gone afterwards, also when this process is
        killed. `StoreError` where the disk is full."""
        with _on_disk(self.path, ()):
            folder, lock = self._claim()
            try:
                yield folder
            finally:
                with contextlib.suppress(OSError):  # full disk or not, what is left is swept later
                    _remove(folder)
                os.close(lock)

    def get(self, name: str, *, verify: bool = False) -> ImageRecord:
        """The image of this name or digest. `InputError` when there is none; with `verify` every file is read, and
        `StoreError` says which has changed."""
        digest_only = _DIGEST.fullmatch(name) is not None
        if not digest_only and not _NAME.fullmatch(name):
            raise InputError(f"{name[:80]!r} is no image's name", hint="use a-z, 0-9 and . _ / : @ -")
        path = self.path / name / "image.json" if digest_only else self._named(name)
        try:
            record = msgspec.json.decode(path.read_bytes(), type=ImageRecord)
        except FileNotFoundError:
            names = self.names()
            hint = nearest(name, names) if names else "it is empty: etude machines image build SOURCE --name NAME"
            raise InputError(f"no image {name!r} in {self.path}", hint=hint) from None
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise StoreError(f"{path} is damaged", str(error), hint="build the image again") from None
        if not self.root(record.image.digest).is_dir():
            raise InputError(f"the files of image {name!r} are gone", record.image.digest, hint="build it again")
        if verify:
            self.verify(record.image.digest)
        return record

    def root(self, digest: str) -> Path:
        """Where an image's tree is. Not to be written to."""
        if not _DIGEST.fullmatch(digest):
            raise InputError(f"{digest[:80]!r} is no image's digest", hint="etude machines image list")
        return self.path / digest / "root"

    def listing(self, digest: str) -> list[listing.Entry]:
        """What an image holds. `StoreError` when the listing is not the one that the digest names."""
        path = self.root(digest).with_name("listing")
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise self._gone(digest) from None
        if listing.digest_of(data) != digest:
            raise StoreError(f"{path} is damaged", "its digest is another", hint="remove the image, build it again")
        return listing.decode(data)

    def verify(self, digest: str) -> None:
        """Read every file of an image. `StoreError` names the first path that is not what it was."""
        known = {entry.path: entry for entry in self.listing(digest)}
        with self.opened(digest) as root:
            declared = {} if os.geteuid() == 0 else {path: entry.owner for path, entry in known.items()}
            found = {entry.path: entry for entry in listing.scan(root, declared)}
        for path in sorted(known.keys() | found.keys()):
            if known.get(path) != found.get(path):
                what = "is gone" if path not in found else "was added" if path not in known else "has changed"
                facts = f"{path!r} {what}"
                raise StoreError(f"image {digest[:16]} is damaged", facts, hint="remove it and build it again")

    def find(self, digest: str, contents: Collection[bytes]) -> list[str]:
        """Where an image has a file of exactly one of these contents: whether a task's answer lies in it already."""
        wanted = {hashlib.sha256(content).hexdigest() for content in contents}
        return [entry.path for entry in self.listing(digest) if entry.kind == "f" and entry.content in wanted]

    @contextlib.contextmanager
    def opened(self, digest: str) -> Iterator[int]:
        """An image's root as an open folder; it cannot be removed meanwhile."""
        with self.held(digest):
            fd = os.open(self.root(digest), _FOLDER)
            try:
                yield fd
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def held(self, digest: str) -> Iterator[None]:
        """Keep an image from being removed, by any process, as long as this lasts."""
        folder = self.root(digest).parent
        try:
            fd = os.open(folder, _FOLDER)
        except FileNotFoundError:
            raise self._gone(digest) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            try:
                same = os.path.samestat(os.fstat(fd), folder.stat())
            except FileNotFoundError:  # taken away before it was locked
                raise self._gone(digest) from None
            if not same:  # and built again
                raise self._gone(digest)
            yield
        finally:
            os.close(fd)

    def _gone(self, digest: str) -> InputError:
        return InputError(f"no image {digest[:16]} in {self.path}", hint="build it: etude machines image build")

    def images(self) -> list[ImageRecord]:
        """Every image that is there, by digest."""
        with _on_disk(self.path):
            digests = sorted(path.name for path in self.path.iterdir() if _DIGEST.fullmatch(path.name))
        found = []
        for digest in digests:
            with contextlib.suppress(InputError):  # taken away meanwhile
                found.append(self.get(digest))
        return found

    def names(self) -> dict[str, str]:
        """Digest by name."""
        found = {}
        for path in sorted((self.path / "names").iterdir()):
            with contextlib.suppress(msgspec.DecodeError, OSError):
                record = msgspec.json.decode(path.read_bytes(), type=ImageRecord)
                found[path.name.replace("%2f", "/")] = record.image.digest
        return found

    def name(self, name: str, record: ImageRecord) -> None:
        """Let a name mean this image, in place of what it meant. `InputError` for an image that is not there."""
        if not _NAME.fullmatch(name) or _DIGEST.fullmatch(name) or name == "scratch":
            hint = "use a-z, 0-9 and . _ / : @ -; neither a digest nor `scratch`"
            raise InputError(f"{name[:80]!r} cannot be an image's name", hint=hint)
        with self.held(record.image.digest):
            self._write(self._named(name), record)

    def step(self, key: str) -> ImageRecord | None:
        """Where this step of a build led, when it was taken before and the image is still there."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            record = msgspec.json.decode((self.path / "steps" / key).read_bytes(), type=ImageRecord)
            if self.root(record.image.digest).is_dir():
                return record
        return None

    def keep_step(self, key: str, record: ImageRecord) -> None:
        """Remember where a step of a build led."""
        self._write(self.path / "steps" / key, record)

    def remove(self, name: str) -> int:
        """Take away a name, or a digest with all its names; the files go with the last name. Returns their bytes.
        `InputError` for one that is in use."""
        record = self.get(name)
        digest = record.image.digest
        others = [known for known, meant in self.names().items() if meant == digest and known != name]
        if not _DIGEST.fullmatch(name):
            self._named(name).unlink(missing_ok=True)
            if others:
                return 0
        if not self._take_away(digest, but_named=False):
            raise InputError(f"image {digest[:16]} is in use", hint="close the machines that were made from it")
        for known in others:
            self._named(known).unlink(missing_ok=True)
        return record.num_bytes

    def collect(self) -> tuple[int, int]:
        """Remove every image without a name that nobody uses, and the steps that led there. (images, bytes)"""
        num_images = num_bytes = 0
        for record in self.images():
            if self._take_away(record.image.digest, but_named=True):
                num_images, num_bytes = num_images + 1, num_bytes + record.num_bytes
        for path in (self.path / "steps").iterdir():
            if self.step(path.name) is None:
                path.unlink(missing_ok=True)
        self._sweep()
        return num_images, num_bytes

    def _take_away(self, digest: str, *, but_named: bool) -> bool:
        """Remove an image that nobody holds; `but_named`: nor names, asked when nobody can name it any more."""
        try:
            fd = os.open(self.path / digest, _FOLDER)
        except FileNotFoundError:
            return not but_named
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            if but_named and digest in self.names().values():
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

    def _named(self, name: str) -> Path:
        return self.path / "names" / name.replace("/", "%2f")

    def _write(self, path: Path, record: ImageRecord) -> None:
        with self.scratch() as folder:
            with open(folder / "record", "xb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(folder / "record", path)


class Building:
    """A root filesystem that is being made: fill `tree`, then `keep` it."""

    def __init__(self, store: ImageStore, folder: Path, tree: Tree, parent: str | None) -> None:
        self.tree, self._store, self._folder, self._parent = tree, store, folder, parent

    def keep(self, record: ImageRecord) -> ImageRecord:
        """Make it an image; returns the record with its digest and sizes. Called once, at the end."""
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
        while not self._is_there(self._store.path / digest, record):
            pass
        return record

    def _is_there(self, folder: Path, record: ImageRecord) -> bool:
        """Put it in its place, or find the same bytes there; False where those were taken away meanwhile."""
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
    """A name must not outlive the bytes it names when the power goes."""
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
    """What the disk refuses is told in three parts."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            hint = "make room (etude machines image collect removes what has no name), or look at the disk"
        elif error.errno in refusals:
            hint = "give this user write access there, or name another folder"
        else:
            raise
        raise StoreError(f"no image can be kept in {path}", str(error), hint=hint) from None


# ----------------------------------------------------------------------------------------------- one tree into another


def copy_entries(source: int, entries: Iterable[Entry], tree: Tree) -> None:
    """Make what `entries` list of the tree in the open folder `source`, owners and permissions included."""
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
