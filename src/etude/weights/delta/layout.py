"""The layout of a delta object: header, grid of tiles, pages. Also the interface of the kernels that code a tile.

A tile is a rectangle of one tensor, or a few small tensors of one dtype. Each tile is coded independently, so a reader
can fetch, verify and decode only the part that it needs. The numpy and the native kernels get the same tiles, so they
produce the same bytes. `tiles.py` codes a tile.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from etude.weights.delta.streams import Reader, damaged, varint
from etude.weights.tensors import DTYPES, Codes, DType, Spec

MAGIC = b"etd\x02"
"""The first four bytes; the last of them is the format version."""

FIXED_BYTES = 8
"""Size of the fixed part of the header: the magic, and the length of the header."""

SAME, DELTA, WHOLE, JOINED = 0, 1, 2, 3  # forms of a tensor

MAX_TILE = 1 << 23
"""Maximum number of items of a tile; limits the memory that a tile needs."""

MAX_CLASSES = 16

WHOLE_TILE = 1 << 20
"""Number of elements in a tile of a tensor that is stored in full."""

PAGE_BYTES = 1 << 18
"""A page is closed as soon as it has at least this many bytes."""

_MAX_TILE_BYTES = 1 + 4 * MAX_TILE  # of a raw tile, the longest form
_DIGEST_BYTES = 32

Counts = npt.NDArray[np.int64]
"""[256] counts by exponent."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of one tensor, as a part of a `Tile`.

    Row `r` starts at item `start + r * stride` and has `cols` items. An item is an element or one half of it
    (`tensors.DType`). `tensor`: the tensor's index in the arrays that are given with the tiles.
    """

    tensor: int
    start: int
    rows: int
    cols: int
    stride: int

    @property
    def size(self) -> int:
        """Number of items of the rectangle."""
        return self.rows * self.cols


@dataclass(frozen=True)
class Tile:
    """A part of one or several tensors that is coded independently of all others. It has the items of `pieces`, piece
    after piece, each row by row.

    An item is an element or one half of it (`tensors.DType`). Items are grouped into `classes` (1 to `MAX_CLASSES`)
    classes by the exponent of their old code. The class of an item is `high` minus the exponent, clipped to [0,
    `classes` - 1].
    """

    high: int
    classes: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Number of items of all pieces."""
        return sum(piece.size for piece in self.pieces)


class Kernels(Protocol):
    """The interface of the inner loops of the codec, in Rust (`NativeKernels`) or numpy (`NumpyKernels`).

    All arrays contain items (`tensors.to_items`), 1-D and contiguous. All tiles of a call have one dtype.
    """

    def sample(self, old: Codes, new: Codes, kind: DType, stride: int) -> tuple[Counts, Counts]:
        """Count the items, and the changed items, by the exponent of the old item. Return two arrays [256].

        Only every `stride`-th block of 64 items is counted. A last, shorter block is counted only if `stride` is 1.
        `kind`: the dtype.
        """
        ...

    def encode(self, kind: DType, tiles: Sequence[Tile], old: Sequence[Codes], new: Sequence[Codes]) -> list[bytes]:
        """Encode each tile, and return its bytes: empty for a tile in which nothing changed.

        `old[i]`, `new[i]`: the items of tensor i before and after, where i is the `tensor` of a piece.
        """
        ...

    def changes(
        self, kind: DType, tiles: Sequence[Tile], old: Sequence[Codes], payloads: Sequence[memoryview]
    ) -> list[tuple[npt.NDArray[np.uint32], Codes]]:
        """Decode each tile. Return the changed positions in the tile (uint32, ascending) and the new items there.

        `payloads`: the encoded bytes of each tile. `old[i]`: the old items of tensor i. Raises `WeightsError` for bytes
        that no encoder wrote.
        """
        ...

    def apply(
        self,
        kind: DType,
        tiles: Sequence[Tile],
        old: Sequence[Codes],
        new: Sequence[Codes],
        payloads: Sequence[memoryview],
    ) -> None:
        """Decode the tiles and write the changes into `new`, which contains the old items.

        `payloads`: the encoded bytes of each tile. If it raises `WeightsError`, for bytes that no encoder wrote, `new`
        is partly written.
        """
        ...


@dataclass(frozen=True)
class Grid:
    """How one tensor is cut into tiles, as the header stores it: each tile is a rectangle of `tile_rows` x `tile_cols`
    items.

    `high` and `classes` are those of its tiles (`Tile`).
    """

    high: int
    classes: int
    tile_rows: int
    tile_cols: int


def table_shape(spec: Spec) -> tuple[int, int]:
    """Return a tensor's shape as (rows, columns) of items: the last dimension is the columns, all others are rows.

    An item is an element or one half of it (`tensors.DType`).
    """
    cols = (spec.shape[-1] if spec.shape else 1) * DTYPES[spec.dtype].parts
    return math.prod(spec.shape[:-1]), cols


