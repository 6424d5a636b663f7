"""A blob store with a local disk cache, so that the engines of a region download each object once.

Only immutable objects are cached. Pointers are always read from the source store. If several processes need the same
object, one downloads it and the others wait for its copy. If that process is killed, the next one downloads. If the
download fails, all waiting processes get its error. If the cache fails in any way (disk full, gone, flipped bits), the
object is read from the source store. A key whose last part starts with 64 hex digits is checked against this SHA-256
before it is cached."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

from etude.errors import StoreError
from etude.seams import BlobStore
from etude.stores.disk_cache import DiskCache
from etude.stores.keys import check_key, check_prefix, check_range

IMMUTABLE_PREFIXES = ("objects/", "manifests/")
LIMIT_BYTES = 64 << 30
MAX_OBJECT_BYTES = 1 << 30
UNPROVEN_S = 600.0  # how long a copy without a SHA-256 in its key is used
LOCK_TIMEOUT_S = 600.0
_SHA256 = re.compile(r"[0-9a-f]{64}(?![0-9a-f])")


class CachedStore:
    """A `BlobStore` that reads `source` through a disk cache in `directory`. Writes go to `source`.

    Any number of stores and processes can share the directory. An object is downloaded in full even if only a part of
    it is read. The copy of an object whose key contains no SHA-256 expires after ten minutes, so that a repaired
    manifest is read again.

    - `source_id`: identifies `source` in a shared directory, for example its URL.
    - `limit_bytes`: the size limit of the cache. The least recently used copies are deleted.
    - `object_bytes`: larger objects, and those over an eighth of the limit, are not cached.
    - `immutable_prefixes`: only keys that start with one of these are cached.
    - `lock_timeout_s`: the longest wait for another process's download, in seconds. After it the object is read from
      `source`.

    >>> import tempfile
    >>> from etude.stores import MemoryStore
    >>> source = MemoryStore()
    >>> source.put("objects/a", b"hello")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = CachedStore(source, folder)
    ...     first = store.get("objects/a")
    ...     source.delete("objects/a")
    ...     first, store.get("objects/a", 1, 3)
    (b'hello', b'el')
    """

    def __init__(
        self,
        source: BlobStore,
        directory: Path | str,
        *,
        source_id: str = "",
        limit_bytes: int = LIMIT_BYTES,
        object_bytes: int = MAX_OBJECT_BYTES,
        immutable_prefixes: tuple[str, ...] = IMMUTABLE_PREFIXES,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> None:
        self._source, self._disk = source, DiskCache(directory, limit_bytes)
        self._source_id, self._immutable_prefixes = source_id, immutable_prefixes
        self._lock_timeout_s = lock_timeout_s
        self._object_bytes = min(object_bytes, limit_bytes // 8)
        self.cache_error = ""
        """Why the last object could not be cached; empty if it was."""

    def __repr__(self) -> str:
        return f"CachedStore({self._source!r}, {str(self._disk.root)!r})"

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of an object or a pointer, as far as they exist. `stop` None: up to its end.

        Raises `KeyError` if the key does not exist, and the `StoreError` of the source store."""
        check_range(start, stop)
        if not check_key(key).startswith(self._immutable_prefixes):
            return self._source.get(key, start, stop)
        name = self._name(key)
        if (found := self._read_copy(key, name, start, stop)) is not None:
            return found
        try:
            lock = self._disk.lock(name, self._lock_timeout_s)
        except OSError as error:
            self.cache_error = str(error)
            return self._source.get(key, start, stop)
        with lock:
            if (found := self._read_copy(key, name, start, stop)) is not None:
                return found
            if lock.error is not None:
                raise lock.error
            try:
                data = self._source.get(key, 0, self._object_bytes + 1)
            except StoreError as error:
                lock.share_error(error)
                raise
            if len(data) <= self._object_bytes:
                self._add_copy(key, name, data)
                return data[start:stop] if start or stop is not None else data
        return self._source.get(key, start, stop)

    def put(self, key: str, data: bytes) -> None:
        """Write an object to the source store. It is not cached."""
        self._source.put(key, data)

    def list(self, prefix: str) -> list[str]:
        """Return the sorted keys of the source store that start with `prefix`."""
        return self._source.list(check_prefix(prefix))

    def delete(self, key: str) -> None:
        """Delete an object in the source store, and its copy in the cache."""
        self._source.delete(key)
        try:
            self._disk.delete(self._name(key))
        except OSError as error:
            raise StoreError(
                f"the cached copy of {key!r} cannot be deleted", str(error), hint=f"check the disk of {self._disk.root}"
            ) from error

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Atomically replace the bytes of a pointer in the source store if they equal `expected`.

        Returns whether they were replaced. With `expected` None the pointer must not exist."""
        return self._source.compare_and_swap(key, expected, data)

    def _name(self, key: str) -> str:
        return hashlib.sha256(f"{self._source_id}\0{key}".encode()).hexdigest()

    def _read_copy(self, key: str, name: str, start: int, stop: int | None) -> bytes | None:
        try:
            return self._disk.read(name, start, stop, math.inf if _sha256_of(key) else UNPROVEN_S)
        except OSError as error:
            self.cache_error = str(error)
            return None

    def _add_copy(self, key: str, name: str, data: bytes) -> None:
        sha256 = _sha256_of(key)
        if sha256 and hashlib.sha256(data).hexdigest() != sha256:
            self.cache_error = f"{key} does not have the SHA-256 in its name"
            return
        try:
            self.cache_error = "" if self._disk.write(name, data) else f"{key} is larger than the cache"
        except OSError as error:
            self.cache_error = str(error)


def _sha256_of(key: str) -> str:
    """Return the SHA-256 in the last part of a key, or "" if there is none."""
    found = _SHA256.match(key.rpartition("/")[2])
    return found[0] if found else ""
