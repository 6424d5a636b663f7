"""Tables that tell the device programs where the items of tiles are.

Programs that read all items of a tile use blocks, and programs that write some of them use pieces.

A block lies in one piece of one tile. Blocks are in the order of the items of their tile. A block spans several rows
of a rectangle only if the rows are shorter than a block. The tables are computed on the device, from one row per piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from etude.weights.delta.layout import Tile
from etude.weights.gpu.memory import Items

FIELDS = ("old", "new", "start", "column", "cols", "stride", "count", "high", "classes", "place")
"""The fields of a block: addresses of its tensor in the old and new snapshot; number of its first item in the tensor;
column of that item; columns and stride of the rectangle; number of items; the tile's `high` and `classes`; position of
its first item in the tile."""

_ALIGNED = 16  # bytes of the widest load

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The items (elements) of some tiles, cut into blocks, each of which one device program reads.

    All tensors are on the device. `table` [blocks, len(FIELDS)] int64: one row per block, with the columns of `FIELDS`.
    `tile` [blocks]: the index of the block's tile. `first` [tiles]: the first block of each tile. `full` (int32): the
    numbers of the blocks that can be read without masks; `partial`: the numbers of all other blocks.
    """

    table: torch.Tensor
    tile: torch.Tensor
    first: torch.Tensor
    full: torch.Tensor
    partial: torch.Tensor

    @property
    def size(self) -> int:
        """Number of blocks."""
        return self.table.shape[0]


def cut(tiles: Sequence[Tile], old: Sequence[Items], new: Sequence[Items], width: int, block: int) -> Blocks:
    """Cut tiles (parts of tensors) into blocks of at most `block` items, each of which one device program reads.

    `old[i]`, `new[i]`: the items of tensor i in both snapshots. `width`: bits per item.
    """
    of_piece = [
        (i, tile.high, tile.classes, old[t].address, new[t].address, *shape)
        for i, tile in enumerate(tiles)
        for (t, *shape) in _shapes(tile)
    ]
    rows = torch.from_numpy(np.array(of_piece, np.int64).T.copy()).to(old[tiles[0].pieces[0].tensor].codes.device)
    cols, size = rows[7], rows[9]
    by_row = (cols >= block) & (cols < size)
    length = torch.where(by_row, cols, size)
    across = (length + (block - 1)) // block
    blocks = torch.where(by_row, size // cols.clamp(min=1), 1) * across
    ends = blocks.cumsum(0)
    piece = torch.repeat_interleave(torch.arange(len(of_piece), device=rows.device), blocks)
    tile, high, classes, before, after, start, _, cols, stride, size, base = rows[:, piece]
    number = torch.arange(piece.shape[0], device=rows.device) - (ends - blocks)[piece]
    length, across = length[piece], across[piece]
    offset = number % across * block
    count = (length - offset).clamp(max=block)
    offset += number // across * length
    column = offset % cols
    start = start + offset // cols * stride + column
    table = torch.stack([before, after, start, column, cols, stride, count, high, classes, base + offset], 1)
    unaligned = (before + start * width // 8 | after + start * width // 8) % _ALIGNED + start * width % 8
    full = (count == block) & (column + block <= cols) & (unaligned == 0)
    num_blocks = torch.zeros(len(tiles), dtype=torch.int64, device=rows.device).index_add_(0, rows[0], blocks)
    which = [flags.nonzero().view(-1).int() for flags in (full, ~full)]
    return Blocks(table.contiguous(), tile, num_blocks.cumsum(0) - num_blocks, which[0], which[1])


def pieces(tiles: Sequence[Tile], arrays: Sequence[Items]) -> tuple[Rows, Rows]:
    """Return a table of the rectangles (pieces) of all tiles, and where the pieces of each tile start in it.

    The table is [pieces, 6]: address, start, cols, stride, position in the tile, number of items. The second array is
    [tiles + 1].
    """
    table = [
        (arrays[t].address, start, cols, stride, base, size)
        for tile in tiles
        for t, start, _, cols, stride, size, base in _shapes(tile)
    ]
    firsts = np.cumsum([0, *(sum(1 for piece in tile.pieces if piece.size) for tile in tiles)])
    return np.array(table, np.int64), firsts.astype(np.int64)


def _shapes(tile: Tile) -> list[tuple[int, ...]]:
    """Return tensor, start, rows (1 for a range), cols, stride, size and position in the tile of each piece."""
    shapes: list[tuple[int, ...]] = []
    base = 0
    for piece in tile.pieces:
        rows, cols, stride = piece.rows, piece.cols, piece.stride
        if rows == 1 or cols == stride:
            rows, cols, stride = 1, piece.size, piece.size
        if piece.size:
            shapes.append((piece.tensor, piece.start, rows, cols, stride, piece.size, base))
        base += piece.size
    return shapes
