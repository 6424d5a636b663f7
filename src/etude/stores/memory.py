"""A blob store in memory, for tests and for runs of one process."""

from __future__ import annotations

import threading

from etude.errors import StoreError
from etude.stores.keys import check_key, check_prefix, check_range


class MemoryStore:
    """A `BlobStore` in memory. Its contents are lost when the process ends. Thread-safe.

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
        """Write an immutable object. Raises `StoreError` if the key exists with different bytes."""
        with self._lock:
            if self._blobs.setdefault(check_key(key), bytes(data)) != data:
                raise StoreError(
                    f"object {key!r} already exists with other content",
                    f"it has {len(self._blobs[key])} bytes, the new data {len(data)}",
                    hint="an object cannot be overwritten: use another key, such as the SHA-256 of the data",
                )

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of an object or a pointer, as far as they exist. `stop` None: up to its end.

        Raises `KeyError` if the key does not exist."""
        check_range(start, stop)
        return self._blobs[check_key(key)][start:stop]

    def list(self, prefix: str) -> list[str]:
        """Return the sorted keys that start with `prefix`. Raises `StoreError` if no valid key can start with it."""
        check_prefix(prefix)
        with self._lock:
            return sorted(key for key in self._blobs if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """Delete an object or a pointer. Do nothing if it does not exist."""
        with self._lock:
            self._blobs.pop(check_key(key), None)

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Replace the bytes of a pointer atomically if they equal `expected`. Return whether they were replaced.

        With `expected` None the pointer must not exist, and is created."""
        with self._lock:
            if self._blobs.get(check_key(key)) != expected:
                return False
            self._blobs[key] = bytes(data)
            return True
