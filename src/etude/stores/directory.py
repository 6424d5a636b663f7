"""A blob store in a directory, for one machine or for machines that share a filesystem.

An object is written to a temporary file in ``.tmp``, synced, and renamed into place under the lock of the store. So an
object is complete or absent. After a crash at most a temporary file is left, which a later start deletes. A pointer is
replaced in the same way, after its old bytes were compared under the same lock. Readers need no lock, since a rename is
atomic. obstore's LocalStore is not used because it has no conditional update."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from etude.errors import StoreError
from etude.stores.keys import check_key, check_prefix, check_range, is_key

LOCK_DEADLINE_S = 30.0
STRAY_AFTER_S = 3600.0
_POLL_S = 0.002
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_HINTS = {
    errno.ENOSPC: "the disk is full: free space and try again; nothing half-written was left",
    errno.EDQUOT: "the disk quota is used up: free space and try again; nothing half-written was left",
    errno.EFBIG: "the process's file size limit (ulimit -f) is too small",
    errno.EACCES: "give the user that runs this write access to the directory",
    errno.EPERM: "give the user that runs this write access to the directory",
    errno.EROFS: "the filesystem is mounted read-only",
    errno.ENOTDIR: "a parent path of the key is already an object: choose another key",
    errno.EEXIST: "a parent path of the key is already an object: choose another key",
    errno.EISDIR: "the key is already a prefix of other keys: choose another key",
}


class DirectoryStore:
    """A `BlobStore` in the directory `root`. Safe for many threads and processes at once.

    The directory is created if it does not exist. With `readonly` it must exist, and nothing is created or written in
    it. Raises `StoreError` if it cannot be opened.

    `root` can be a symbolic link. Links below it are never followed and are not listed, so no key leads out of `root`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = DirectoryStore(folder)
    ...     store.put("objects/a", b"hello")
    ...     store.list("objects/")
    ['objects/a']
    """

    def __init__(self, root: Path | str, *, readonly: bool = False) -> None:
        self.root, self.readonly = Path(root), readonly
        self._temporary = self.root / ".tmp"
        self._lock_path = self.root / ".lock"
        self._must_exist = self._temporary if not readonly or self._temporary.is_dir() else self.root
        if readonly:
            self._require_root()
            return
        with _as_store_error(f"store {self.root} cannot be opened"):
            self._temporary.mkdir(parents=True, exist_ok=True)
            self._sweep()

    def put(self, key: str, data: bytes) -> None:
        """Write an immutable object. It is on disk when this returns.

        Raises `StoreError` if the key exists with different bytes, the disk is full, or access is denied."""
        self._require_writable()
        check_key(key)
        with _as_store_error(f"object {key!r} cannot be written"):
            found = self._read(key)
            if found is None:
                with self._temporary_file(data) as temporary, self._locked():
                    found = self._read(key)
                    if found is None:
                        self._install(temporary, key)
                        return
            if found == data:
                with self._folder_of(key) as (folder, _):
                    os.fsync(folder)  # another writer may have renamed it a moment ago
                return
        raise StoreError(
            f"object {key!r} already exists with other content",
            f"it has {len(found)} bytes, the new data {len(data)}",
            hint="an object cannot be overwritten: use another key, such as the SHA-256 of the data",
        )

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of an object or a pointer, as far as they exist. `stop` None: up to its end.

        Raises `KeyError` if the key does not exist, `StoreError` if the disk fails or the directory is gone."""
        check_range(start, stop)
        check_key(key)
        with _as_store_error(f"object {key!r} cannot be read"):
            found = self._read(key, start, stop)
        if found is None:
            self._require_root()
            raise KeyError(key)
        return found

    def list(self, prefix: str) -> list[str]:
        """Return the sorted keys that start with `prefix`.

        Reads only the directory that the prefix ends in, and those below it. Raises `StoreError` if the prefix is
        invalid, the disk fails or the directory is gone."""
        check_prefix(prefix)
        keys: list[str] = []
        with (
            _as_store_error(f"keys under {prefix!r} cannot be listed"),
            suppress(FileNotFoundError, NotADirectoryError),
            self._folder_of(prefix) as (folder, _),
        ):
            keys = sorted(key for key in _keys(folder, prefix.rpartition("/")[0]) if key.startswith(prefix))
        if not keys:
            self._require_root()
        return keys

    def delete(self, key: str) -> None:
        """Delete an object. Do nothing if it does not exist. Raises `StoreError` if the disk refuses."""
        self._require_writable()
        check_key(key)
        with (
            _as_store_error(f"object {key!r} cannot be deleted"),
            suppress(FileNotFoundError, NotADirectoryError),
            self._folder_of(key) as (folder, name),
        ):
            os.unlink(name, dir_fd=folder)
            os.fsync(folder)

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Replace the bytes of a pointer atomically if they equal `expected`. Return whether they were replaced.

        With `expected` None the pointer must not exist, and is created. Raises `StoreError` if the disk refuses."""
        self._require_writable()
        check_key(key)
        with _as_store_error(f"pointer {key!r} cannot be moved"):
            if self._read(key) != expected:
                return False
            with self._temporary_file(data) as temporary, self._locked():
                if self._read(key) != expected:
                    return False
                self._install(temporary, key)
                return True

    def _require_root(self) -> None:
        """Raise `StoreError` if the directory of the store is gone, so that its objects are not reported as missing."""
        if (
            not self._must_exist.is_dir()
        ):  # after an unmount the mount point still exists, so `root` alone proves nothing
            raise StoreError(
                f"the store {self.root} is gone",
                f"there is no directory {self._must_exist}",
                hint="mount it again, or name the directory where it is now",
            )

    def _require_writable(self) -> None:
        if self.readonly:
            raise StoreError(f"the store {self.root} was opened read-only", hint="open it without `readonly` to write")

    @contextmanager
    def _folder_of(self, key: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Open the directory of a key. Yields its file descriptor and the file name of the key.

        `make`: create missing directories durably. Raises `StoreError` at a symbolic link, and the system's `OSError`.
        """
        *parts, name = key.split("/")
        at = os.open(self.root, _FOLDER)
        try:
            for number, part in enumerate(parts, start=1):
                try:
                    below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
                except FileNotFoundError:
                    if not make:
                        raise
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=at)
                    os.fsync(at)
                    below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
                except OSError:
                    if stat.S_ISLNK(os.lstat(part, dir_fd=at).st_mode):
                        raise self._link_error("/".join(parts[:number])) from None
                    raise
                os.close(at)
                at = below
            yield at, name
        finally:
            os.close(at)

    def _link_error(self, path: str) -> StoreError:
        return StoreError(
            f"{self.root / path} is a link",
            "links below a store's directory are not followed",
            hint="mount the other directory there, or let the store's own directory be the link",
        )

    def _read(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Read an object; None if it does not exist. Raises the system's `OSError`, and `StoreError` for a link."""
        with suppress(FileNotFoundError, NotADirectoryError), self._folder_of(key) as (folder, name):
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise self._link_error(key) from None
                raise
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                return None
            with open(fd, "rb") as file:
                size = os.fstat(fd).st_size  # `read` allocates the requested size first, so limit it to the file
                start = min(start, size)
                file.seek(start)
                return file.read(-1 if stop is None else min(stop, size) - start)
        return None

    @contextmanager
    def _temporary_file(self, data: bytes) -> Iterator[Path]:
        """Write and sync a temporary file. It is deleted at the end unless the caller has renamed it."""
        path = self._temporary / f"{os.getpid()}-{secrets.token_hex(8)}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(file, view) :]
                os.fsync(file)
            finally:
                os.close(file)
            yield path
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the store, for a check and a rename. Raises `StoreError` after `LOCK_DEADLINE_S`."""
        file = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            deadline = time.monotonic() + LOCK_DEADLINE_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StoreError(
                            f"lock {self._lock_path} was not free within {LOCK_DEADLINE_S:.0f} s",
                            hint="another process holds it: `fuser` on that file names it",
                        ) from None
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(file)

    def _install(self, temporary: Path, key: str) -> None:
        with self._folder_of(key, make=True) as (folder, name):
            os.rename(temporary, name, dst_dir_fd=folder)
            os.fsync(folder)

    def _sweep(self) -> None:
        """Delete temporary files that killed writers left, once they are `STRAY_AFTER_S` old."""
        for stray in self._temporary.iterdir():
            with suppress(FileNotFoundError):
                if time.time() - stray.stat().st_mtime > STRAY_AFTER_S:
                    stray.unlink()


@contextmanager
def _as_store_error(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "check the disk and its mount; the store is unchanged")
        raise StoreError(what, f"{error.strerror}", hint=hint) from error


def _keys(folder: int, at: str) -> Iterator[str]:
    """Yield the keys below an open directory; `at` is the key path of that directory."""
    with os.scandir(folder) as entries:
        for entry in entries:
            key = f"{at}/{entry.name}" if at else entry.name
            if not is_key(key):
                continue
            if entry.is_file(follow_symlinks=False):
                yield key
            elif entry.is_dir(follow_symlinks=False):
                with suppress(FileNotFoundError, NotADirectoryError):  # gone meanwhile
                    below = os.open(entry.name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
                    try:
                        yield from _keys(below, key)
                    finally:
                        os.close(below)
