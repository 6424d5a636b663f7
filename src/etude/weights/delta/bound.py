"""The size bound that every delta is compared with: a formula, independent of any coder.

The formula treats each dtype separately, and within it each exponent e of the *old* code. n(e) is the number of
elements with that exponent, k(e) the number of them that changed, and m the magnitude of a change in ULP steps (codes
in monotone order):

    positions   n(e) * H(k(e) / n(e))                  H: binary entropy
    steps       the sum over changed elements of -log2(share of m among the k(e))
                a magnitude of 256 and more is counted by its five leading bits and its length; the rest is paid raw
    signs       k(e)
    model       1/2 log2(n(e) + 1) where 0 < k(e) < n(e), and 1/2 log2(k(e) + 1) for each distinct magnitude but one

The result is in bits; divided by 8 it is the bound in bytes. The formula counts items: elements, the two numbers of a
packed 4-bit code, or the two 32-bit words of a 64-bit element (64-bit elements and integers have exponent 0 here). It
pools all tensors of one dtype, unchanged ones included. A tensor without an old tensor of the same dtype and shape
counts its own bytes.

A coder that uses more context can be smaller than this bound. etude's coder is, by some percent, if tensors of one
dtype change at different rates, since each tile adapts. A coder that uses only the exponent cannot be, except for the
model cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.weights.delta.ulp_steps import exponents, steps_between
from etude.weights.tensors import DTYPES, Codes, DType, Tensor, to_items

EXACT_BITS = 8
"""Magnitudes of at most this many bits are symbols of their own."""

LEADING_BITS = 5
"""For a longer magnitude, this many leading bits are part of its symbol."""

Floats = npt.NDArray[np.float64]


def bound_bytes(new: Sequence[Tensor], old: Sequence[Tensor | None]) -> float:
    """Compute how many bytes a delta from `old` to `new` needs at least, for a coder that uses only the old exponents.

    The formula is in the text of this module. `new[i]` and `old[i]` are one tensor. None, or another dtype or shape,
    means that there is no old tensor; then `new[i]` counts with its full size.

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
    """Map magnitudes [N] to symbols [N]; also return the number of raw bits of the large ones."""
    symbols = magnitudes.astype(np.int64)
    large = symbols >> EXACT_BITS > 0
    lengths = np.frexp(symbols[large].astype(np.float64))[1]
    rest = lengths - LEADING_BITS
    symbols[large] = (1 << EXACT_BITS) + (lengths << LEADING_BITS) + (symbols[large] >> rest)
    return symbols, int(rest.sum())


def _entropy_bits(counts: npt.NDArray[Any]) -> float:
    """Return the order-0 entropy of each row, in bits, summed over the rows, plus the model cost.

    `counts`: [rows, symbols].
    """
    totals = counts.sum(1, keepdims=True).astype(np.float64)
    shares: Floats = np.divide(counts, totals, out=np.ones(counts.shape), where=counts > 0)
    free = (np.count_nonzero(counts, axis=1) - 1).clip(0)
    return float(-(counts * np.log2(shares)).sum() + 0.5 * (free * np.log2(totals[:, 0] + 1)).sum())
