"""A 128-bit checksum of a tensor's codes. It detects accidental damage at memory speed and can be updated from a list
of changes.

The checksum is linear in the data: the effect of a change follows from the old and the new code alone. So a reader that
verified some memory once by SHA-256 can cheaply check it at every later update. Two different tensors of one dtype and
shape have the same checksum with a probability below 2^-56. It does not protect against an adversary, who can construct
data with a given checksum; that needs SHA-256. `docs/formats/checksum.md` defines it. The native kernels and numpy
compute the same values.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.weights.delta import native
from etude.weights.delta.changes import Changes
from etude.weights.tensors import Codes

BLOCK_BYTES = 1 << 13
CHECKSUM_BYTES = 16

_SHIFT = 8  # offset of the second sum's keys from those of the first, in 64-bit words
_WORD_SEED, _BLOCK_SEED = 0x6574756465207731, 0x6574756465206232
_MASK = (1 << 64) - 1
_PIECE = 64  # number of blocks that numpy sums at a time


def checksum(codes: Codes) -> str:
    """Return the checksum of codes (raw bits of elements) as 32 hex characters: two 64-bit sums over their bytes.

    >>> checksum(np.array([1, 2], np.uint16))
    '525e21bf92390720298cd3c4bbd37ac7'
    """
    return as_text(_sums(codes)[:2])


def checksums(old: Codes, new: Codes) -> tuple[str, str]:
    """Return the checksums of two arrays of codes of the same dtype and size, computed in one pass."""
    sums = _sums(old, new)
    return as_text(sums[:2]), as_text(sums[2:])


def checksums_before_after(old: Codes, changes: Changes) -> tuple[str, str]:
    """Return the checksums of a tensor before and after `changes`, without creating the changed tensor.

    `old`: the codes before. Takes one pass over `old`, or none if `changes.checksums` is set. Raises `ValueError` for
    positions that do not ascend or are out of range.
    """
    if changes.checksums is not None:
        return changes.checksums
    sums = _sums(old, changes=changes)
    return as_text(sums[:2]), as_text(sums[2:])


def as_text(sums: tuple[int, ...]) -> str:
    """Format two 64-bit sums as a checksum of 32 hex characters."""
    return b"".join(one.to_bytes(8, "little") for one in sums).hex()


def _sums(old: Codes, new: Codes | None = None, changes: Changes | None = None) -> tuple[int, ...]:
    kernels = native.load()
    if kernels is None or not (old.dtype.isnative and old.flags.c_contiguous):
        return sums_by_numpy(old, new, changes)
    if changes is None:
        return kernels.sums(old, None if new is None else np.ascontiguousarray(new))
    if changes.positions.dtype == np.uint32:
        return kernels.sums(old, None, (changes.positions, changes.codes))
    return _added(kernels.sums(part, None, lists, first) for part, lists, first in _parts(old, changes))


def _parts(
    old: Codes, changes: Changes, elements: int = 1 << 31
) -> Iterator[tuple[Codes, tuple[npt.NDArray[np.uint32], Codes], int]]:
    """Split codes that need positions above 32 bits. Yield the codes, changes and first block of each part."""
    if changes.positions.size and int(changes.positions[-1]) >= old.size:
        raise ValueError(f"position {changes.positions[-1]} is outside of {old.size}")
    for start in range(0, old.size, elements):
        first, last = np.searchsorted(changes.positions, [start, start + elements])
        places = (changes.positions[first:last] - start).astype(np.uint32)
        yield (
            old[start : start + elements],
            (places, changes.codes[first:last]),
            start * old.itemsize // BLOCK_BYTES,
        )


def _added(parts: Iterator[tuple[int, ...]]) -> tuple[int, ...]:
    total: tuple[int, ...] = (0, 0, 0, 0)
    for part in parts:
        total = tuple((a + b) & _MASK for a, b in zip(total, part, strict=True))
    return total


def sums_by_numpy(old: Codes, new: Codes | None = None, changes: Changes | None = None) -> tuple[int, ...]:
    """Compute with numpy what `NativeKernels.sums` computes: two numbers of the old codes, then two of the new.

    The new codes are `new`, or `old` with `changes` applied, or else `old`. Raises `ValueError` for positions that do
    not ascend or are out of range.
    """
    before = _numpy_sums(old)
    if new is not None:
        return *before, *_numpy_sums(new)
    if changes is None or not changes.positions.size:
        return *before, *before
    rising = (changes.positions[1:] > changes.positions[:-1]).all()
    if not rising or int(changes.positions[-1]) >= old.size:
        raise ValueError(f"positions do not ascend, or are outside of {old.size}")
    return *before, *_numpy_sums(old, changes)


def _numpy_sums(codes: Codes, changes: Changes | None = None) -> tuple[int, int]:
    """Compute the two sums of changed codes. Sums of 4096 products of 16-bit numbers are exact in float64."""
    most = _PIECE * BLOCK_BYTES // codes.itemsize
    first = second = 0
    for start in range(0, codes.size, most):
        piece = np.ascontiguousarray(codes[start : start + most], codes.dtype.newbyteorder("<"))
        if changes is not None:
            low, high = np.searchsorted(changes.positions, [start, start + most])
            piece = piece.copy()
            piece[changes.positions[low:high].astype(np.int64) - start] = changes.codes[low:high]
        octets = np.zeros(-(-piece.nbytes // BLOCK_BYTES) * BLOCK_BYTES, np.uint8)
        octets[: piece.nbytes] = piece.view(np.uint8)
        limbs = octets.view("<u2").reshape(-1, BLOCK_BYTES // 2).astype(np.float64) @ _key_limbs()
        for i, row in enumerate(limbs.astype(np.int64).tolist()):
            block = start * codes.itemsize // BLOCK_BYTES + i
            of_block = [sum(limb << 16 * k for k, limb in enumerate(row[j : j + 4])) for j in (0, 4)]
            first += (_mixed(_BLOCK_SEED, 2 * block) | 1) * of_block[0]
            second += (_mixed(_BLOCK_SEED, 2 * block + 1) | 1) * of_block[1]
    return first & _MASK, second & _MASK


@cache
def _key_limbs() -> npt.NDArray[np.float64]:
    """Return what each 16-bit limb of a block adds to each 16-bit limb of the two sums: [4096, 8]."""
    words = BLOCK_BYTES // 8
    table = np.zeros((words, 4, 2, 4), np.float64)
    keys = [_mixed(_WORD_SEED, i) for i in range(2 * (words + _SHIFT))]
    for word in range(words):
        for part in range(4):  # the four 16-bit limbs of a word
            for which in range(2):
                key = keys[2 * (word + _SHIFT * which) + part // 2] << 16 * (part % 2)
                table[word, part, which] = [key >> 16 * k & 0xFFFF for k in range(4)]
    return table.reshape(-1, 8)


def _mixed(seed: int, i: int) -> int:
    """Return the `i`th number of the splitmix64 sequence of a seed."""
    z: Any = (seed + (i + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return int(z ^ z >> 31)
