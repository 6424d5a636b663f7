"""What a runtime keeps by name, bounded in bytes: the least recently used goes first, what is held does not go.

Held things count apart: whoever holds them has a bound of their own, and takes nobody else's room.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from etude.errors import MachineError

T = TypeVar("T")


class Bounded(Generic[T]):
    """Things of a size. What has a name never changes.

    >>> trees = Bounded(len, max_bytes=8)
    >>> trees.put("a", b"aaaaa"), trees.hold("a"), trees.put("b", b"bbbbb"), trees.put("c", b"ccccc")
    ('a', 5, 'b', 'c')
    >>> trees.get("a"), trees.get("b"), trees.get("c")
    (b'aaaaa', None, b'ccccc')
    """

    def __init__(self, size_of: Callable[[T], int], *, max_bytes: int) -> None:
        self._size_of, self._max_bytes, self._num_bytes = size_of, max_bytes, 0
        self._there: dict[str, tuple[T, int]] = {}  # with its size
        self._passing: OrderedDict[str, None] = OrderedDict()  # those that may go, least recently used first
        self._holds: Counter[str] = Counter()

    def put(self, name: str, thing: T) -> str:
        """Keep it, or what has this name already. Returns the name."""
        if self.get(name) is None:
            self._there[name] = thing, self._size_of(thing)
            self._may_go(name)
        return name

    def get(self, name: str) -> T | None:
        """None for what was never kept, or has had to go."""
        if name in self._passing:
            self._passing.move_to_end(name)
        return self._there[name][0] if name in self._there else None

    def hold(self, name: str) -> int:
        """Keep it until it was released as often; how many bytes it has. `MachineError` for what is not there."""
        if name not in self._there:
            raise MachineError(f"no snapshot {name[:12]}", "unknown, or gone for others", hint="take it again")
        if name in self._passing:
            del self._passing[name]
            self._num_bytes -= self._there[name][1]
        self._holds[name] += 1
        return self._there[name][1]

    def release(self, name: str) -> None:
        """One hold fewer."""
        self._holds[name] -= 1
        if self._holds[name] <= 0:
            del self._holds[name]
            if name in self._there:
                self._may_go(name)

    def clear(self) -> None:
        """Let go of everything, held or not."""
        self._there.clear()
        self._passing.clear()
        self._num_bytes = 0

    def _may_go(self, name: str) -> None:
        self._passing[name] = None
        self._num_bytes += self._there[name][1]
        while self._num_bytes > self._max_bytes and len(self._passing) > 1:
            gone, _ = self._passing.popitem(last=False)
            self._num_bytes -= self._there.pop(gone)[1]
