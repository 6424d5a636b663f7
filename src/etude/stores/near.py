"""Copies of immutable objects in a directory of this machine or region, which several processes share.

A copy carries checksums, so that a torn or flipped one is found out, thrown away and fetched again; that is why
nothing is synced here. What was used least lately goes when room is needed. One process at a time has the turn of a
name: it holds a file lock, which ends with the process, however that ends. Knows nothing of where copies come from.

A copy: its bytes; a CRC-32 (u32, little endian, as everything here) of each MiB of them; `_TAIL`.
"""

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
_TAIL = struct.Struct("<8sQdI")  # magic; bytes of the object; when it was kept (s, Unix); CRC-32 of all but itself
_PIECE = 1 << 20
_POLL_S = 0.01


class Near:
    """At most `limit_bytes` of copies under `root`, by names of hex digits. Every method may raise `OSError`: the
    caller does without. Safe between threads and processes; pickles."""

    def __init__(self, root: Path | str, limit_bytes: int) -> None:
        self.root, self.limit_bytes = Path(root), limit_bytes

    def read(self, name: str, start: int, stop: int | None, max_age_s: float) -> bytes | None:
        """The bytes [start, stop) of a copy; None when there is none, or it is damaged or older."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                held = _checked(file.fileno(), size, start, stop, max_age_s)
                if held is not None:
                    os.utime(file.fileno())  # it was used
        except FileNotFoundError:
            return None
        if held is None:
            self.forget(name)
        return held

    def keep(self, name: str, data: bytes) -> bool:
        """Keep a copy; False when it has no room. Only who has the name's turn may call this."""
        pieces = [zlib.crc32(data[at : at + _PIECE]) for at in range(0, len(data), _PIECE)]
        table = struct.pack(f"<{len(pieces)}I", *pieces)
        head = _TAIL.pack(MAGIC, len(data), time.time(), 0)[:-4]
        tail = table + head + struct.pack("<I", zlib.crc32(table + head))
        if not self._make_room(len(data) + len(tail)):
            return False
        path = self._path(name)
        part = path.with_suffix(".part")  # a killed one's is written over, or swept
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as file:
                file.write(data)
                file.write(tail)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
        return True

    def forget(self, name: str) -> None:
        """Throw a copy away; readers that have it open read on."""
        self._path(name).unlink(missing_ok=True)

    def turn(self, name: str, patience_s: float) -> Turn:
        """Wait for the turn of a name. Raises `TimeoutError` (an `OSError`) when it does not come in time."""
        return Turn(self.root / "turns" / name[:3], name, patience_s)

    def _path(self, name: str) -> Path:
        return self.root / name[:2] / name

    def _make_room(self, num_bytes: int) -> bool:
        """Remove what was used least lately until there is room."""
        if num_bytes > self.limit_bytes:
            return False
        with Turn(self.root / "turns" / "room", "room", 60.0):
            found: list[tuple[float, int, Path]] = []
            for path in self.root.glob("[0-9a-f][0-9a-f]/*"):
                with suppress(FileNotFoundError):
                    state = path.stat()
                    found.append((state.st_mtime, state.st_size, path))
            used = sum(size for _, size, _ in found)
            for _, size, path in sorted(found):
                if used + num_bytes <= self.limit_bytes:
                    break
                path.unlink(missing_ok=True)  # a part that is being written: its writer's rename fails, and it goes on
                used -= size
        return True


class Turn:
    """A file lock, and what the one who had the turn before met. Names may share a lock; a wait is then longer."""

    def __init__(self, path: Path, name: str, patience_s: float) -> None:
        self._name = name
        path.parent.mkdir(parents=True, exist_ok=True)
        began, deadline = time.time(), time.monotonic() + patience_s
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        waited = False
        try:
            while True:
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"the lock {path} was not free within {patience_s:g} s") from None
                    waited = True
                    time.sleep(_POLL_S)
            self.trouble = self._told(began) if waited else None
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def tell(self, error: StoreError) -> None:
        """Let all who wait for this turn have the same error, so that they need not wait for theirs one by one."""
        fields = (self._name, str(time.time()), error.what, error.facts, error.hint)
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, "\0".join(fields).encode()[:65536], 0)

    def _told(self, since: float) -> StoreError | None:
        fields = os.pread(self._file, 65536, 0).decode(errors="replace").split("\0")
        if len(fields) != 5 or fields[0] != self._name:
            return None
        with suppress(ValueError):
            if since <= float(fields[1]) <= time.time():
                return StoreError(fields[2], fields[3], hint=fields[4])
        return None


def _checked(file: int, size: int, start: int, stop: int | None, max_age_s: float) -> bytes | None:
    """The bytes [start, stop) of an open copy whose tail and pieces are whole and which is no older."""
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
