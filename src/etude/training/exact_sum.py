"""The sum of many numbers, rounded once: the same in whatever order they come, and whoever has which.

A float64 is a whole multiple of 2^-1074, so any number of them add up to one integer of such units. The parts of a
sum that ranks have are added as integers, which nothing rounds. A part takes some hundred bytes, however many numbers
are in it. `math.fsum` gives the same number, of numbers that are all in one place.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

ExactSum = int | float
"""A sum in units of 2^-1074; a float where it is not finite."""

_UNIT = 1074
_LOWEST = -1073  # exponent of the least float64, as frexp has it
_MANTISSA, _LOW = 53, 27  # bits; the lower ones of a mantissa are added apart, so that 2^36 of them fit into 64


def exact_sum(values: torch.Tensor) -> ExactSum:
    """The sum of float64 values [N].

    >>> total(torch.tensor([1.0, float("inf")], dtype=torch.float64))
    inf
    """
    if not bool(torch.isfinite(values).all()):
        return float(values.sum())
    mantissas, exponents = torch.frexp(values.cpu())
    whole, at = (mantissas * 2.0**_MANTISSA).long(), exponents.long() - _LOWEST
    none = torch.zeros(int(at.max()) + 1 if len(at) else 0, dtype=torch.int64)
    high, low = none.index_add(0, at, whole >> _LOW), none.index_add(0, at, whole & ((1 << _LOW) - 1))
    found = 0
    for place in torch.nonzero(high | low).flatten().tolist():
        number, shift = (int(high[place]) << _LOW) + int(low[place]), place + _LOWEST - _MANTISSA + _UNIT
        found += number << shift if shift >= 0 else number >> -shift  # exact: the least numbers end in zeros
    return found


def rounded_sum(parts: Iterable[ExactSum]) -> float:
    """The sum of several sums as the nearest float64.

    >>> big, small = (torch.tensor(x, dtype=torch.float64) for x in ([1e16, 1.0], [1.0, -1e16]))
    >>> rounded([total(big), total(small)]), float(big.sum() + small.sum())
    (2.0, 0.0)
    """
    parts = list(parts)
    odd = [part for part in parts if isinstance(part, float)]
    return sum(odd) if odd else sum(map(int, parts)) / (1 << _UNIT)
