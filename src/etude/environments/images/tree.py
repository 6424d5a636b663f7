"""A root filesystem while it is made: the only code that writes into one.

Every path is reached from the open root by openat2, as that root's own processes would reach it, so neither ``..`` nor
a link, nor one that is swapped meanwhile, leads out. What stood at a path before is replaced, never written through.
Set-user-id bits are dropped unless asked for, devices and extended attributes (file capabilities) are not made at all.

What this process may not set on the disk (another owner, a folder without read permission, when it is not root) is
kept in `declared`, from where it goes into the listing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Collection, Iterable
from functools import partial
from io import FileIO
from typing import Self

from etude.environments.images.limits import BadSource, Budget, ImageLimits, too_large
from etude.environments.images.listing import Owner
from etude.environments.images.openat import open_in

_FICLONE = 0x4004_9409  # an ioctl of linux/fs.h
_CHUNK_BYTES = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
FOLDER_OWNER = Owner(0o755)  # of parents that nobody declared


class Tree:
    """Writes below a folder, named or open, within a budget. Paths are relative to it and mean what they would inside.
    `first` is added to owners: the user that is root there."""

    def __init__(
        self, path: str | os.PathLike[str] | int, limits: ImageLimits, *, keep_setuid: bool = False, first: int = 0
    ) -> None:
        self.root = os.dup(path) if isinstance(path, int) else os.open(path, _FOLDER | os.O_CLOEXEC)
        self._first = first
        self.budget, self.declared = Budget(limits), dict[str, Owner]()
        self._modes = 0o7777 if keep_setuid else 0o1777
        self._last = ("", -1)  # the parent used last, open

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()
        os.close(self.root)

    def folder(self, path: str, owner: Owner = FOLDER_OWNER) -> None:
        """Make a folder, or let the one that is there have this owner."""
        path = plain(path, self.budget.limits)
        if not path:
            self._own(self.root, ".", "", owner)
            return
        parent, name = self._parent(path)
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
            self.budget.take_file()
            real = self._real(parent, name)
            if real.count("/") >= self.budget.limits.depth:  # links on the way may lead deeper than the path says
                os.rmdir(name, dir_fd=parent)
                raise _too_deep(real)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                self.remove(path)
                return self.folder(path, owner)
        self._own(parent, name, self._real(parent, name), owner)

    def file(self, path: str, owner: Owner, chunks: Iterable[bytes]) -> None:
        """Make a file of these bytes in place of whatever is there."""
        parent, name = self._fresh(plain(path, self.budget.limits))
        with _new_file(parent, name) as file:
            self._fill(file, path, chunks)
        self._own(parent, name, self._real(parent, name), owner)

    def copy(self, path: str, owner: Owner, source: int) -> None:
        """Make a file of what an open regular file holds, by cloning it where the filesystem can."""
        size = os.fstat(source).st_size
        self._take(path, 0, size)
        parent, name = self._fresh(plain(path, self.budget.limits))
        with _new_file(parent, name) as file:
            if _clone(source, file.fileno()):
                self._take(path, size, size)
            else:
                self._fill(file, path, iter(partial(os.read, source, _CHUNK_BYTES), b""))
        self._own(parent, name, self._real(parent, name), owner)

    def _fill(self, file: FileIO, path: str, chunks: Iterable[bytes]) -> None:
        size = 0
        for chunk in chunks:
            size += len(chunk)
            self._take(path, len(chunk), size)
            view = memoryview(chunk)
            while view:
                view = view[file.write(view) :]

    def _take(self, path: str, count: int, size: int) -> None:
        self.budget.take_bytes(count)
        if size > self.budget.limits.file_bytes:
            raise too_large(f"{path} has more than {self.budget.limits.file_bytes} bytes", "file_bytes")

    def link(self, path: str, target: str, owner: Owner) -> None:
        """Make a symbolic link in place of whatever is there. Its target means something inside only."""
        path = plain(path, self.budget.limits)
        if not target or "\0" in target or len(os.fsencode(target)) > self.budget.limits.path_bytes:
            raise BadSource(f"{path} links to nothing that can be", repr(target[:80]), hint="mend the source")
        parent, name = self._fresh(path)
        os.symlink(target, name, dir_fd=parent)
        self._own(parent, name, self._real(parent, name), owner._replace(mode=0o777))

    def hard(self, path: str, existing: str) -> None:
        """Make a second name of a file that is in this tree."""
        path, existing = plain(path, self.budget.limits), plain(existing, self.budget.limits)
        source, there = self._parent(existing, keep=False)
        try:
            if path == existing:
                return
            found = _lstat(there, source)
            if found is None or not stat.S_ISREG(found.st_mode):
                raise BadSource(
                    f"{path} is another name of {existing}", "which is no file of it", hint="mend the source"
                )
            parent, name = self._parent(path)
            if _same(_lstat(name, parent), found):
                return
            parent, name = self._fresh(path)
            os.link(there, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
            owner = self.declared.get(self._real(source, there))
            if owner is not None:
                self.declared[self._real(parent, name)] = owner
        finally:
            os.close(source)

    def is_folder(self, path: str) -> bool:
        """Whether a path leads to a folder."""
        try:
            os.close(open_in(self.root, plain(path, self.budget.limits) or ".", _FOLDER, one_mount=True))
        except OSError:
            return False
        return True

    def remove(self, path: str) -> None:
        """Take away a path and everything below it. Nothing there is fine."""
        path = plain(path, self.budget.limits)
        if not path:
            raise BadSource("an archive takes away the whole root", hint="mend the source")
        try:
            parent, name = self._parent(path, make=False)
        except (FileNotFoundError, NotADirectoryError):
            return
        if _lstat(name, parent) is not None:
            real = self._real(parent, name)
            remove_below(parent, name)
            self._undeclare(real)
        self._forget()

    def clear(self, path: str, keep: Collection[str] = ()) -> None:
        """Take away everything below a folder but the paths in `keep`. None there is fine."""
        path = plain(path, self.budget.limits)
        self._forget()
        try:
            fd = self._open(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            for name in os.listdir(fd):
                at = f"{path}/{name}" if path else name
                if at not in keep:
                    real = self._real(fd, name)
                    remove_below(fd, name)
                    self._undeclare(real)
                elif stat.S_ISDIR(os.lstat(name, dir_fd=fd).st_mode):
                    self.clear(at, keep)
        finally:
            os.close(fd)

    def _undeclare(self, path: str) -> None:
        for known in [k for k in self.declared if k == path or k.startswith(f"{path}/")]:
            del self.declared[known]

    def _fresh(self, path: str) -> tuple[int, str]:
        """(open parent, name) of a path where nothing is any more."""
        if not path:
            raise BadSource("an archive replaces the root itself", hint="mend the source")
        self.budget.take_file()
        parent, name = self._parent(path)
        if _lstat(name, parent) is not None:
            self.remove(path)
            parent, name = self._parent(path)
        return parent, name

    def _parent(self, path: str, *, make: bool = True, keep: bool = True) -> tuple[int, str]:
        """(open parent, name); with `keep` the descriptor is this object's, and good until the next call."""
        folder, _, name = path.rpartition("/")
        if keep and folder == self._last[0] and self._last[1] >= 0:
            return self._last[1], name
        try:
            fd = self._open(folder)
        except FileNotFoundError:
            if not make:
                raise
            self.folder(folder)
            fd = self._open(folder)
        except NotADirectoryError:
            if not make:
                raise
            self._make_way(folder)
            return self._parent(path, keep=keep)
        if keep:
            self._forget()
            self._last = (folder, fd)
        return fd, name

    def _open(self, folder: str) -> int:
        """A folder. `BadSource` for links that lead in a circle, or away; else `OSError`, as the kernel says."""
        try:
            return open_in(self.root, folder or ".", _FOLDER, one_mount=True)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EXDEV):
                raise BadSource(f"{folder} leads in a circle, or away", hint="mend the source's links") from None
            raise

    def _make_way(self, folder: str) -> None:
        """Replace the file that stands where a folder has to be."""
        parts = folder.split("/")
        for depth in range(1, len(parts) + 1):
            at = "/".join(parts[:depth])
            try:
                os.close(self._open(at))
            except FileNotFoundError:
                return
            except NotADirectoryError:
                self.remove(at)
                self.folder(at)
                return

    def _forget(self) -> None:
        if self._last[1] >= 0:
            os.close(self._last[1])
        self._last = ("", -1)

    def _real(self, parent: int, name: str) -> str:
        """Where a name in an open folder is, links on the way to it resolved."""
        try:
            at, root = os.readlink(f"/proc/self/fd/{parent}"), os.readlink(f"/proc/self/fd/{self.root}")
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise _too_deep(name) from None
        return f"{at[len(root) :]}/{name}".lstrip("/")

    def _own(self, parent: int, name: str, path: str, owner: Owner) -> None:
        owner = owner._replace(mode=owner.mode & self._modes)
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        link, folder = stat.S_ISLNK(found.st_mode), stat.S_ISDIR(found.st_mode)
        told = True
        if os.geteuid() == 0:
            try:
                os.chown(name, owner.uid + self._first, owner.gid + self._first, dir_fd=parent, follow_symlinks=False)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EINVAL):
                    raise
                told = False
        else:
            told = (owner.uid, owner.gid) == (0, 0)
        if not link:
            needed = 0 if os.geteuid() == 0 else 0o700 if folder else 0o400
            told = told and owner.mode | needed == owner.mode
            os.chmod(name, owner.mode | needed, dir_fd=parent)  # of no link: it was made, or found to be a folder
        self.declared.pop(path, None)
        if not told:
            self.declared[path] = owner


