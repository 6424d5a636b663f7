"""The distance of two codes in ULP steps: a monotone order of items, the steps between them, and their exponents.

An item is sign and magnitude, or an integer. In monotone order, a change by one unit in the last place is one step,
also across zero. The exponent of an item predicts how likely it changes. Knows nothing of tiles.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from etude.weights.tensors import Codes, DType

Numbers = npt.NDArray[np.uint32]


def to_order(items: Codes, kind: DType) -> Codes:
    """Map items to unsigned integers in the order of the floats that they stand for.

    -inf is lowest, -0 directly below +0, +inf highest; NaNs are outside of this range. Integers stay as they are.

    >>> from etude.weights.tensors import DTYPES
    >>> to_order(np.array([0x8001, 0x8000, 0x0000, 0x0001], np.uint16), DTYPES["bf16"]).tolist()
    [32766, 32767, 32768, 32769]
    """
    if kind.exponent_shift is None:
        return items
    return items ^ (_ones_where_negative(items, kind) | _one(items, 1 << (kind.width - 1)))


def from_order(ordered: Codes, kind: DType) -> Codes:
    """Map the integers from `to_order` back to items."""
    if kind.exponent_shift is None:
        return ordered
    top = _one(ordered, 1 << (kind.width - 1))
    return ordered ^ (_ones_where_negative(ordered ^ top, kind) | top)


def exponents(items: Codes, kind: DType) -> npt.NDArray[np.uint8]:
    """Return the exponent bits of each item (the bits of a float of type `kind`), [N] uint8; 0 for integers."""
    if kind.exponent_shift is None:
        return np.zeros(items.size, np.uint8)
    bits = kind.width - 1 - kind.exponent_shift
    exponent = (items >> _one(items, kind.exponent_shift)).astype(np.uint8)  # the lowest eight bits, if there are more
    return exponent if bits == 8 else exponent & np.uint8((1 << bits) - 1)


def steps_between(old: Codes, new: Codes, kind: DType) -> tuple[npt.NDArray[np.bool_], Numbers]:
    """Return how many ULP steps (steps between neighbouring floats) lead from each old item to its new one, as
    directions and sizes.

    The first result, [N] bool, says whether the step goes down. The second, [N] uint32, is its size. Stepping beyond
    the largest value leads to the smallest one, and the shorter of the two ways is taken.
    """
    lift = _one(old, 8 * old.itemsize - kind.width)  # shift to the top of the word, so that numpy's arithmetic wraps
    steps = (to_order(new, kind) - to_order(old, kind) << lift).view(f"i{old.itemsize}")
    return steps < 0, (np.abs(steps).view(old.dtype) >> lift).astype(np.uint32, copy=False)


def step_from(old: Codes, down: npt.NDArray[np.bool_], sizes: Numbers, kind: DType) -> Codes:
    """Return the new items, given the old ones and the steps: the inverse of `steps_between`."""
    step, ordered = sizes.astype(old.dtype), to_order(old, kind)
    return from_order(_within(np.where(down, ordered - step, ordered + step), kind), kind)


def _ones_where_negative(items: Codes, kind: DType) -> Codes:
    """Return all ones for an item with a set sign bit, else 0."""
    lift = 8 * items.itemsize - kind.width
    ones = ((items << _one(items, lift)).view(f"i{items.itemsize}") >> (8 * items.itemsize - 1)).view(items.dtype)
    return _within(ones, kind)


def _one(like: Codes, value: int) -> np.unsignedinteger[npt.NBitBase]:
    return like.dtype.type(value)


def _within(items: Codes, kind: DType) -> Codes:
    """Reduce items modulo their width. Needed only if the width is below that of numpy's dtype."""
    return items if kind.width == 8 * items.itemsize else items & _one(items, (1 << kind.width) - 1)
