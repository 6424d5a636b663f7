"""The changes of a tensor as a list: the positions of the elements that change, and their new codes (bits)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.weights.delta import native
from etude.weights.tensors import Codes, DType, Tensor, from_items

Found = tuple[npt.NDArray[Any], Codes]
"""Positions of items in their tensor, and the new items there."""

Listed = tuple[npt.NDArray[np.uint32], Codes]
"""Positions of items in their tile, and the new items there."""


@dataclass(frozen=True, eq=False, slots=True)
class Changes:
    """The changed elements of a tensor: `codes[i]` (the new bits of an element) is written at `positions[i]`.

    `positions` are indices into the flat tensor, ascending: uint32, or int64 for a tensor of 2^32 elements or more.
    `checksums`: checksums of the tensor before and after the changes, if they were computed with the list.
    """

    positions: npt.NDArray[Any]
    codes: Codes
    checksums: tuple[str, str] | None = None


def write(rows: Iterable[tuple[Codes, Changes]]) -> None:
    """Write changes into arrays in place.

    `rows`: pairs of a flat array of codes and the changes to write to it. The arrays must not overlap. Uses the native
    kernels, in parallel, if they are available.
    """
    kernels, rows = native.load(), list(rows)
    if kernels is not None:
        native_rows = [(codes, one.positions, one.codes) for codes, one in rows if _are_native(codes, one)]
        rows = [(codes, one) for codes, one in rows if not _are_native(codes, one)]
        kernels.scatter(native_rows, threads=kernels.threads)()
    for codes, one in rows:
        codes[one.positions] = one.codes


def apply_changes(old: Tensor | None, one: Changes | Tensor) -> Tensor:
    """Apply a change to a tensor and return the result: `old` itself if nothing changes, else a new tensor.

    `one` is a list of changes of `old`, or the complete new tensor; `old` may be None only for the latter.
    """
    if isinstance(one, Tensor):
        return one
    assert old is not None, "changes are of a tensor that is held"
    if not one.positions.size:
        return old
    codes = old.codes.copy()
    write([(codes, one)])
    return Tensor(old.dtype, old.shape, codes)


def narrow(positions: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Convert positions to the dtype that `Changes` uses for a tensor of `size` elements.

    It is uint32, or int64 from 2^32 elements on. The same array is returned if it has that dtype already.
    """
    return positions.astype(np.uint32 if size < 1 << 32 else np.int64, copy=False)


def sort_by_position(changes: Changes) -> Changes:
    """Return the same changes, sorted by position."""
    if (changes.positions[1:] > changes.positions[:-1]).all():
        return changes
    order = np.argsort(changes.positions)
    return Changes(changes.positions[order], changes.codes[order], changes.checksums)


def of_items(found: Sequence[Found], old: Codes, kind: DType) -> Changes:
    """Combine the changed items of a tensor's tiles into the changes of the tensor.

    A tile is a part of a tensor that is coded alone. An item is a code, or one half of a code for dtypes with two parts
    (`DType`). `found`: for each tile, the positions of its changed items in the tensor and the new items. `old`: all
    items of the old tensor. If only one half of a code changes, the other half is taken from `old`.
    """
    positions = np.concatenate([narrow(np.empty(0, np.int64), old.size), *(where for where, _ in found)])
    items = sort_by_position(
        Changes(positions, np.concatenate([np.empty(0, kind.items), *(part for _, part in found)]))
    )
    if kind.parts == 1:
        return Changes(narrow(items.positions, old.size), items.codes)
    elements = np.unique(items.positions // kind.parts)
    parts = old.reshape(-1, kind.parts)[elements]
    parts[np.searchsorted(elements, items.positions // kind.parts), items.positions % kind.parts] = items.codes
    return Changes(narrow(elements, old.size // kind.parts), from_items(parts.reshape(-1), kind))


def _are_native(codes: Codes, changes: Changes) -> bool:
    return changes.positions.dtype == np.uint32 and codes.flags.c_contiguous
