"""A disk cache of immutable objects that several processes share.

A copy has checksums, so a torn or damaged one is detected, deleted and fetched again. Therefore files are not synced.
The least recently used copies are deleted to free space. While a process downloads an object it holds a file lock for
it, which is released when the process ends in any way.

File format of a copy: the bytes of the object; the CRC-32 of each MiB of them (u32); the tail `_TAIL`. All numbers are
little endian."""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Self

from etude.errors import StoreError

MAGIC = b"etnear1\n"
_TAIL = struct.Struct("<8sQdI")  # magic; object size; time written (s, Unix); CRC-32 of table and tail
_PIECE = 1 << 20
_POLL_S = 0.01


class DiskCache:
    """A cache of objects as files under `root`, `limit_bytes` at most. `CachedStore` has one.

    The name of a copy is a string of hex digits. Each method can raise `OSError`; the caller then reads without the
    cache. Safe for many threads and processes. It can be pickled."""

    def __init__(self, root: Path | str, limit_bytes: int) -> None:
        self.root, self.limit_bytes = Path(root), limit_bytes

    def read(self, name: str, start: int, stop: int | None, max_age_s: float) -> bytes | None:
        """Return the bytes [start, stop) of a copy; `stop` None stands for its end.

        Returns None if the copy does not exist, is damaged (it is then deleted), or was written more than `max_age_s`
        seconds ago."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                found = _checked(file.fileno(), size, start, stop, max_age_s)
                if found is not None:
                    os.utime(file.fileno())  # mark it as used
        except FileNotFoundError:
            return None
        if found is None:
            self.delete(name)
        return found

    def write(self, name: str, data: bytes) -> bool:
        """Write a copy. Returns False if it is larger than the cache. The caller must hold the lock of the name."""
        pieces = [zlib.crc32(data[at : at + _PIECE]) for at in range(0, len(data), _PIECE)]
        table = struct.pack(f"<{len(pieces)}I", *pieces)
        head = _TAIL.pack(MAGIC, len(data), time.time(), 0)[:-4]
        tail = table + head + struct.pack("<I", zlib.crc32(table + head))
        if not self._free_space(len(data) + len(tail)):
            return False
        path = self._path(name)
        part = path.with_suffix(".part")  # that of a killed process is overwritten, or deleted to free space
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as file:
                file.write(data)
                file.write(tail)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
        return True

    def delete(self, name: str) -> None:
        """Delete a copy. Readers that have it open can still read it."""
        self._path(name).unlink(missing_ok=True)

    def lock(self, name: str, timeout_s: float) -> CopyLock:
        """Acquire the lock of a name, and return it as a context manager that releases it at exit.

        Raises `TimeoutError` (an `OSError`) after `timeout_s` seconds."""
        return CopyLock(self.root / "turns" / name[:3], name, timeout_s)

    def _path(self, name: str) -> Path:
        return self.root / name[:2] / name

    def _free_space(self, num_bytes: int) -> bool:
        """Delete the least recently used copies until `num_bytes` fit. Returns False if they cannot fit."""
        if num_bytes > self.limit_bytes:
            return False
        with CopyLock(self.root / "turns" / "room", "room", 60.0):
            found: list[tuple[float, int, Path]] = []
            for path in self.root.glob("[0-9a-f][0-9a-f]/*"):
                with suppress(FileNotFoundError):
                    state = path.stat()
                    found.append((state.st_mtime, state.st_size, path))
            used = sum(size for _, size, _ in found)
            for _, size, path in sorted(found):
                if used + num_bytes <= self.limit_bytes:
                    break
                path.unlink(missing_ok=True)  # for a part file that is being written, the rename of its writer fails
                used -= size
        return True


class CopyLock:
    """A file lock of a copy's name, held from construction to the end of the `with` block.

    `DiskCache.lock` makes one. Several names can share the file `path`. `error` is what the previous holder passed to
    `share_error` if this one waited for it, else None. Raises `TimeoutError` after `timeout_s` seconds."""

    def __init__(self, path: Path, name: str, timeout_s: float) -> None:
        self._name = name
        path.parent.mkdir(parents=True, exist_ok=True)
        began, deadline = time.time(), time.monotonic() + timeout_s
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        waited = False
        try:
            while True:
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"the lock {path} was not free within {timeout_s:g} s") from None
                    waited = True
                    time.sleep(_POLL_S)
            self.error = self._shared_error(began) if waited else None
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def share_error(self, error: StoreError) -> None:
        """Pass an error to all that wait for this lock, so that they do not repeat the failing download one by one."""
        fields = (self._name, str(time.time()), error.what, error.facts, error.hint)
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, "\0".join(fields).encode()[:65536], 0)

    def _shared_error(self, since: float) -> StoreError | None:
        fields = os.pread(self._file, 65536, 0).decode(errors="replace").split("\0")
        if len(fields) != 5 or fields[0] != self._name:
            return None
        with suppress(ValueError):
            if since <= float(fields[1]) <= time.time():
                return StoreError(fields[2], fields[3], hint=fields[4])
        return None


def _checked(file: int, size: int, start: int, stop: int | None, max_age_s: float) -> bytes | None:
    """Read the bytes [start, stop) of an open copy; None if a checksum is wrong or it is too old."""
    tail = os.pread(file, _TAIL.size, max(0, size - _TAIL.size))
    if len(tail) != _TAIL.size:
        return None
    magic, num_bytes, kept_at, checksum = _TAIL.unpack(tail)
    num_pieces = -(-num_bytes // _PIECE)
    if magic != MAGIC or size != num_bytes + 4 * num_pieces + _TAIL.size or not 0 <= time.time() - kept_at <= max_age_s:
        return None
    table = os.pread(file, 4 * num_pieces, num_bytes)
    if zlib.crc32(tail[:-4], zlib.crc32(table)) != checksum:
        return None
    end = num_bytes if stop is None else min(stop, num_bytes)
    if start >= end:
        return b""
    first, last = start // _PIECE, -(-end // _PIECE)
    found = bytearray()
    for i, expected in enumerate(struct.unpack_from(f"<{last - first}I", table, 4 * first), first):
        piece = os.pread(file, min(_PIECE, num_bytes - i * _PIECE), i * _PIECE)
        if zlib.crc32(piece) != expected:
            return None
        found += piece
    return bytes(memoryview(found)[start - first * _PIECE : end - first * _PIECE])
