"""Where things are in a delta: its header, the grid of tiles, and what a writer chooses before it codes a tile.

Both kernels, numpy's and the native ones, are given tiles by this file, and so make the same bytes. A tile is a
rectangle of one tensor, or a few small tensors of one dtype: coded by itself, so that a reader fetches, checks and
decodes the part that it needs. Knows nothing of how a tile's bits are coded (`tiles.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from etude.weights.tensors import Codes, DType

MAX_TILE = 1 << 23
"""Items of a tile: what bounds the memory that one tile needs."""

MAX_CLASSES = 16

Counts = npt.NDArray[np.int64]
"""[256] something counted by exponent."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of one tensor's items: row `r` is at `start + r * stride`, `cols` long."""

    tensor: int  # index into the arrays that go with the tiles
    start: int
    rows: int
    cols: int
    stride: int

    @property
    def size(self) -> int:
        """Items of the rectangle."""
        return self.rows * self.cols


@dataclass(frozen=True)
class Tile:
    """Items that are coded together, piece after piece, each row by row; and the classes they are coded in.

    An item's class is `high` minus the exponent of its old code, not below 0, below `classes`.
    """

    high: int
    classes: int  # 1 to MAX_CLASSES
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Items of all pieces."""
        return sum(piece.size for piece in self.pieces)


class Kernels(Protocol):
    """The inner loops. All arrays hold items (`tensors.to_items`), 1-D and contiguous; `tiles` are of one dtype."""

    def sample(self, old: Codes, new: Codes, kind: DType, stride: int) -> tuple[Counts, Counts]:
        """By exponent of the old item: how many there are, and how many of them changed.

        Counts every `stride`-th block of 64 items; a last, shorter block only where the stride is 1.
        """
        ...

    def encode(
        self, kind: DType, tiles: Sequence[Tile], old: Sequence[Codes], new: Sequence[Codes]
    ) -> list[tuple[bytes, bytes]]:
        """For each tile its coded form (from the mode byte to the escapes) and its wide bytes, not compressed.

        Both are empty for a tile in which nothing changed.
        """
        ...

    def changes(
        self, kind: DType, tiles: Sequence[Tile], old: Sequence[Codes], payloads: Sequence[tuple[memoryview, bytes]]
    ) -> list[tuple[npt.NDArray[np.uint32], Codes]]:
        """For each tile the places in it that change, in order, and the new items there.

        A payload is a coded or raw form and its wide bytes. Raises `WeightsError` for any that no writer made.
        """
        ...
