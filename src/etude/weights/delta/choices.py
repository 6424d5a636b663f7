"""The choices of the encoder, from a sample of the changes: the form of each tensor, the shape of tiles, the classes.

These choices affect only the size of a delta: a decoder accepts any of them. They use integer arithmetic only, so that
the numpy and the native kernels make the same choices and so the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from etude.errors import WeightsError, nearest
from etude.weights.delta.layout import (
    DELTA,
    JOINED,
    MAX_CLASSES,
    MAX_TILE,
    SAME,
    WHOLE,
    Counts,
    Grid,
    Kernels,
    Layout,
    table_shape,
)
from etude.weights.tensors import DTYPES, Codes, Spec

Mode = Literal["best", "fast"]
"""`best`: items are grouped into classes by their old exponent. `fast`: one class; faster to encode, and about a third
larger."""

_SAMPLE, _MAX_STRIDE = 1 << 13, 1 << 10  # minimum size of a sample; at most every 1024th block is sampled
_TILE_BITS = 1 << 18  # estimated payload of a tile
_LEAST_TILE = 1 << 16
_MOST_JOINED = 1 << 21
_WHOLE_ROW, _PART_OF_ROW = 4096, 2048  # rows up to this length are not cut; minimum columns of a tile of longer rows


@dataclass
class _Group:
    tensor: int  # the first of them
    counts: Counts  # items by exponent
    bits: int
    size: int


def check_mode(mode: str) -> None:
    """Raise `WeightsError` if `mode` is neither "best" nor "fast".

    >>> check_mode("best")
    """
    known = get_args(Mode)
    if mode not in known:
        raise WeightsError(
            f"there is no mode {mode!r:.40}", f"modes: {', '.join(known)}", hint=nearest(str(mode), known)
        )


def choose(
    new: Sequence[Codes | None], old: Sequence[Codes | None], specs: Sequence[Spec], kernels: Kernels, mode: Mode
) -> Layout:
    """Choose how the tensors of a delta are stored and cut into tiles (parts that are coded independently).

    `new[i]`, `old[i]`: the elements of tensor i, as `to_items` returns them. `new[i]` is None if the tensor does not
    change, and `old[i]` if there is no old tensor, so that the new one is stored in full. `kernels` are used to count a
    sample of the changes.
    """
    forms = [SAME] * len(specs)
    grids: dict[int, Grid] = {}
    groups: dict[str, _Group] = {}
    for i, (spec, after, before) in enumerate(zip(specs, new, old, strict=True)):
        if after is None:
            continue
        if before is None:
            forms[i] = WHOLE
            continue
        forms[i] = DELTA
        counts, bits = _sample(before, after, spec, kernels)
        grid = _grid(spec, after.size, bits, counts, mode)
        if after.size > grid.tile_rows * grid.tile_cols:  # several tiles, so it shares none
            grids[i] = grid
            continue
        group = groups.get(spec.dtype)
        if group and group.bits + bits <= _TILE_BITS and group.size + after.size <= _MOST_JOINED:
            forms[i] = JOINED
            group.counts, group.bits, group.size = group.counts + counts, group.bits + bits, group.size + after.size
        else:
            group = groups[spec.dtype] = _Group(i, counts, bits, after.size)
            grids[i] = grid
        high, classes = _classes(group.counts, mode)
        first = grids[group.tensor]
        grids[group.tensor] = Grid(high, classes, first.tile_rows, first.tile_cols)
    return Layout(specs, forms, grids)


def _sample(old: Codes, new: Codes, spec: Spec, kernels: Kernels) -> tuple[Counts, int]:
    """Estimate how many items have each exponent, and how many bits the delta will have."""
    stride = min(_MAX_STRIDE, max(1, old.size // _SAMPLE))
    counts, changed = kernels.sample(old, new, DTYPES[spec.dtype], stride)
    some = np.flatnonzero(changed)
    pairs = zip(counts[some].tolist(), changed[some].tolist(), strict=True)
    bits = sum(k * ((n // k).bit_length() + 3) for n, k in pairs)
    return counts * stride, bits * old.size // int(counts.sum())


def _grid(spec: Spec, size: int, bits: int, counts: Counts, mode: Mode) -> Grid:
    """Choose tiles of about `_TILE_BITS` of delta: smaller ones are mostly headers, larger ones hinder part readers."""
    tile = MAX_TILE
    while tile > _LEAST_TILE and tile * bits > _TILE_BITS * size:
        tile //= 2
    rows, cols = table_shape(spec)
    tile_cols = cols if cols <= _WHOLE_ROW else min(cols, max(_PART_OF_ROW, tile // rows))
    return Grid(*_classes(counts, mode), min(rows, max(1, tile // tile_cols)), tile_cols)


def _classes(counts: Counts, mode: Mode) -> tuple[int, int]:
    """Choose the exponent of the first class, and the number of classes; rare exponents are merged."""
    total = int(counts.sum())
    from_above, from_below = np.cumsum(counts[::-1])[::-1], np.cumsum(counts)
    high = int(np.flatnonzero(from_above * 256 >= total)[-1])
    low = int(np.flatnonzero(from_below * 16384 >= total)[0])
    return high, 1 if mode == "fast" else min(MAX_CLASSES, max(1, high - low + 1))
