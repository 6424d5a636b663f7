"""Exact sums of floating-point numbers, rounded once: independent of order and of who holds which numbers.

A float64 is an integer multiple of 2^-1074, so the sum of any number of them is one integer in this unit. Ranks add
their partial sums as integers, without rounding. A partial sum takes some hundred bytes. `math.fsum` gives the same
result for numbers in one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

ExactSum = int | float
"""A sum in units of 2^-1074; a float where it is not finite."""

_UNIT = 1074
_LOWEST = -1073  # exponent of the least float64, as frexp has it
_MANTISSA, _LOW = (
    53,
    27,
)  # bits; the lower bits of mantissas are added separately, so that 2^36 of them fit into 64 bits


def exact_sum(values: torch.Tensor) -> ExactSum:
    """Return the sum of float64 values [N] as an integer in units of 2^-1074, or a float if it is not finite.

    >>> exact_sum(torch.tensor([1.0, float("inf")], dtype=torch.float64))
    inf
    """
    if not bool(torch.isfinite(values).all()):
        return float(values.sum())
    mantissas, exponents = torch.frexp(values.cpu())
    integers, at = (mantissas * 2.0**_MANTISSA).long(), exponents.long() - _LOWEST
    zeros = torch.zeros(int(at.max()) + 1 if len(at) else 0, dtype=torch.int64)
    high, low = zeros.index_add(0, at, integers >> _LOW), zeros.index_add(0, at, integers & ((1 << _LOW) - 1))
    found = 0
    for place in torch.nonzero(high | low).flatten().tolist():
        number, shift = (int(high[place]) << _LOW) + int(low[place]), place + _LOWEST - _MANTISSA + _UNIT
        found += number << shift if shift >= 0 else number >> -shift  # exact: the least numbers end in zeros
    return found


def rounded_sum(parts: Iterable[ExactSum]) -> float:
    """Return the sum of several exact sums, rounded to float64.

    >>> big, small = (torch.tensor(x, dtype=torch.float64) for x in ([1e16, 1.0], [1.0, -1e16]))
    >>> rounded_sum([exact_sum(big), exact_sum(small)]), float(big.sum() + small.sum())
    (2.0, 0.0)
    """
    parts = list(parts)
    odd = [part for part in parts if isinstance(part, float)]
    return sum(odd) if odd else sum(map(int, parts)) / (1 << _UNIT)


def exact_norm(squares: Mapping[str, torch.Tensor]) -> float:
    """Return the square root of the sum of all given squares (float64, by parameter), rounded once."""
    return math.sqrt(rounded_sum([exact_sum(torch.cat(list(squares.values())))]))
