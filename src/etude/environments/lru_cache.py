"""A cache that is bounded in bytes and evicts the least recently used entries. Entries can be held against eviction."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from etude.errors import MachineError

T = TypeVar("T")


class LruCache(Generic[T]):
    """A cache of values by name. The value of a name never changes.

    `size_of` returns a value's size in bytes. A value is *held* between `hold` and `release`, and is then never
    evicted. All other values have at most `max_bytes` together; beyond that the least recently used are evicted (a
    single larger value stays).

    >>> trees = LruCache(len, max_bytes=8)
    >>> trees.put("a", b"aaaaa"), trees.hold("a"), trees.put("b", b"bbbbb"), trees.put("c", b"ccccc")
    ('a', 5, 'b', 'c')
    >>> trees.get("a"), trees.get("b"), trees.get("c")
    (b'aaaaa', None, b'ccccc')
    """

    def __init__(self, size_of: Callable[[T], int], *, max_bytes: int) -> None:
        self._size_of, self._max_bytes, self._evictable_bytes = size_of, max_bytes, 0
        self._entries: dict[str, tuple[T, int]] = {}  # value and size in bytes
        self._evictable: OrderedDict[str, None] = OrderedDict()  # entries without holds, least recently used first
        self._holds: Counter[str] = Counter()

    def put(self, name: str, value: T) -> str:
        """Add a value, unless the name exists already, and return the name."""
        if self.get(name) is None:
            self._entries[name] = value, self._size_of(value)
            self._make_evictable(name)
        return name

    def get(self, name: str) -> T | None:
        """Return the value, or None if it was never added or has been evicted."""
        if name in self._evictable:
            self._evictable.move_to_end(name)
        return self._entries[name][0] if name in self._entries else None

    def require(self, name: str) -> T:
        """Return the value. Raises `MachineError` if it was never added or has been evicted."""
        value = self.get(name)
        if value is None:
            raise MachineError(
                f"no snapshot {name[:12]!r}",
                "it was never prepared, or was evicted from the cache",
                hint="prepare it again",
            )
        return value

    def hold(self, name: str) -> int:
        """Keep a value in the cache until `release` was called as often as `hold`. Returns its size in bytes.

        Raises `MachineError` for an unknown name.
        """
        self.require(name)
        if name in self._evictable:
            del self._evictable[name]
            self._evictable_bytes -= self._entries[name][1]
        self._holds[name] += 1
        return self._entries[name][1]

    def release(self, name: str) -> None:
        """Undo one call of `hold`. A value that is no longer held can be evicted."""
        self._holds[name] -= 1
        if self._holds[name] <= 0:
            del self._holds[name]
            if name in self._entries:
                self._make_evictable(name)

    def clear(self) -> None:
        """Remove all values, including those that `hold` keeps in the cache."""
        self._entries.clear()
        self._evictable.clear()
        self._evictable_bytes = 0

    def _make_evictable(self, name: str) -> None:
        self._evictable[name] = None
        self._evictable_bytes += self._entries[name][1]
        while self._evictable_bytes > self._max_bytes and len(self._evictable) > 1:
            evicted, _ = self._evictable.popitem(last=False)
            self._evictable_bytes -= self._entries.pop(evicted)[1]
