"""Changes of a tensor as a list: the positions of the elements that change, and their new codes. Made from the changed
items of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.weights.delta import native
from etude.weights.tensors import Codes, DType, from_items

Found = tuple[npt.NDArray[Any], Codes]
"""Positions of items in their tensor, and the new items there."""

Listed = tuple[npt.NDArray[np.uint32], Codes]
"""Places of items in their tile, and the new items there."""


@dataclass(frozen=True, eq=False)
class Changes:
    """`codes` go to `positions` of the flat tensor, which rise; all other elements stay.

    Positions are uint32, or int64 in a tensor of 2^32 elements or more: a list is what an update costs in memory.
    """

    positions: npt.NDArray[Any]
    codes: Codes


def write(codes: Codes, changes: Changes) -> None:
    """Write changes into the codes that they are of, by the native kernels where they are."""
    kernels = native.load()
    if kernels is not None and changes.positions.dtype == np.uint32 and codes.flags.c_contiguous:
        kernels.scatter([(codes, changes.positions, changes.codes)])()
    else:
        codes[changes.positions] = changes.codes


def narrow(positions: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Positions in a tensor of so many elements as `Changes` has them; themselves where they are so already."""
    return positions.astype(np.uint32 if size < 1 << 32 else np.int64, copy=False)


def of_items(found: Sequence[Found], old: Codes, kind: DType) -> Changes:
    """Make the changes of a tensor from those that were found in its tiles, in order. `old`: the items of the old
    tensor.

    Where one item of a code changes, the code's other item is taken from `old`.
    """
    positions = np.concatenate([narrow(np.empty(0, np.int64), old.size), *(where for where, _ in found)])
    items = np.concatenate([np.empty(0, kind.items), *(part for _, part in found)])
    if not (positions[1:] > positions[:-1]).all():
        order = np.argsort(positions)
        positions, items = positions[order], items[order]
    if kind.parts == 1:
        return Changes(narrow(positions, old.size), items)
    elements = np.unique(positions // kind.parts)
    parts = old.reshape(-1, kind.parts)[elements]
    parts[np.searchsorted(elements, positions // kind.parts), positions % kind.parts] = items
    return Changes(narrow(elements, old.size // kind.parts), from_items(parts.reshape(-1), kind))