def plain(path: str, limits: ImageLimits) -> str:
    """A path without ``.`` and doubled or leading slashes; "" is the root. `BadSource` for one that climbs, or that no
    filesystem would take.

    >>> plain("./usr//bin/", ImageLimits())
    'usr/bin'
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    shown = path if len(path) < 80 else f"{path[:77]}..."
    if ".." in parts or "\0" in path:
        raise BadSource(f"{shown!r} is not a path inside an image", hint="it climbs out: do not trust this source")
    if len(parts) > limits.depth or any(len(os.fsencode(part)) > 255 for part in parts):
        raise BadSource(f"{shown!r} is too deep or too long", f"{len(parts)} folders", hint="mend the source")
    found = "/".join(parts)
    if len(os.fsencode(found)) > limits.path_bytes:
        raise BadSource(f"{shown!r} is too long", f"more than {limits.path_bytes} bytes", hint="mend the source")
    return found


def _too_deep(path: str) -> BadSource:
    shown = path if len(path) < 80 else f"...{path[-77:]}"
    return BadSource(f"{shown!r} lies too deep", "by the links on the way to it", hint="mend the source's links")


def remove_below(parent: int, name: str) -> None:
    """Delete a path of an open folder, whatever it is, without following a link; folders need not be writable."""
    found = _lstat(name, parent)
    if found is None:
        return
    if not stat.S_ISDIR(found.st_mode):
        os.unlink(name, dir_fd=parent)
        return
    with contextlib.suppress(PermissionError):
        os.chmod(name, 0o700, dir_fd=parent)
    fd = os.open(name, _FOLDER | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        for below in os.listdir(fd):
            remove_below(fd, below)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)


def _new_file(parent: int, name: str) -> FileIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return FileIO(os.open(name, flags, 0o600, dir_fd=parent), "wb")


def _clone(source: int, target: int) -> bool:
    """Let a new file share a source's blocks, copied when written to. False where that cannot be."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        return False
    return True


def _lstat(name: str, parent: int) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=parent)
    except FileNotFoundError:
        return None


def _same(a: os.stat_result | None, b: os.stat_result) -> bool:
    return a is not None and (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
