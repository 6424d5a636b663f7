"""Passes a version between processes in shared memory: its tensors, and what changed in them.

An image is a sealed memfd. After `write_image`, nobody can change, shrink or grow it, and it is freed when the last
process that has it closes it or dies. So it needs no lock, no name and no clean-up, and a writer that is killed leaves
nothing behind. It exists only for a moment between processes of one machine; it is not a file format.

Layout: codes of all tensors, 64-byte aligned; after each tensor the positions and new codes of its changes; a table at
the end.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from etude.errors import WeightsError
from etude.records.completion import Version
from etude.weights.follow.follower import Update
from etude.weights.tensors import DTYPES, Codes, Tensor

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
WHOLE = -1
_ALIGNMENT = 64
_POPULATE_READ = 22  # MADV_POPULATE_READ of <linux/mman.h>, since Linux 5.14

Changes = tuple[npt.NDArray[np.int64], Codes]
_NO_CHANGES: Changes = np.empty(0, np.int64), np.empty(0, np.uint8)


@dataclass(frozen=True)
class Image:
    """A version in shared memory as its reader sees it. Every array is a read-only view that keeps the memory alive."""

    update: Update
    tensors: dict[str, Tensor]


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor and its changes are. `num_changed` is `WHOLE` if there is no list of changes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    num_changed: int
    changed_at: int


class _Table(msgspec.Struct, frozen=True):
    version: Version
    entries: list[_Entry]
    removed: tuple[str, ...]
    fetch_s: float
    fetched_bytes: int
    healed: tuple[str, ...]


def write_image(update: Update, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Write `tensors`, the version that `update` led to, to new shared memory, for `read_image` elsewhere.

    Return the file descriptor and the offset of a table. If a list of changes would be longer than its tensor, it is
    left out; readers find the tensor among the replaced ones. Raises `OSError` if the machine has not enough memory.
    """
    fd = os.memfd_create("etude-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        table_at = _fill(fd, update, tensors)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, table_at


def read_image(fd: int, table_at: int) -> Image:
    """Map the image behind a file descriptor, which the caller may close afterwards.

    `table_at`: the offset that `write_image` returned. Raises `WeightsError` if the image is not sealed.
    """
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise WeightsError("an image of weights is not sealed", hint="this is a defect of etude: please report it")
    memory = mmap.mmap(
        fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ
    )  # Linux before 6.7 cannot map a sealed file as shared
    _populate(memory)
    table = msgspec.msgpack.decode(memoryview(memory)[table_at:], type=_Table)
    tensors: dict[str, Tensor] = {}
    changed: dict[str, Changes] = {}
    for entry in table.entries:
        kind, size = DTYPES[entry.dtype].codes, math.prod(entry.shape)
        tensors[entry.name] = Tensor(entry.dtype, entry.shape, np.frombuffer(memory, kind, size, entry.at))
        if entry.num_changed > 0:
            places = np.frombuffer(memory, np.int64, entry.num_changed, entry.changed_at)
            codes_at = _aligned(entry.changed_at + places.nbytes)
            changed[entry.name] = places, np.frombuffer(memory, kind, entry.num_changed, codes_at)
    update = Update(
        version=table.version,
        changed=changed,
        replaced={entry.name: tensors[entry.name] for entry in table.entries if entry.num_changed == WHOLE},
        removed=table.removed,
        fetch_s=table.fetch_s,
        fetched_bytes=table.fetched_bytes,
        healed=table.healed,
    )
    return Image(update, tensors)


def _populate(memory: mmap.mmap) -> None:
    """Map all pages now, not in the pause, and release the GIL meanwhile, which MAP_POPULATE would hold."""
    pages = np.frombuffer(memory, np.uint8)
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(pages.size), _POPULATE_READ):
        pages[:: mmap.PAGESIZE].max(initial=0)  # an older kernel: touch each page


def _fill(fd: int, update: Update, tensors: Mapping[str, Tensor]) -> int:
    at = 0
    entries = []
    for name, tensor in tensors.items():
        tensor_at, at = at, _write(fd, at, tensor.codes)
        places, codes = update.changed.get(name, _NO_CHANGES)
        places = places.astype(np.int64, copy=False)
        whole = name in update.replaced or places.nbytes + codes.nbytes >= tensor.num_bytes > 0
        entries.append(_Entry(name, tensor.dtype, tensor.shape, tensor_at, WHOLE if whole else len(places), at))
        if not whole:
            at = _write(fd, _write(fd, at, places), codes)
    facts = update.removed, update.fetch_s, update.fetched_bytes, update.healed
    table = msgspec.msgpack.encode(_Table(update.version, entries, *facts))
    _write(fd, at, np.frombuffer(table, np.uint8))
    return at


def _write(fd: int, at: int, values: npt.NDArray[Any]) -> int:
    data = np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")
    end = at + len(data)
    while data:  # one call writes 2 GiB at most
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written
    return _aligned(end)


def _aligned(at: int) -> int:
    return -(-at // _ALIGNMENT) * _ALIGNMENT
