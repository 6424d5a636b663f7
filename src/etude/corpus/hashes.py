"""Hashes that are the same in every process and on every machine: of texts, of token sequences, of keys."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
FACTOR = np.uint64(_GOLDEN)
"""Of a sequence's hash, when its next number is added."""


def mixed(values: U64) -> U64:
    """Return a bijective mix of 64-bit numbers, element by element (the finaliser of SplitMix64).

    >>> hex(int(mixed(np.array([1], np.uint64))[0]))
    '0x5692161d100b05e5'
    """
    h: U64 = values ^ (values >> np.uint64(30))
    h = h * np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(27)
    h = h * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def numbers(count: int, seed: int) -> U64:
    """Return `count` pseudo-random 64-bit numbers that depend on `seed` only (SplitMix64)."""
    start = np.uint64((seed * _GOLDEN) & _MASK)
    return mixed(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN))


def text_key(*parts: object) -> int:
    """Return a 64-bit hash of the parts, each converted to text."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def codes(tokens: Sequence[str]) -> U64:
    """Return a 64-bit number for each token, equal for equal tokens: [T]."""
    known = {token: zlib.crc32(token.encode("utf-8", "surrogatepass")) for token in set(tokens)}
    return mixed(np.fromiter(map(known.__getitem__, tokens), np.uint64, len(tokens)))


def rolling(values: U64, width: int) -> U64:
    """Return one hash for each window of `width` numbers: [T - width + 1].

    A shorter sequence gives one hash, and an empty one gives none."""
    width = min(width, len(values))
    if not width:
        return np.zeros(0, np.uint64)
    count = len(values) - width + 1
    total = np.zeros(count, np.uint64)
    for offset in range(width):
        total = total * FACTOR + values[offset : offset + count]
    return mixed(total)
