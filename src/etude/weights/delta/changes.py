"""What becomes of a tensor, as a list: where its elements change, and to what. Made of what tiles say of items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etude.weights.tensors import Codes, DType, from_items

Found = tuple[npt.NDArray[np.int64], Codes]
"""Positions of items in their tensor, and the new items there."""

Listed = tuple[npt.NDArray[np.uint32], Codes]
"""Places of items in their tile, and the new items there."""


@dataclass(frozen=True, eq=False)
class Changes:
    """`codes` go to `positions` of the flat tensor, which rise; all other elements stay."""

    positions: npt.NDArray[np.int64]
    codes: Codes


def of_items(found: Sequence[Found], old: Codes, kind: DType) -> Changes:
    """What tiles found in one tensor, in order of its elements; `old` is the tensor's items.

    Where one half of a code changes the other is the old one.
    """
    positions = np.concatenate([np.empty(0, np.int64), *(where for where, _ in found)])
    items = np.concatenate([np.empty(0, kind.items), *(part for _, part in found)])
    if positions.size and not (np.diff(positions) > 0).all():
        order = np.argsort(positions)
        positions, items = positions[order], items[order]
    if kind.parts == 1:
        return Changes(positions, items)
    elements = np.unique(positions // kind.parts)
    parts = old.reshape(-1, kind.parts)[elements]
    parts[np.searchsorted(elements, positions // kind.parts), positions % kind.parts] = items
    return Changes(elements, from_items(parts.reshape(-1), kind))
