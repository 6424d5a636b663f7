"""Write into a root filesystem safely. No other code writes into one.

Paths are opened from the root folder by openat2, as processes with that root would see them. So neither ``..`` nor a
link leads out of it, even if a link is replaced meanwhile. An existing file is replaced, never written through.
Set-user-id bits are removed unless requested. Devices and extended attributes (file capabilities) are never created.

Owners and permissions that an unprivileged process cannot set on disk are recorded in `Tree.declared`, and from there
in the listing of the image.
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
FOLDER_OWNER = Owner(0o755)  # of parent folders that the source does not list


class Tree:
    """Writes files, folders and links below a folder, within size limits. All paths are relative to that folder.

    `path` is the folder or its descriptor. `keep_setuid` keeps set-user-id bits. `first` is the user id on this host
    that is root inside; it is added to all owners. It is a context manager, which closes the folder at its end. Methods
    raise `BadSource` for invalid paths and over the limits."""

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
        self._close_parent()
        os.close(self.root)

    def folder(self, path: str, owner: Owner = FOLDER_OWNER) -> None:
        """Make a folder, or set the owner of an existing one. A file or link at `path` is replaced."""
        path = normalize_path(path, self.budget.limits)
        if not path:
            self._set_owner(self.root, ".", "", owner)
            return
        parent, name = self._parent(path)
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
            self.budget.take_file()
            real = self._real(parent, name)
            if real.count("/") >= self.budget.limits.depth:  # through links it can be deeper than its path
                os.rmdir(name, dir_fd=parent)
                raise _too_deep(real)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                self.remove(path)
                return self.folder(path, owner)
        self._set_owner(parent, name, self._real(parent, name), owner)

    def file(self, path: str, owner: Owner, chunks: Iterable[bytes]) -> None:
        """Write a file from chunks of bytes, replacing what exists at `path`."""
        parent, name = self._make_free(normalize_path(path, self.budget.limits))
        with _new_file(parent, name) as file:
            self._fill(file, path, chunks)
        self._set_owner(parent, name, self._real(parent, name), owner)

    def copy(self, path: str, owner: Owner, source: int) -> None:
        """Copy the file with the descriptor `source` to `path`, sharing its blocks if the filesystem can."""
        size = os.fstat(source).st_size
        self._take(path, 0, size)
        parent, name = self._make_free(normalize_path(path, self.budget.limits))
        with _new_file(parent, name) as file:
            if _clone(source, file.fileno()):
                self._take(path, size, size)
            else:
                self._fill(file, path, iter(partial(os.read, source, _CHUNK_BYTES), b""))
        self._set_owner(parent, name, self._real(parent, name), owner)

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
        """Make a symbolic link to `target`, replacing what exists at `path`.

        An absolute target starts at this tree's root."""
        path = normalize_path(path, self.budget.limits)
        if not target or "\0" in target or len(os.fsencode(target)) > self.budget.limits.path_bytes:
            raise BadSource(
                f"{path} is a link with an invalid target",
                repr(target[:80]),
                hint="correct this path in the image's source, then build again",
            )
        parent, name = self._make_free(path)
        os.symlink(target, name, dir_fd=parent)
        self._set_owner(parent, name, self._real(parent, name), owner._replace(mode=0o777))

    def hard_link(self, path: str, existing: str) -> None:
        """Make a hard link at `path` to the file `existing` of this tree. Raises `BadSource` if that is no file."""
        path, existing = normalize_path(path, self.budget.limits), normalize_path(existing, self.budget.limits)
        source, there = self._parent(existing, keep=False)
        try:
            if path == existing:
                return
            found = _lstat(there, source)
            if found is None or not stat.S_ISREG(found.st_mode) or path.startswith(f"{existing}/"):
                raise BadSource(
                    f"the hard link {path} is invalid",
                    f"its target {existing} is not a file",
                    hint="correct this path in the image's source, then build again",
                )
            if existing.startswith(f"{path}/"):
                raise BadSource(
                    f"the hard link {path} is invalid",
                    f"it would replace the folder of its target {existing}",
                    hint="correct this path in the image's source, then build again",
                )
            parent, name = self._parent(path)
            if _same(_lstat(name, parent), found):
                return
            parent, name = self._make_free(path)
            os.link(there, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
            owner = self.declared.get(self._real(source, there))
            if owner is not None:
                self.declared[self._real(parent, name)] = owner
        finally:
            os.close(source)

    def is_folder(self, path: str) -> bool:
        """Return whether a path is a folder or a link to one."""
        try:
            os.close(open_in(self.root, normalize_path(path, self.budget.limits) or ".", _FOLDER, one_mount=True))
        except OSError:
            return False
        return True

    def remove(self, path: str) -> None:
        """Delete a path and everything below it. Does nothing if it does not exist."""
        path = normalize_path(path, self.budget.limits)
        if not path:
            raise BadSource(
                "the archive deletes the root folder",
                hint="remove this entry from the image's source, then build again",
            )
        try:
            parent, name = self._parent(path, make=False)
        except (FileNotFoundError, NotADirectoryError):
            return
        if _lstat(name, parent) is not None:
            real = self._real(parent, name)
            remove_below(parent, name)
            self._undeclare(real)
        self._close_parent()

    def clear(self, path: str, keep: Collection[str] = ()) -> None:
        """Delete everything below the folder `path` except the paths in `keep`. Does nothing if it does not exist."""
        path = normalize_path(path, self.budget.limits)
        self._close_parent()
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

    def _make_free(self, path: str) -> tuple[int, str]:
        """Delete what exists at a path. Returns the descriptor of its parent folder, and its name."""
        if not path:
            raise BadSource(
                "the archive replaces the root folder by a file or link",
                hint="make the root a folder in the image's source, then build again",
            )
        self.budget.take_file()
        parent, name = self._parent(path)
        if _lstat(name, parent) is not None:
            self.remove(path)
            parent, name = self._parent(path)
        return parent, name

    def _parent(self, path: str, *, make: bool = True, keep: bool = True) -> tuple[int, str]:
        """Return the descriptor of the parent folder of a path, and its name. `make`: create missing parents. `keep`:
        the descriptor belongs to this object and is valid until the next call; else the caller must close it."""
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
            self._replace_by_folder(folder)
            return self._parent(path, keep=keep)
        if keep:
            self._close_parent()
            self._last = (folder, fd)
        return fd, name

    def _open(self, folder: str) -> int:
        """Open a folder. Raises `BadSource` for circular links and other mounts, else the `OSError` of the kernel."""
        try:
            return open_in(self.root, folder or ".", _FOLDER, one_mount=True)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EXDEV):
                raise BadSource(f"{folder} is a circular link or a mount", hint="fix the links of the source") from None
            raise

    def _replace_by_folder(self, folder: str) -> None:
        """Replace the file on the way to `folder` by a folder."""
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

    def _close_parent(self) -> None:
        if self._last[1] >= 0:
            os.close(self._last[1])
        self._last = ("", -1)

    def _real(self, parent: int, name: str) -> str:
        """Return the path of a name in an open folder, with all links on the way resolved."""
        try:
            at, root = os.readlink(f"/proc/self/fd/{parent}"), os.readlink(f"/proc/self/fd/{self.root}")
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise _too_deep(name) from None
        return f"{at[len(root) :]}/{name}".lstrip("/")

    def _set_owner(self, parent: int, name: str, path: str, owner: Owner) -> None:
        owner = owner._replace(mode=owner.mode & self._modes)
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        link, folder = stat.S_ISLNK(found.st_mode), stat.S_ISDIR(found.st_mode)
        on_disk = True
        if os.geteuid() == 0:
            try:
                os.chown(name, owner.uid + self._first, owner.gid + self._first, dir_fd=parent, follow_symlinks=False)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EINVAL):
                    raise
                on_disk = False
        else:
            on_disk = (owner.uid, owner.gid) == (0, 0)
        if not link:
            needed = 0 if os.geteuid() == 0 else 0o700 if folder else 0o400
            on_disk = on_disk and owner.mode | needed == owner.mode
            os.chmod(name, owner.mode | needed, dir_fd=parent)  # never a link here: it was just created, or is a folder
        self.declared.pop(path, None)
        if not on_disk:
            self.declared[path] = owner


