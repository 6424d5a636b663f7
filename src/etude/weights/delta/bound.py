"""The bound that every delta is measured against, published as a formula. No coder is in it.

For each dtype, and in it for each exponent e of the *old* code, over the n(e) elements with that exponent, of which
k(e) changed, by ULP steps of magnitude m (codes in monotone order):

    positions   n(e) * H(k(e) / n(e))                  H: binary entropy
    steps       the sum over changed elements of -log2(share of m among the k(e))
                a magnitude of 256 and more is counted by its five leading bits and its length; the rest is paid raw
    signs       k(e)
    model       1/2 log2(n(e) + 1) where 0 < k(e) < n(e), and 1/2 log2(k(e) + 1) for each distinct magnitude but one

Bits, divided by 8. What is counted are items: elements, the two numbers of a packed 4-bit code, the two words of a
64-bit element (whose exponent, as that of all integers, is 0 here). Items of all tensors of a dtype are counted
together, dtypes apart. Unchanged tensors are tensors like others. A tensor without an old of its dtype and shape counts
its own bytes: there is nothing to bound.
A coder with more context can be below it: ours is, by some percent, where tensors of a dtype change at
different rates, for each of its tiles has its own. One with this context alone cannot, but for the model's cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.weights.delta.steps import exponents, steps_between
from etude.weights.tensors import DTYPES, Codes, DType, Tensor, to_items

EXACT_BITS = 8
"""Magnitudes of so many bits are symbols of their own."""

LEADING_BITS = 5
"""Of a longer magnitude, so many bits belong to its symbol."""

Floats = npt.NDArray[np.float64]


def bound_bytes(new: Sequence[Tensor], old: Sequence[Tensor | None]) -> float:
    """The bound for a delta from `old` to `new`, in bytes.

    >>> old = Tensor("u8", (64,), np.zeros(64, np.uint8))
    >>> bound_bytes([old], [old])
    0.0
    >>> bound_bytes([old], [None])
    64.0
    """
    bits = 0.0
    by_dtype: dict[str, list[tuple[Codes, Codes]]] = {}
    for after, before in zip(new, old, strict=True):
        if before is None or before.spec != after.spec:
            bits += 8 * after.num_bytes
        else:
            kind = DTYPES[after.dtype]
            by_dtype.setdefault(after.dtype, []).append((to_items(before.codes, kind), to_items(after.codes, kind)))
    return (bits + sum(_dtype_bits(DTYPES[name], pairs) for name, pairs in by_dtype.items())) / 8


def _dtype_bits(kind: DType, pairs: list[tuple[Codes, Codes]]) -> float:
    num_exponents = 1 if kind.exponent_shift is None else 1 << (kind.width - 1 - kind.exponent_shift)
    num_symbols = (1 << EXACT_BITS) + (kind.width + 1 << LEADING_BITS)
    elements = np.zeros(num_exponents, np.int64)
    joint = [np.empty(0, np.int64)]
    raw_bits = 0
    for before, after in pairs:
        exponent = exponents(before, kind)
        elements += np.bincount(exponent, minlength=num_exponents)
        where = np.flatnonzero(before != after)
        symbols, raw = _symbols(steps_between(before[where], after[where], kind)[1])
        raw_bits += raw
        joint.append(exponent[where].astype(np.int64) * num_symbols + symbols)
    steps = np.bincount(np.concatenate(joint), minlength=num_exponents * num_symbols).reshape(num_exponents, -1)
    changed = steps.sum(1)
    return (
        _entropy_bits(np.stack([changed, elements - changed], 1)) + _entropy_bits(steps) + int(changed.sum()) + raw_bits
    )


def _symbols(magnitudes: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.int64], int]:
    """[N] a symbol for each magnitude, and the raw bits that the large ones cost beside it."""
    symbols = magnitudes.astype(np.int64)
    large = symbols >> EXACT_BITS > 0
    lengths = np.frexp(symbols[large].astype(np.float64))[1]
    rest = lengths - LEADING_BITS
    symbols[large] = (1 << EXACT_BITS) + (lengths << LEADING_BITS) + (symbols[large] >> rest)
    return symbols, int(rest.sum())


def _entropy_bits(counts: npt.NDArray[Any]) -> float:
    """Order-0 bits of each row's symbols given the row, the model's cost included. [rows, symbols] counts."""
    totals = counts.sum(1, keepdims=True).astype(np.float64)
    shares: Floats = np.divide(counts, totals, out=np.ones(counts.shape), where=counts > 0)
    free = (np.count_nonzero(counts, axis=1) - 1).clip(0)
    return float(-(counts * np.log2(shares)).sum() + 0.5 * (free * np.log2(totals[:, 0] + 1)).sum())
