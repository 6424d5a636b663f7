"""A blob store in this process's memory, for tests and for one-process runs. Safe between threads."""

from __future__ import annotations

import threading

from etude.errors import StoreError
from etude.stores.keys import check_key, check_prefix, check_range


class MemoryStore:
    """A `BlobStore` that forgets everything with the process.

    >>> store = MemoryStore()
    >>> store.put("objects/a", b"hello")
    >>> store.get("objects/a", 1, 3)
    b'el'
    >>> store.compare_and_swap("pointers/head", None, b"1"), store.compare_and_swap("pointers/head", None, b"2")
    (True, False)
    """

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        """Keep immutable bytes. Raises `StoreError` when the key holds others."""
        with self._lock:
            if self._blobs.setdefault(check_key(key), bytes(data)) != data:
                raise StoreError(
                    f"object {key!r} exists with other bytes",
                    f"it has {len(self._blobs[key])} bytes, these are {len(data)}",
                    hint="objects are immutable: choose a key from the content",
                )

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes [start, stop), fewer at the end. Raises `KeyError`."""
        check_range(start, stop)
        return self._blobs[check_key(key)][start:stop]

    def list(self, prefix: str) -> list[str]:
        """Sorted keys that start with `prefix`. Raises `StoreError` for a prefix of no allowed key."""
        check_prefix(prefix)
        with self._lock:
            return sorted(key for key in self._blobs if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """Forget a key; no error when it is not there."""
        with self._lock:
            self._blobs.pop(check_key(key), None)

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Atomically replace a pointer's bytes if they are `expected` (None: absent)."""
        with self._lock:
            if self._blobs.get(check_key(key)) != expected:
                return False
            self._blobs[key] = bytes(data)
            return True