def normalize_path(path: str, limits: ImageLimits) -> str:
    """Return a path without ``.``, double slashes and leading slashes; "" is the root.

    Raises `BadSource` for a path with ``..`` or a zero byte, and for one over the limits or too long for a filesystem.

    >>> normalize_path("./usr//bin/", ImageLimits())
    'usr/bin'
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    shown = path if len(path) < 80 else f"{path[:77]}..."
    if ".." in parts or "\0" in path:
        raise BadSource(
            f"{shown!r} is not a path inside an image",
            "it contains '..' or a zero byte",
            hint="the source may be hostile: do not use it",
        )
    if len(parts) > limits.depth or any(len(os.fsencode(part)) > 255 for part in parts):
        raise BadSource(
            f"{shown!r} is too deep or too long",
            f"{len(parts)} parts; at most {limits.depth}, of 255 bytes each",
            hint="shorten the path in the source",
        )
    found = "/".join(parts)
    if len(os.fsencode(found)) > limits.path_bytes:
        raise BadSource(
            f"{shown!r} is too long",
            f"more than {limits.path_bytes} bytes",
            hint="correct this path in the image's source, then build again",
        )
    return found


def _too_deep(path: str) -> BadSource:
    shown = path if len(path) < 80 else f"...{path[-77:]}"
    return BadSource(f"{shown!r} is too deep", "because of links on the way to it", hint="fix the links of the source")


def remove_below(parent: int, name: str) -> None:
    """Delete the entry `name` of the folder with the descriptor `parent`, and everything below it.

    Links are not followed. Folders without write permission are made writable first."""
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
    """Clone a file: both share their blocks until one is written. False if the filesystem cannot."""
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
