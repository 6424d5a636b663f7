"""The scale on which a change is a small number: items in monotone order, steps between them, and their exponents.

An item is sign and magnitude (or an integer); put in order, a change by one unit in the last place is one step, across
zero too. An item's exponent is what a coder knows about its chance to change. Knows nothing of tiles.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from etude.weights.tensors import Codes, DType

Numbers = npt.NDArray[np.uint32]


def to_order(items: Codes, kind: DType) -> Codes:
    """Items on a monotone scale of the same width: -inf lowest, then -0 right below +0, +inf highest; NaNs outside.

    >>> from etude.weights.tensors import DTYPES
    >>> to_order(np.array([0x8001, 0x8000, 0x0000, 0x0001], np.uint16), DTYPES["bf16"]).tolist()
    [32766, 32767, 32768, 32769]
    """
    if kind.exponent_shift is None:
        return items
    return items ^ (_ones_where_negative(items, kind) | _one(items, 1 << (kind.width - 1)))


def from_order(ordered: Codes, kind: DType) -> Codes:
    """Inverse of `to_order`."""
    if kind.exponent_shift is None:
        return ordered
    top = _one(ordered, 1 << (kind.width - 1))
    return ordered ^ (_ones_where_negative(ordered ^ top, kind) | top)


def exponents(items: Codes, kind: DType) -> npt.NDArray[np.uint8]:
    """The exponent bits of each item; 0 for an integer."""
    if kind.exponent_shift is None:
        return np.zeros(items.size, np.uint8)
    bits = kind.width - 1 - kind.exponent_shift
    exponent = (items >> _one(items, kind.exponent_shift)).astype(np.uint8)  # of more bits the lowest eight
    return exponent if bits == 8 else exponent & np.uint8((1 << bits) - 1)


def steps_between(old: Codes, new: Codes, kind: DType) -> tuple[npt.NDArray[np.bool_], Numbers]:
    """Which steps go down, and each one's size, the shorter way around the scale. [N] bool, [N] uint32."""
    lift = _one(old, 8 * old.itemsize - kind.width)  # to the top of the word, where numpy's arithmetic wraps
    steps = (to_order(new, kind) - to_order(old, kind) << lift).view(f"i{old.itemsize}")
    return steps < 0, (np.abs(steps).view(old.dtype) >> lift).astype(np.uint32, copy=False)


def step_from(old: Codes, down: npt.NDArray[np.bool_], sizes: Numbers, kind: DType) -> Codes:
    """The new items: inverse of `steps_between`."""
    step, ordered = sizes.astype(old.dtype), to_order(old, kind)
    return from_order(_within(np.where(down, ordered - step, ordered + step), kind), kind)


def _ones_where_negative(items: Codes, kind: DType) -> Codes:
    """All bits of an item, or none: its sign bit shifted in from the left."""
    lift = 8 * items.itemsize - kind.width
    ones = ((items << _one(items, lift)).view(f"i{items.itemsize}") >> (8 * items.itemsize - 1)).view(items.dtype)
    return _within(ones, kind)


def _one(like: Codes, value: int) -> np.unsignedinteger[npt.NBitBase]:
    return like.dtype.type(value)


def _within(items: Codes, kind: DType) -> Codes:
    """Modulo the width: nothing to do where numpy's own arithmetic did it."""
    return items if kind.width == 8 * items.itemsize else items & _one(items, (1 << kind.width) - 1)
