"""A buffer for a command's output, bounded in bytes."""

from __future__ import annotations


class OutputBuffer:
    """A buffer that keeps at most `limit` bytes of a command's output.

    Of longer output it keeps the first half and the last half, and between them a note with the number of dropped
    bytes.
    """

    def __init__(self, limit: int) -> None:
        self._head, self._tail, self._limit = bytearray(), bytearray(), limit
        self.total = 0

    def add(self, data: bytes) -> None:
        """Append output."""
        self.total += len(data)
        free_bytes = self._limit // 2 - len(self._head)
        if free_bytes > 0:
            self._head += data[:free_bytes]
            data = data[free_bytes:]
        self._tail += data
        if len(self._tail) > 2 * self._limit:
            del self._tail[: len(self._tail) - self._limit]

    @property
    def truncated(self) -> bool:
        """Whether bytes were dropped."""
        return self.total > self._limit

    def value(self) -> bytes:
        """Return the output, shortened to at most `limit` bytes."""
        if not self.truncated:
            return bytes(self._head + self._tail)
        marker = f"\n[... {self.total - self._limit} bytes and this line's left out ...]\n".encode()
        keep = self._limit - len(self._head) - len(marker)
        return bytes(self._head + marker + self._tail[-keep:]) if keep > 0 else bytes(self._head)
