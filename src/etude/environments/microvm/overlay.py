"""A machine's disk: a qcow2 file without a name over the image's filesystem; what the guest writes is all it holds.

Files without names (`O_TMPFILE`, or memory where the filesystem has none) are gone with the last process that has them
open: nothing is left behind by whoever is killed.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile

_CLUSTER_BITS = 16
_CLUSTER = 1 << _CLUSTER_BITS
_COPY_BYTES = 8 << 20
ROOM = "make room in the folder for temporary files, or set TMPDIR to one that has some"


def anonymous(folder: str | None = None) -> int:
    """An empty file without a name on the disk that `folder` (the default one for temporary files) is on."""
    with contextlib.suppress(OSError):
        return os.open(folder or tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    return os.memfd_create("etude-disk", os.MFD_CLOEXEC)


def free_bytes(place: int | str = "") -> int:
    """The room on the disk that this file, or the folder for temporary files, is on."""
    found = os.statvfs(place or tempfile.gettempdir())
    return found.f_bavail * found.f_frsize if found.f_blocks else 1 << 62  # memory has no size of its own


def write_empty(fd: int, num_bytes: int) -> None:
    """Write a qcow2 of this virtual size (format version 3, docs/interop/qcow2.txt of QEMU) in which nothing is."""
    l1_entries = -(-num_bytes // (_CLUSTER * _CLUSTER // 8))
    l1_clusters = -(-l1_entries * 8 // _CLUSTER)
    refcount_table, refcount_block, l1 = _CLUSTER, 2 * _CLUSTER, 3 * _CLUSTER
    header = struct.pack(
        ">4sIQIIQIIQQIIQQQQII",
        b"QFI\xfb", 3, 0, 0, _CLUSTER_BITS, num_bytes, 0, l1_entries, l1, refcount_table, 1, 0, 0,
        0, 0, 0, 4, 104,
    )  # fmt: skip
    os.ftruncate(fd, 0)
    os.pwrite(fd, header, 0)
    os.pwrite(fd, struct.pack(">Q", refcount_block), refcount_table)
    os.pwrite(fd, b"\0\1" * (3 + l1_clusters), refcount_block)
    os.ftruncate(fd, l1 + l1_clusters * _CLUSTER)


def copy(source: int, target: int) -> None:
    """Make `target` the same file as `source`, holes included."""
    os.ftruncate(target, 0)
    os.ftruncate(target, os.fstat(source).st_size)
    for start, length in extents(source):
        for at in range(start, start + length, _COPY_BYTES):
            write(target, at, read(source, at, min(start + length - at, _COPY_BYTES)))


def extents(fd: int) -> list[tuple[int, int]]:
    """Where the file has content: start and length of each part."""
    found, at, end = list[tuple[int, int]](), 0, os.fstat(fd).st_size
    while at < end:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break  # a hole up to the end
        stop = os.lseek(fd, at, os.SEEK_HOLE)
        found.append((at, stop - at))
        at = stop
    return found


def read(fd: int, at: int, num_bytes: int) -> bytes:
    """All of these bytes. `OSError` where the file ends before."""
    parts, left = list[bytes](), num_bytes
    while left:
        part = os.pread(fd, left, at + num_bytes - left)
        if not part:
            raise OSError("a disk was cut off while it was copied")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def write(fd: int, at: int, data: bytes | memoryview) -> None:
    """All of these bytes. `OSError` where there is no room."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
