"""Calls the Rust kernels of the codec (`native/`) through ctypes, with the GIL released. They produce the same bytes as
the numpy kernels.

The library is stored beside this file: wheels contain it, and a build of the package compiles it if a Rust toolchain is
installed. If it is missing, `NumpyKernels` is used. Only addresses are passed, so inputs are not copied.
`native/src/abi.rs` is the Rust side of the calls.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.weights.delta.arena import allocate
from etude.weights.delta.layout import MAX_TILE, Counts, Tile
from etude.weights.delta.streams import damaged
from etude.weights.tensors import Codes, DType

ABI_VERSION = 4
LEVELS = ("portable", "avx2", "avx512")
"""Instruction sets that the kernels can use, the slowest first."""

_SUFFIX = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
LIBRARY = Path(__file__).with_name(f"libetude_native.{_SUFFIX}")

_threads = 0  # set by `set_threads`

_PIECE = np.dtype([(name, "u8") for name in ("old", "new", "rows", "cols", "stride", "first", "step")])
_TILE = np.dtype([("first_piece", "u8"), ("num_pieces", "u4"), ("high", "u1"), ("classes", "u1"), ("unused", "u2")])
_PAYLOAD = np.dtype([("start", "u8"), ("num_bytes", "u8")])
_FOUND = np.dtype([("count", "u8"), ("sums", "u8", 4)])
_SCATTER = np.dtype([(name, "u8") for name in ("to", "len", "places", "codes", "count", "width")])


class _Kind(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("bits", "shift", "exponent_mask", "width")]


class _Request(ctypes.Structure):
    _fields_ = [
        ("kind", _Kind),
        ("level", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("pieces", ctypes.c_void_p),
        ("num_pieces", ctypes.c_uint64),
        ("tiles", ctypes.c_void_p),
        ("num_tiles", ctypes.c_uint64),
    ]


class _ChecksumRequest(ctypes.Structure):
    _fields_ = [
        ("start", ctypes.c_void_p),
        ("num_bytes", ctypes.c_uint64),
        ("other", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("width", ctypes.c_uint64),
        ("first_block", ctypes.c_uint64),
        ("threads", ctypes.c_uint32),
        ("level", ctypes.c_uint32),
    ]


class _ListOutput(ctypes.Structure):
    _fields_ = [
        ("counts", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("items", ctypes.c_void_p),
        ("found", ctypes.c_void_p),
        ("summed", ctypes.c_uint64),
    ]


class _DecodeError(ctypes.Structure):
    _fields_ = [("tile", ctypes.c_uint64), ("why", ctypes.c_char * 64)]


class NativeKernels:
    """The inner loops of the codec in Rust: an implementation of `layout.Kernels`. Thread-safe.

    `threads`: number of threads that share the tiles; None: the number set by `set_threads`. `level`: one of `LEVELS`;
    None: the fastest that this machine has. `library`: the shared library to load. Raises `OSError` if the library is
    missing or of another version, `ValueError` for a level that this machine lacks.
    """

    def __init__(self, threads: int | None = None, level: str | None = None, library: Path = LIBRARY) -> None:
        self._library = _open(library)
        best = self._library.etude_best_level()
        self._level = best if level is None else LEVELS.index(level)
        if self._level > best:
            raise ValueError(f"this machine has no {level}; its best is {LEVELS[best]}")
        self._threads, self._cores = threads, len(os.sched_getaffinity(0))

    @property
    def level(self) -> str:
        """The instruction set in use: one of `LEVELS`."""
        return LEVELS[self._level]

    @property
    def threads(self) -> int:
        """Maximum number of threads that share the work."""
        return self._threads or _threads or self._cores

    def sample(self, old: Codes, new: Codes, kind: DType, stride: int) -> tuple[Counts, Counts]:
        counts = np.zeros((2, 256), np.int64)
        _aligned(old, new)
        refused = self._library.etude_sample(
            ctypes.byref(_kind(kind)), old.ctypes.data, new.ctypes.data, old.size, stride,
            counts[0].ctypes.data, counts[1].ctypes.data,
        )  # fmt: skip
        assert not refused, "a dtype that the native kernels do not have"
        return counts[0], counts[1]

    def encode(self, kind: DType, tiles: Sequence[Tile], old: Sequence[Codes], new: Sequence[Codes]) -> list[bytes]:
        if not tiles:
            return []
        request = _RequestTables(self, kind, tiles, old, new)
        sizes = np.zeros(len(tiles), np.uint64)
        made = self._library.etude_encode(request.reference, sizes.ctypes.data)
        assert made, "a request that the native kernels do not take"
        coded = np.empty(int(sizes.sum()), np.uint8)
        self._library.etude_encoded_take(made, coded.ctypes.data)
        ends = np.cumsum(sizes).astype(np.intp)
        return [part.tobytes() for part in np.split(coded, ends[:-1])]

    def changes(
        self, kind: DType, tiles: Sequence[Tile], old: Sequence[Codes], payloads: Sequence[memoryview]
    ) -> list[tuple[npt.NDArray[np.uint32], Codes]]:
        if not tiles:
            return []
        lists = self._list(_RequestTables(self, kind, tiles, old, old), kind, payloads, summed=False)
        ends = np.cumsum(lists.counts)[:-1].astype(np.intp)
        return list(zip(np.split(lists.places, ends), np.split(lists.items, ends), strict=True))

    def changes_of_tensors(
        self, kind: DType, tiles: Sequence[Tile], old: Sequence[Codes], payloads: Sequence[memoryview]
    ) -> Iterator[tuple[int, npt.NDArray[np.uint32], Codes, tuple[int, ...]]]:
        """Decode complete tensors to lists of changes, with checksums. Reads the old items once and copies nothing.

        Yields per tensor: its number, the changed positions, the new items there, and four numbers. These are what
        `sums` computes for the items before and after the changes.

        `tiles`: all tiles of these tensors, in the order of their layout. `payloads`: the encoded bytes of each; empty
        if nothing changes in the tile. Positions are relative to the tensor and ascend within a tile. Each tensor has
        one item per code and at most 2^32 items. Raises `WeightsError` for bytes that no encoder wrote.
        """
        if not tiles:
            return
        lists = self._list(_RequestTables(self, kind, tiles, old, old, in_tensors=True), kind, payloads, summed=True)
        numbers = np.array([piece.tensor for tile in tiles for piece in tile.pieces])
        firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
        ends = np.cumsum(np.add.reduceat(lists.found["count"], firsts)).tolist()
        sums = np.add.reduceat(lists.found["sums"], firsts, axis=0).tolist()
        for number, start, stop, four in zip(numbers[firsts].tolist(), [0, *ends], ends, sums, strict=False):
            yield number, lists.places[start:stop], lists.items[start:stop], tuple(four)

    def _list(self, request: _RequestTables, kind: DType, payloads: Sequence[memoryview], *, summed: bool) -> _Lists:
        payload_table, error = _PayloadTable(payloads), _DecodeError()
        counts = np.zeros(len(payloads), np.uint64)
        refused = self._library.etude_count(
            request.reference, payload_table.table.ctypes.data, counts.ctypes.data, ctypes.byref(error)
        )
        if not refused:
            total = int(counts.sum())
            found = np.zeros(request.num_pieces, _FOUND)
            lists = _Lists(counts, allocate(total, np.dtype(np.uint32)), allocate(total, kind.items), found)
            output = _ListOutput(
                counts.ctypes.data, lists.places.ctypes.data, lists.items.ctypes.data, found.ctypes.data, summed
            )
            refused = self._library.etude_list(
                request.reference, payload_table.table.ctypes.data, ctypes.byref(output), ctypes.byref(error)
            )
        if refused:
            raise damaged(f"tile {error.tile}: {error.why.decode()}")
        return lists

    def apply(
        self,
        kind: DType,
        tiles: Sequence[Tile],
        old: Sequence[Codes],
        new: Sequence[Codes],
        payloads: Sequence[memoryview],
    ) -> None:
        """Decode the tiles and write the changes into `new`, which contains the old items or *is* `old`.

        No list of changes is created. Raises `WeightsError` for bytes that no encoder wrote; `new` is then partly
        written, so never pass live weights.
        """
        for items in new:
            assert items.flags.writeable
        request, payload_table, error = (
            _RequestTables(self, kind, tiles, old, new),
            _PayloadTable(payloads),
            _DecodeError(),
        )
        if self._library.etude_apply(request.reference, payload_table.table.ctypes.data, ctypes.byref(error)):
            raise damaged(f"tile {error.tile}: {error.why.decode()}")

    def scatter(
        self, rows: Sequence[tuple[npt.NDArray[Any], npt.NDArray[np.uint32], npt.NDArray[Any]]], *, threads: int = 1
    ) -> Callable[[], None]:
        """Return a function that writes the codes of each row to their positions, with `threads` threads.

        A row is (flat memory, positions, codes). The function can be called repeatedly. With several threads, no two
        rows may refer to the same memory. All checks are made before this returns: raises `ValueError` for arrays that
        do not fit together or a position that is out of range.
        """
        for memory, places, codes in rows:
            flat = all(
                one.ndim == 1 and one.flags.c_contiguous and one.flags.aligned for one in (memory, places, codes)
            )
            same = memory.dtype == codes.dtype and len(places) == len(codes) and places.dtype == np.uint32
            if not (flat and same and memory.flags.writeable):
                raise ValueError(f"{codes.dtype} {codes.shape} do not fit {places.dtype} places of {memory.dtype}")
            if len(places) and int(places.max()) >= len(memory):
                raise ValueError(f"position {places.max()} is outside of {len(memory)}")
        table = np.array(
            [(m.ctypes.data, m.size, p.ctypes.data, c.ctypes.data, c.size, c.itemsize) for m, p, c in rows], _SCATTER
        )
        held = list(rows)

        def write() -> None:
            refused = self._library.etude_scatter(table.ctypes.data, len(held), threads)
            assert not refused, "what was checked does not change"

        return write

    def sums(
        self,
        old: Codes,
        new: Codes | None = None,
        changes: tuple[npt.NDArray[np.uint32], Codes] | None = None,
        first_block: int = 0,
    ) -> tuple[int, ...]:
        """Compute the sums of which a checksum consists: two of the old codes, then two of the new codes.

        The new codes are `new`, or `old` with `changes` (ascending positions, codes) applied, or else `old`.
        `first_block`: if `old` is a part of a tensor, the number of its first block in the tensor. Raises `ValueError`
        for positions that do not ascend or are out of range.
        """
        _aligned(old, *(() if new is None else (new,)))
        places, codes = changes or (np.empty(0, np.uint32), np.empty(0, old.dtype))
        if (new is not None and new.nbytes != old.nbytes) or codes.dtype != old.dtype or places.dtype != np.uint32:
            raise ValueError(f"{codes.dtype} codes at {places.dtype} places do not fit into {old.dtype} codes")
        places, codes = np.ascontiguousarray(places), np.ascontiguousarray(codes)
        request = _ChecksumRequest(
            old.ctypes.data, old.nbytes, None if new is None else new.ctypes.data,
            places.ctypes.data, codes.ctypes.data, places.size, old.itemsize, first_block, self.threads, self._level,
        )  # fmt: skip
        found = np.zeros(4, np.uint64)
        if places.size != codes.size or self._library.etude_checksum(ctypes.byref(request), found.ctypes.data):
            raise ValueError(f"positions do not ascend, or are outside of {old.size}")
        return tuple(found.tolist())

    def count_changed(self, old: Codes, new: Codes) -> int:
        """Count the codes that differ, in one pass and one thread. Benchmarks compare encoding with it."""
        _aligned(old, new)
        count: int = self._library.etude_count_changed(old.ctypes.data, new.ctypes.data, old.size, old.itemsize)
        return count


def set_threads(count: int) -> None:
    """Set the number of threads of this process's native kernels; 0: the number of cores that it may use.

    Takes effect at the next call. Kernels that were created with a fixed number keep it.
    """
    global _threads
    _threads = count


@cache
def load() -> NativeKernels | None:
    """Return the native kernels; None if they cannot be loaded (`why_not` returns the reason)."""
    return None if why_not() else NativeKernels()


@cache
def why_not() -> str:
    """Return the reason why the native kernels cannot be loaded; empty if they can."""
    try:
        _open(LIBRARY)
    except OSError as error:
        return f"no native kernels ({error}): numpy is used, about 20 times slower, with the same results"
    return ""


class _RequestTables:
    """The arguments of a call and the tables that they point to. The object must outlive the call.

    `in_tensors`: positions of changes are relative to the tensor, else to the tile.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        kind: DType,
        tiles: Sequence[Tile],
        old: Sequence[Codes],
        new: Sequence[Codes],
        *,
        in_tensors: bool = False,
    ) -> None:
        _aligned(*old, *new)
        starts = [[items.ctypes.data for items in arrays] for arrays in (old, new)]
        width = kind.items.itemsize
        rows: list[tuple[int, ...]] = []
        for tile in tiles:
            base = 0
            for piece in tile.pieces:
                of, start, stride = piece.tensor, piece.start, piece.stride
                end = start + (piece.rows - 1) * stride + piece.cols if piece.size else start
                if not 0 <= start <= end <= min(old[of].size, new[of].size) or piece.size > MAX_TILE:
                    raise ValueError(f"a piece from {start} to {end} is outside of tensor {of}, or is too large")
                first = (start, stride) if in_tensors else (base, piece.cols)
                memory = (addresses[of] + start * width for addresses in starts)
                rows.append((*memory, piece.rows, piece.cols, stride, *first))
                base += piece.size
        self._pieces = np.array(rows, _PIECE)
        firsts = np.cumsum([0, *(len(tile.pieces) for tile in tiles)])
        self._tiles = np.array(
            [(first, len(tile.pieces), tile.high, tile.classes, 0) for first, tile in zip(firsts, tiles, strict=False)],
            _TILE,
        )
        self._request = _Request(
            _kind(kind), kernels._level, kernels.threads,
            self._pieces.ctypes.data, self._pieces.size, self._tiles.ctypes.data, self._tiles.size,
        )  # fmt: skip
        self.reference = ctypes.byref(self._request)

    @property
    def num_pieces(self) -> int:
        return self._pieces.size


