"""A blob store in a directory: what a laptop, or machines that share a filesystem, use.

An object is written beside (``.tmp``), synced, and renamed into place under the store's lock, so it is there whole or
not at all, and a crash leaves at most a stray temporary file, which a later start sweeps. A pointer moves in the same
way after its old bytes were compared under the same lock. Readers take no lock: a rename is atomic. obstore's
LocalStore has no conditional update, which is why this is ours. Knows nothing of what the bytes mean.
"""

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
    errno.ENOTDIR: "a part of the key is already an object: choose another key",
    errno.EEXIST: "a part of the key is already an object: choose another key",
    errno.EISDIR: "the key is already a prefix of others: choose another key",
}


class DirectoryStore:
    """A `BlobStore` under `root`, which is made if it is not there. Any number of processes may use it at once.

    `readonly`: nothing is made, swept or written; `root` must be there. Raises `StoreError`.

    `root` may be a link. Links below it are no objects, and none is followed: keys lead nowhere else.

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
        self._mark = self._temporary if not readonly or self._temporary.is_dir() else self.root
        if readonly:
            self._require_root()
            return
        with _named(f"store {self.root} cannot be opened"):
            self._temporary.mkdir(parents=True, exist_ok=True)
            self._sweep()

    def put(self, key: str, data: bytes) -> None:
        """Durable when it returns. Raises `StoreError`: other bytes under the key, no space, no permission."""
        self._require_writable()
        check_key(key)
        with _named(f"object {key!r} cannot be written"):
            held = self._read(key)
            if held is None:
                with self._written(data) as temporary, self._locked():
                    held = self._read(key)
                    if held is None:
                        self._install(temporary, key)
                        return
            if held == data:
                with self._folder_of(key) as (folder, _):
                    os.fsync(folder)  # another writer may have renamed it a moment ago
                return
        raise StoreError(
            f"object {key!r} exists with other bytes",
            f"it has {len(held)} bytes, these are {len(data)}",
            hint="objects are immutable: choose a key from the content",
        )

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes [start, stop), fewer at the end. Raises `KeyError`, `StoreError`: the disk refuses, or is gone."""
        check_range(start, stop)
        check_key(key)
        with _named(f"object {key!r} cannot be read"):
            held = self._read(key, start, stop)
        if held is None:
            self._require_root()
            raise KeyError(key)
        return held

    def list(self, prefix: str) -> list[str]:
        """Sorted keys that start with `prefix`. Walks only the directory the prefix ends in. Raises `StoreError`."""
        check_prefix(prefix)
        keys: list[str] = []
        with (
            _named(f"keys under {prefix!r} cannot be listed"),
            suppress(FileNotFoundError, NotADirectoryError),
            self._folder_of(prefix) as (folder, _),
        ):
            keys = sorted(key for key in _keys(folder, prefix.rpartition("/")[0]) if key.startswith(prefix))
        if not keys:
            self._require_root()
        return keys

    def delete(self, key: str) -> None:
        """Remove an object; no error when it is not there. Raises `StoreError`."""
        self._require_writable()
        check_key(key)
        with (
            _named(f"object {key!r} cannot be deleted"),
            suppress(FileNotFoundError, NotADirectoryError),
            self._folder_of(key) as (folder, name),
        ):
            os.unlink(name, dir_fd=folder)
            os.fsync(folder)

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Atomically replace a pointer's bytes if they are `expected` (None: absent). Raises `StoreError`."""
        self._require_writable()
        check_key(key)
        with _named(f"pointer {key!r} cannot be moved"):
            if self._read(key) != expected:
                return False
            with self._written(data) as temporary, self._locked():
                if self._read(key) != expected:
                    return False
                self._install(temporary, key)
                return True

    def _require_root(self) -> None:
        """What was not found is missing only where the store is there. Raises `StoreError`."""
        if not self._mark.is_dir():  # a mount point outlives what was mounted there
            raise StoreError(
                f"the store {self.root} is gone",
                f"there is no directory {self._mark}",
                hint="mount it again, or name the directory where it is now",
            )

    def _require_writable(self) -> None:
        if self.readonly:
            raise StoreError(
                f"the store {self.root} was opened to be read", hint="open it without `readonly` to write into it"
            )

    @contextmanager
    def _folder_of(self, key: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The open folder of a key, and the key's name in it. Follows no link: `StoreError` names the one it meets.
        `make`: missing folders are made, durably. Else `OSError`, as the system says."""
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
                        raise self._linked("/".join(parts[:number])) from None
                    raise
                os.close(at)
                at = below
            yield at, name
        finally:
            os.close(at)

    def _linked(self, path: str) -> StoreError:
        return StoreError(
            f"{self.root / path} is a link",
            "links below a store's directory are not followed",
            hint="mount the other directory there, or let the store's own directory be the link",
        )

    def _read(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """The bytes of an object, None where there is none. `OSError` as the system says, `StoreError` for a link."""
        with suppress(FileNotFoundError, NotADirectoryError), self._folder_of(key) as (folder, name):
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise self._linked(key) from None
                raise
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                return None
            with open(fd, "rb") as file:
                size = os.fstat(fd).st_size  # who asks may name any range, and what is asked for is made room for first
                start = min(start, size)
                file.seek(start)
                return file.read(-1 if stop is None else min(stop, size) - start)
        return None

    @contextmanager
    def _written(self, data: bytes) -> Iterator[Path]:
        """A temporary file with the bytes, synced; gone afterwards unless it was renamed."""
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
        """The store's only lock, held for an exists-check and a rename. Raises `StoreError` at the deadline."""
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
        """Remove what killed writers left, once it is old enough to be nobody's."""
        for stray in self._temporary.iterdir():
            with suppress(FileNotFoundError):
                if time.time() - stray.stat().st_mtime > STRAY_AFTER_S:
                    stray.unlink()


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "look at the disk and its mount; the store is unchanged")
        raise StoreError(what, f"{error.strerror}", hint=hint) from error


def _keys(folder: int, at: str) -> Iterator[str]:
    """The keys in an open folder whose own keys begin with `at`, and below it."""
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