class Layout:
    """How the tensors of a delta object are cut into tiles. Tiles are numbered in the order in which they are stored.

    `forms`: for each tensor SAME (unchanged), DELTA (has tiles of its own), WHOLE (stored in full) or JOINED (shares
    the tile of a tensor before it). `grids`: tensor number -> grid, for each tensor of form DELTA. Raises
    `WeightsError` for an invalid grid.
    """

    def __init__(self, specs: Sequence[Spec], forms: Sequence[int], grids: Mapping[int, Grid]) -> None:
        self.specs, self.forms, self.grids = specs, forms, grids
        self._joined = _joined(specs, forms, grids)
        counts = [self._count(i) for i in range(len(specs))]
        ends = np.cumsum([0, *counts]).tolist()
        self._ranges = [range(start, stop) for start, stop in itertools.pairwise(ends)]
        self.num_tiles: int = ends[-1]

    def tiles(self, kind: DType) -> Iterator[tuple[int, Tile]]:
        """Yield the number and the tile of all tiles of one dtype, without those of tensors that are stored in full."""
        for tensor in self.grids:
            if self.specs[tensor].dtype == kind.name:
                for number in self._ranges[tensor]:
                    yield number, self.tile(tensor, number)

    def tile(self, tensor: int, number: int) -> Tile:
        """Return the tile with number `number`, which belongs to the tensor with number `tensor` (of form DELTA)."""
        grid, (rows, cols) = self.grids[tensor], table_shape(self.specs[tensor])
        down, right = divmod(number - self._ranges[tensor].start, -(-cols // grid.tile_cols))
        row, col = down * grid.tile_rows, right * grid.tile_cols
        height, width = min(grid.tile_rows, rows - row), min(grid.tile_cols, cols - col)
        pieces = [Piece(tensor, row * cols + col, height, width, cols)]
        for joined in self._joined.get(tensor, ()):
            size = math.prod(table_shape(self.specs[joined]))
            pieces.append(Piece(joined, 0, 1, size, size))
        return Tile(grid.high, grid.classes, tuple(pieces))

    def tiles_over(self, tensor: int, rows: range, cols: range) -> Iterator[tuple[int, Tile]]:
        """Yield the number and the tile of all tiles that contain a part of a rectangle of a tensor.

        `rows`, `cols`: the rectangle, in items. For a tensor that joined the tile of another, that tile is yielded.
        """
        host = next((host for host, joined in self._joined.items() if tensor in joined), None)
        if host is not None:
            yield self._ranges[host].start, self.tile(host, self._ranges[host].start)
            return
        grid, first = self.grids[tensor], self._ranges[tensor].start
        across = -(-table_shape(self.specs[tensor])[1] // grid.tile_cols)
        for down in range(rows.start // grid.tile_rows, -(-rows.stop // grid.tile_rows) if rows else 0):
            for right in range(cols.start // grid.tile_cols, -(-cols.stop // grid.tile_cols) if cols else 0):
                number = first + down * across + right
                yield number, self.tile(tensor, number)

    def full_tiles(self, tensor: int) -> Iterator[tuple[int, int, int]]:
        """Yield the tiles of a tensor that is stored in full: number, first element, and end (exclusive) of each."""
        size = self.specs[tensor].size
        for i, number in enumerate(self._ranges[tensor]):
            yield number, i * WHOLE_TILE, min(size, (i + 1) * WHOLE_TILE)

    def _count(self, tensor: int) -> int:
        spec = self.specs[tensor]
        if self.forms[tensor] == WHOLE:
            return -(-spec.size // WHOLE_TILE)
        return _grid_count(spec, self.grids[tensor]) if tensor in self.grids else 0


@dataclass(frozen=True)
class Header:
    """The parsed header of a delta object (a file of encoded tensors).

    `offsets` [tiles + 1]: where each tile starts in the object, in bytes; the last is the end of the object. `pages`:
    the SHA-256 of each page. A page is a run of complete tiles (`page_bounds`).
    """

    layout: Layout
    offsets: npt.NDArray[np.int64]
    pages: tuple[bytes, ...]

    def check_pages(self, start: int, data: bytes | memoryview) -> None:
        """Verify the pages (runs of tiles) in `data` by their digests. Raises `WeightsError` if one differs.

        `data` starts at byte `start` of the object, which is a page boundary, and ends at one.
        """
        bounds, view = page_bounds(self.offsets), memoryview(data)
        for (first, last), digest in zip(bounds, self.pages, strict=True):
            within = start <= first and last <= start + len(view)
            if within and hashlib.sha256(view[first - start : last - start]).digest() != digest:
                raise damaged(f"its bytes from {first} to {last} do not match their digest")


def page_bounds(offsets: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return [start, stop) of each page of a delta object, in bytes, from the offsets of its tiles.

    A page is the unit that a reader fetches and verifies. It has complete tiles and is closed as soon as it has
    `PAGE_BYTES`.
    """
    bounds = []
    start, stop = int(offsets[0]), int(offsets[-1])
    while start < stop:
        end = int(offsets[min(int(np.searchsorted(offsets, start + PAGE_BYTES)), offsets.size - 1)])
        bounds.append((start, end))
        start = end
    return bounds


def write(layout: Layout, tiles: Sequence[bytes]) -> bytes:
    """Encode a delta object: the header that describes `layout`, then the encoded tiles, given by number."""
    body = b"".join(tiles)
    offsets = np.cumsum([0, *map(len, tiles)], dtype=np.int64)
    view = memoryview(body)
    fields = [
        varint(len(layout.forms)),
        _forms_bytes(layout.forms),
        *(
            bytes((grid.high, grid.classes)) + varint(grid.tile_rows) + varint(grid.tile_cols)
            for grid in layout.grids.values()
        ),
        *(varint(len(tile)) for tile in tiles),
        *(hashlib.sha256(view[start:stop]).digest() for start, stop in page_bounds(offsets)),
    ]
    num_bytes = FIXED_BYTES + sum(map(len, fields))
    return b"".join((MAGIC, struct.pack("<I", num_bytes), *fields, body))


def header_bytes(data: bytes | memoryview) -> int:
    """Read the length of an object's header, in bytes, from its first `FIXED_BYTES` bytes. Raises `WeightsError`."""
    reader = Reader(data)
    if bytes(reader.take(len(MAGIC))) != MAGIC:
        raise damaged(f"it does not start as a delta of format {MAGIC[-1]} does")
    (num_bytes,) = struct.unpack("<I", reader.take(4))
    return int(num_bytes)


def read_header(data: bytes | memoryview, specs: Sequence[Spec]) -> Header:
    """Parse the header of a delta object. `data`: the object, or at least its header. Raises `WeightsError`.

    `specs`: dtype and shape of the object's tensors. The memory that it needs is proportional to the length of the
    header and the number of specs, even for a malformed header.
    """
    num_bytes = header_bytes(data)
    reader = Reader(Reader(data).take(num_bytes))
    reader.take(FIXED_BYTES)
    if reader.varint(len(specs)) != len(specs):
        raise damaged(f"it is not for these {len(specs)} tensors")
    packed = np.frombuffer(reader.take(-(-len(specs) // 4)), np.uint8)
    forms = (packed[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1)[: len(specs)].tolist()
    grids = {i: _read_grid(reader, specs[i]) for i, form in enumerate(forms) if form == DELTA}
    layout = Layout(specs, forms, grids)
    if layout.num_tiles > reader.left:
        raise damaged(f"{layout.num_tiles} tiles in a header of {num_bytes} bytes")
    sizes = [reader.varint(_MAX_TILE_BYTES) for _ in range(layout.num_tiles)]
    offsets = num_bytes + np.cumsum([0, *sizes], dtype=np.int64)
    pages = tuple(bytes(reader.take(_DIGEST_BYTES)) for _ in page_bounds(offsets))
    reader.end()
    return Header(layout, offsets, pages)


def _read_grid(reader: Reader, spec: Spec) -> Grid:
    high, classes = reader.byte(), reader.byte(MAX_CLASSES)
    grid = Grid(high, classes, reader.varint(1 << 42), reader.varint(1 << 42))
    rows, cols = table_shape(spec)
    if not classes or not grid.tile_rows or not grid.tile_cols:
        raise damaged("a tile without items or classes")
    if min(rows, grid.tile_rows) * min(cols, grid.tile_cols) > MAX_TILE:
        raise damaged(f"a tile of more than {MAX_TILE} items")
    return grid


def _forms_bytes(forms: Sequence[int]) -> bytes:
    padded = [*forms, 0, 0, 0]
    return bytes(sum(padded[i + j] << 2 * j for j in range(4)) for i in range(0, len(forms), 4))


def _grid_count(spec: Spec, grid: Grid) -> int:
    rows, cols = table_shape(spec)
    return -(-rows // grid.tile_rows) * -(-cols // grid.tile_cols)


def _joined(specs: Sequence[Spec], forms: Sequence[int], grids: Mapping[int, Grid]) -> dict[int, list[int]]:
    """Return, for each tensor that shares its tile (the last single-tile one of its dtype), those that joined it."""
    hosts: dict[str, int] = {}
    joined: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for i, (spec, form) in enumerate(zip(specs, forms, strict=True)):
        size = math.prod(table_shape(spec))
        if form == DELTA and _grid_count(spec, grids[i]) == 1:
            hosts[spec.dtype] = i
            sizes[i] = size
        elif form == JOINED:
            if spec.dtype not in hosts:
                raise damaged("a tensor joins a tile that does not exist")
            host = hosts[spec.dtype]
            joined.setdefault(host, []).append(i)
            sizes[host] += size
            if sizes[host] > MAX_TILE:
                raise damaged(f"a tile of more than {MAX_TILE} items")
    return joined
