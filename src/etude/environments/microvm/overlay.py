"""The disk of a machine: an unnamed qcow2 file with the guest's writes, on top of the image's filesystem.

Unnamed files (`O_TMPFILE`, or memory files on filesystems without it) disappear with the last process that has them
open, so a killed process leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile

_CLUSTER_BITS = 16
_CLUSTER = 1 << _CLUSTER_BITS
_COPY_BYTES = 8 << 20
SPACE_HINT = "free space in the folder for temporary files, or set TMPDIR to another one"


def anonymous(folder: str | None = None) -> int:
    """Create an unnamed empty file and return its descriptor.

    `folder`: a folder on the disk to use; None: the folder for temporary files.
    """
    with contextlib.suppress(OSError):
        return os.open(folder or tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    return os.memfd_create("etude-disk", os.MFD_CLOEXEC)


def free_bytes(place: int | str = "") -> int:
    """Return the number of free bytes on the disk of a file or folder.

    `place`: the file's or folder's path or descriptor; "": the folder for temporary files.
    """
    found = os.statvfs(place or tempfile.gettempdir())
    return found.f_bavail * found.f_frsize if found.f_blocks else 1 << 62  # a memory file has no disk


def write_empty(fd: int, num_bytes: int) -> None:
    """Write an empty qcow2 file with the virtual size `num_bytes` (version 3, QEMU's docs/interop/qcow2.txt)."""
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
    """Copy the content of the file `source` to the empty file `target`, with its holes. Both are descriptors."""
    os.ftruncate(target, 0)
    os.ftruncate(target, os.fstat(source).st_size)
    for start, length in extents(source):
        for at in range(start, start + length, _COPY_BYTES):
            write(target, at, read(source, at, min(start + length - at, _COPY_BYTES)))


def extents(fd: int) -> list[tuple[int, int]]:
    """Return (start, length) in bytes of each data range of a sparse file."""
    found, at, end = list[tuple[int, int]](), 0, os.fstat(fd).st_size
    while at < end:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break  # the rest is a hole
        stop = os.lseek(fd, at, os.SEEK_HOLE)
        found.append((at, stop - at))
        at = stop
    return found


def read(fd: int, at: int, num_bytes: int) -> bytes:
    """Read exactly `num_bytes` at the offset `at` of a file. Raises `OSError` if the file ends before."""
    parts, left = list[bytes](), num_bytes
    while left:
        part = os.pread(fd, left, at + num_bytes - left)
        if not part:
            raise OSError("a disk was truncated while it was copied")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def write(fd: int, at: int, data: bytes | memoryview) -> None:
    """Write all bytes at the offset `at` of a file. Raises `OSError` if the disk is full."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
