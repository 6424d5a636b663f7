"""What a command prints, kept up to a limit."""

from __future__ import annotations


class OutputBuffer:
    """Bytes of which at most `limit` are kept: the first half, the last half, and between them how many are missing."""

    def __init__(self, limit: int) -> None:
        self._head, self._tail, self._limit = bytearray(), bytearray(), limit
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        free_bytes = self._limit // 2 - len(self._head)
        if free_bytes > 0:
            self._head += data[:free_bytes]
            data = data[free_bytes:]
        self._tail += data
        if len(self._tail) > 2 * self._limit:
            del self._tail[: len(self._tail) - self._limit]

    @property
    def num_buffered(self) -> int:
        """Bytes that are kept now: at most three times the limit."""
        return len(self._head) + len(self._tail)

    @property
    def truncated(self) -> bool:
        return self.total > self._limit

    def value(self) -> bytes:
        """At most `limit` bytes."""
        if not self.truncated:
            return bytes(self._head + self._tail)
        marker = f"\n[... {self.total - self._limit} bytes and this line's left out ...]\n".encode()
        keep = self._limit - len(self._head) - len(marker)
        return bytes(self._head + marker + self._tail[-keep:]) if keep > 0 else bytes(self._head)
