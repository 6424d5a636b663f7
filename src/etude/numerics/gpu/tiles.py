"""Tile sizes of matrix products, from widths and dtype alone, never from the number of rows.

The tile, the steps within a leaf and the number of leaves determine the order of every sum, so nothing here may depend
on the batch. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_LEAVES = 8
_ENOUGH_PROGRAMS = 64  # about half the multiprocessors of a Hopper chip: enough to read memory near its full rate
_SHORTEST_LEAF = 256


@dataclass(frozen=True)
class Tiles:
    """The tile of a matrix product that one program computes, and how its inner sum is divided.

    `rows`, `outs`: the size of the tile. `ins`: the length of one step of the inner sum. `leaves`: parts of the inner
    width, summed as a tree; a power of two up to 8. `warps`, `stages`: Triton's settings."""

    rows: int
    outs: int
    ins: int
    leaves: int = 1
    warps: int = 8
    stages: int = 3

    def shard(self, degree: int) -> Tiles:
        """Return the tile for one of `degree` ranks with a contiguous part of the inner width each.

        Its leaves are a subtree. Raises `ValueError` when the leaves cannot be divided.

        >>> Tiles(128, 128, 64, leaves=8).shard(2).leaves
        4
        """
        if degree < 1 or self.leaves % degree:
            raise ValueError(f"a tree of {self.leaves} leaves has no {degree} equal subtrees")
        return replace(self, leaves=self.leaves // degree)


def tiles_of(outs: int, ins: int, item_bytes: int, *, grouped: bool = False, degree: int = 1) -> Tiles:
    """Return the tile of a product with an [outs, ins] matrix, or with many (`grouped`).

    `item_bytes`: bytes of a number. `degree`: the number of tensor-parallel ranks that may share the inner width; there
    are at least that many leaves. A single matrix with few outputs has more leaves, so that a small batch uses the
    whole chip; products with many matrices use it in any case.

    >>> tiles_of(2048, 4096, 2).leaves, tiles_of(151936, 2048, 2).leaves, tiles_of(1536, 2048, 2, grouped=True).rows
    (4, 1, 64)
    """
    if item_bytes == 4:  # float32 runs on the ordinary cores, from registers
        tile = Tiles(64, 64, 16, warps=4, stages=2)
    elif grouped:  # an expert has few rows when decoding
        tile = Tiles(64, 128, 64, warps=4, stages=4)
    else:
        tile = Tiles(128, 128, 64, warps=8, stages=3)
    programs, leaves = -(-outs // tile.outs), 1
    while leaves < MAX_LEAVES and ins % (2 * leaves) == 0:
        useful = not grouped and programs * leaves < _ENOUGH_PROGRAMS and ins // (2 * leaves) >= _SHORTEST_LEAF
        if not (useful or leaves < degree):
            break
        leaves *= 2
    if leaves % degree:
        raise ValueError(f"an inner width of {ins} cannot be divided among {degree} ranks")
    return replace(tile, leaves=leaves)