class _PayloadTable:
    """The table of payloads. Keeps the bytes alive that it points to."""

    def __init__(self, payloads: Sequence[memoryview]) -> None:
        self._held = [np.frombuffer(payload, np.uint8) for payload in payloads]
        self.table = np.array([(held.ctypes.data, held.size) for held in self._held], _PAYLOAD)


@dataclass(frozen=True)
class _Lists:
    """Changes, tile after tile."""

    counts: npt.NDArray[np.uint64]  # [tiles] number of changes
    places: npt.NDArray[np.uint32]
    items: Codes
    found: npt.NDArray[Any]  # [pieces] of `_FOUND`


def _kind(kind: DType) -> _Kind:
    shift = kind.exponent_shift or 0
    mask = 0 if kind.exponent_shift is None else (1 << (kind.width - 1 - shift)) - 1
    return _Kind(kind.width, shift, mask, kind.items.itemsize)


def _aligned(*arrays: Codes) -> None:
    for items in arrays:
        assert items.ndim == 1
        assert items.flags.c_contiguous
        assert items.flags.aligned


def _open(path: Path) -> Any:
    library = ctypes.CDLL(str(path))
    try:
        version = library.etude_abi_version()
    except AttributeError:
        version = None
    if version != ABI_VERSION:
        raise OSError(f"{path.name} has interface {version}, not {ABI_VERSION}: rebuild it")
    pointer, count = ctypes.c_void_p, ctypes.c_uint64
    for name, result, arguments in (
        ("etude_best_level", ctypes.c_uint32, ()),
        ("etude_sample", ctypes.c_uint32, (pointer, pointer, pointer, count, count, pointer, pointer)),
        ("etude_encode", pointer, (pointer, pointer)),
        ("etude_encoded_take", None, (pointer, pointer)),
        ("etude_count", ctypes.c_uint32, (pointer, pointer, pointer, pointer)),
        ("etude_list", ctypes.c_uint32, (pointer, pointer, pointer, pointer)),
        ("etude_apply", ctypes.c_uint32, (pointer, pointer, pointer)),
        ("etude_count_changed", count, (pointer, pointer, count, ctypes.c_uint32)),
        ("etude_scatter", ctypes.c_uint32, (pointer, count, ctypes.c_uint32)),
        ("etude_checksum", ctypes.c_uint32, (pointer, pointer)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
