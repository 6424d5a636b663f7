"""A far store behind copies that are near: the engines of a region download an object once.

Only what lies under `kept` is copied: objects that never change. Everything else, pointers above all, is read from the
far store each time. Of several processes that want one object, one downloads it and the others wait for its copy; if
it is killed, the next one does it; if it fails, all who waited have its error. Whatever the near disk does (full, gone,
flipped bits), the far store serves. Knows nothing of what the bytes mean, but that a key whose last part begins with 64
hex digits is named after its SHA-256.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

from etude.errors import StoreError
from etude.seams import BlobStore
from etude.stores.keys import check_key, check_prefix, check_range
from etude.stores.near import Near

KEPT = ("objects/", "manifests/")
LIMIT_BYTES = 64 << 30
MAX_OBJECT_BYTES = 1 << 30
UNPROVEN_S = 600.0
PATIENCE_S = 600.0
_SHA256 = re.compile(r"[0-9a-f]{64}(?![0-9a-f])")


class CachedStore:
    """`far`, with copies of immutable objects in the directory `near`, which any number of stores and processes share.

    `place`: what tells `far` from others that share the directory, such as its URL. `limit_bytes`: of all copies.
    `kept`: keys that begin so never change. An object is downloaded whole even for a part of it; one of more than
    `object_bytes`, or an eighth of the limit, is passed on and not kept. What its key does not prove is asked for again
    after ten minutes, so that a damaged manifest that was repaired is not served damaged for ever.

    >>> import tempfile
    >>> from etude.stores import MemoryStore
    >>> far = MemoryStore()
    >>> far.put("objects/a", b"hello")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = CachedStore(far, folder)
    ...     first = store.get("objects/a")
    ...     far.delete("objects/a")
    ...     first, store.get("objects/a", 1, 3)
    (b'hello', b'el')
    """

    def __init__(
        self,
        far: BlobStore,
        near: Path | str,
        *,
        place: str = "",
        limit_bytes: int = LIMIT_BYTES,
        object_bytes: int = MAX_OBJECT_BYTES,
        kept: tuple[str, ...] = KEPT,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._far, self._near = far, Near(near, limit_bytes)
        self._place, self._kept, self._patience_s = place, kept, patience_s
        self._object_bytes = min(object_bytes, limit_bytes // 8)
        self.unkept = ""
        """Why the last object that should have been kept was not; empty where all is well."""

    def __repr__(self) -> str:
        return f"CachedStore({self._far!r}, {str(self._near.root)!r})"

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes [start, stop), fewer at the end. Raises `KeyError`, `StoreError` as the far store does."""
        check_range(start, stop)
        if not check_key(key).startswith(self._kept):
            return self._far.get(key, start, stop)
        name = self._name(key)
        if (held := self._copy(key, name, start, stop)) is not None:
            return held
        try:
            turn = self._near.turn(name, self._patience_s)
        except OSError as error:
            self.unkept = str(error)
            return self._far.get(key, start, stop)
        with turn:
            if (held := self._copy(key, name, start, stop)) is not None:
                return held
            if turn.trouble is not None:
                raise turn.trouble
            try:
                data = self._far.get(key, 0, self._object_bytes + 1)
            except StoreError as error:
                turn.tell(error)
                raise
            if len(data) <= self._object_bytes:
                self._keep(key, name, data)
                return data[start:stop] if start or stop is not None else data
        return self._far.get(key, start, stop)

    def put(self, key: str, data: bytes) -> None:
        """Put an object into the far store. No copy is kept."""
        self._far.put(key, data)

    def list(self, prefix: str) -> list[str]:
        """As the far store does."""
        return self._far.list(check_prefix(prefix))

    def delete(self, key: str) -> None:
        """Delete an object in the far store, and its copy."""
        self._far.delete(key)
        try:
            self._near.forget(self._name(key))
        except OSError as error:
            raise StoreError(
                f"the copy of {key!r} cannot be deleted", str(error), hint=f"look at the disk of {self._near.root}"
            ) from error

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """As the far store does."""
        return self._far.compare_and_swap(key, expected, data)

    def _name(self, key: str) -> str:
        return hashlib.sha256(f"{self._place}\0{key}".encode()).hexdigest()

    def _copy(self, key: str, name: str, start: int, stop: int | None) -> bytes | None:
        try:
            return self._near.read(name, start, stop, math.inf if _stated(key) else UNPROVEN_S)
        except OSError as error:
            self.unkept = str(error)
            return None

    def _keep(self, key: str, name: str, data: bytes) -> None:
        stated = _stated(key)
        if stated and hashlib.sha256(data).hexdigest() != stated:
            self.unkept = f"{key} is not what its name says"
            return
        try:
            self.unkept = "" if self._near.keep(name, data) else f"{key} is larger than all that may be kept"
        except OSError as error:
            self.unkept = str(error)


def _stated(key: str) -> str:
    """The SHA-256 that an object is named after; empty for another name."""
    found = _SHA256.match(key.rpartition("/")[2])
    return found[0] if found else ""
