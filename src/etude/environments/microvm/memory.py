"""Read and write a guest's memory from the host.

All machines of an image share a memory file, the base. QEMU maps it privately, and it never changes. So the pages that
a guest has written are the private copies, which /proc/PID/pagemap lists. They are read and written with
`process_vm_readv` and `process_vm_writev` while the guest is stopped. A snapshot has only these pages, a few thousand
for any guest size.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.errors import MachineError

PAGE = mmap.PAGESIZE
_PRESENT_OR_SWAPPED = np.uint64(3 << 62)
_OF_FILE = np.uint64(1 << 61)
_MAX_SEGMENTS = 1024  # in one call
_HINT_ENDED = "its QEMU process has probably ended: fork another machine"
_libc = ctypes.CDLL(None, use_errno=True)
_Pieces = ctypes.c_void_p
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.argtypes = (ctypes.c_int, _Pieces, ctypes.c_ulong, _Pieces, ctypes.c_ulong, ctypes.c_ulong)
    _call.restype = ctypes.c_ssize_t


class Pages(NamedTuple):
    """Pages of a guest's memory that differ from the booted image (`Base`).

    `numbers`: page numbers in the guest's memory, ascending, shape [P]. `content`: their bytes, shape [P, PAGE].
    """

    numbers: NDArray[np.int64]
    content: NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        """Size of `content` in bytes."""
        return self.content.nbytes


NONE = Pages(np.empty(0, np.int64), np.empty((0, PAGE), np.uint8))


class Mapping(NamedTuple):
    """The location of a guest's memory in a QEMU process: process id, first address, and size in bytes."""

    pid: int
    start: int
    num_bytes: int


def find(pid: int, ram: int, num_bytes: int) -> Mapping:
    """Find the address range at which a process has mapped a memory file privately.

    `ram`: a descriptor of the file, whose size is `num_bytes`. Raises `MachineError` if there is no such mapping.
    """
    inode = str(os.fstat(ram).st_ino)
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            place, rights, _, _, found, *_ = line.split(maxsplit=5)
            start, end = (int(word, 16) for word in place.split("-"))
            if found == inode and end - start == num_bytes and rights.endswith("p"):
                return Mapping(pid, start, num_bytes)
    raise MachineError(
        "the guest's memory is not found", f"process {pid}", hint="check the version of QEMU: 7.2 or later"
    )


def written(mapping: Mapping) -> Pages:
    """Read the pages that the guest has written. The guest must be stopped. Raises `MachineError`."""
    with open(f"/proc/{mapping.pid}/pagemap", "rb", buffering=0) as file:
        file.seek(mapping.start // PAGE * 8)
        entries = np.frombuffer(_exactly(file.read(mapping.num_bytes // PAGE * 8), mapping), np.uint64)
    private = ((entries & _PRESENT_OR_SWAPPED) != 0) & ((entries & _OF_FILE) == 0)
    pages = Pages(numbers := np.flatnonzero(private), np.empty((len(numbers), PAGE), np.uint8))
    _move(_libc.process_vm_readv, mapping, pages)
    return pages


def write(mapping: Mapping, pages: Pages) -> None:
    """Write pages into the memory of a guest that has not run yet. Raises `MachineError`."""
    _move(_libc.process_vm_writev, mapping, pages)


def _exactly(data: bytes | None, mapping: Mapping) -> bytes:
    expected = mapping.num_bytes // PAGE * 8
    if data is None or len(data) != expected:
        facts = f"/proc/{mapping.pid}/pagemap gave {len(data or b'')} of {expected} bytes"
        raise MachineError("the guest's memory cannot be read", facts, hint=_HINT_ENDED)
    return data


def _move(call: ctypes._NamedFuncPointer, mapping: Mapping, pages: Pages) -> None:
    for local, remote, count, num_bytes in _segments(mapping, pages):
        moved = call(mapping.pid, local.ctypes.data, 1, remote.ctypes.data, count, 0)
        if moved != num_bytes:
            why = os.strerror(ctypes.get_errno()) if moved < 0 else f"{moved} of {num_bytes} bytes"
            hint = (
                "allow ptrace of child processes (kernel.yama.ptrace_scope at most 1; in a container SYS_PTRACE)"
                if ctypes.get_errno() == errno.EPERM
                else _HINT_ENDED
            )
            raise MachineError("the guest's memory cannot be accessed", why, hint=hint)


def _segments(mapping: Mapping, pages: Pages) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64], int, int]]:
    """Yield the arguments of the system calls: one local buffer, many runs of adjacent remote pages."""
    if not len(pages.numbers):
        return
    breaks = np.flatnonzero(np.diff(pages.numbers) != 1) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(pages.numbers)])))
    for first in range(0, len(starts), _MAX_SEGMENTS):
        part = slice(first, first + _MAX_SEGMENTS)
        remote = np.empty((len(starts[part]), 2), np.uint64)
        remote[:, 0] = mapping.start + pages.numbers[starts[part]] * PAGE
        remote[:, 1] = counts[part] * PAGE
        num_bytes = int(counts[part].sum()) * PAGE
        at = pages.content.ctypes.data + int(starts[first]) * PAGE
        yield np.array([at, num_bytes], np.uint64), remote, len(remote), num_bytes
