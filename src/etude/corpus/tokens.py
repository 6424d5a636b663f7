"""Tokens of a text as arrays, by numpy: where each is and its hash. Not those of the model's tokenizer.

A token is a word (letters, digits, underscores) or one other character that is no space. Near duplicates and held-out
texts are both found by the same tokens, so a document is divided once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from etude.corpus.hashes import U64, mixed

I64 = npt.NDArray[np.int64]
_SPACE, _LETTER, _DIGIT, _OTHER = 0, 1, 3, 2  # of a word: odd
_BLOCK = 1 << 15  # characters that are hashed at a time: their arrays fit in a cache
_BASE = 0x9E3779B97F4A7C13  # 3 modulo 4


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text. `starts_T`, `ends_T`: the first character of each, and the one after its last. `is_word_T`:
    whether it is a word; `is_name_T`: whether it is a word that does not begin with a digit.

    `chars`: the text as code points, uint8 [C] if it is ASCII, else uint32 [C]."""

    chars: npt.NDArray[np.uint8] | npt.NDArray[np.uint32]
    starts_T: I64
    ends_T: I64
    is_word_T: npt.NDArray[np.bool_]
    is_name_T: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, text: str, *, underscores: bool = True) -> Tokens:
        """Divide a text into tokens. `underscores`: whether "_" is part of a word; otherwise it is a space.

        >>> tokens = Tokens.of("x1 = f(2)")
        >>> tokens.starts_T.tolist(), tokens.ends_T.tolist(), tokens.is_name_T.tolist()
        ([0, 3, 5, 6, 7, 8], [2, 4, 6, 7, 8, 9], [True, False, True, False, False, False])
        """
        chars: npt.NDArray[np.uint8] | npt.NDArray[np.uint32]
        if text.isascii():
            chars = np.frombuffer(text.encode("ascii"), np.uint8)
        else:
            chars = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        kinds = _kinds(chars, underscores)
        is_word = (kinds & 1).astype(np.bool_)
        edges = np.zeros(len(chars) + 1, np.bool_)  # where a word begins or ends
        np.not_equal(is_word[1:], is_word[:-1], out=edges[1:-1])
        edges[[0, -1]] = is_word[[0, -1]] if len(chars) else False
        is_other = kinds == _OTHER
        starts = np.flatnonzero((edges[:-1] & is_word) | is_other)
        ends = np.flatnonzero((edges[1:] & is_word) | is_other) + 1
        return cls(chars, starts, ends, is_word[starts], kinds[starts] == _LETTER)

    def __len__(self) -> int:
        return len(self.starts_T)

    @cached_property
    def hashes_T(self) -> U64:
        """A 64-bit number for each token, equal for equal tokens: uint64 [T].

        It is a polynomial hash: each character has a random number as coefficient."""
        hashes, at = np.empty(len(self), np.uint64), 0
        while at < len(self):
            begin = self.starts_T[at]
            stop = max(at + 1, int(np.searchsorted(self.ends_T, begin + _BLOCK, "right")))
            part = self.chars[begin : self.ends_T[stop - 1]]
            values = _ASCII_NUMBERS[part] if part.dtype == np.uint8 else _numbers(part)
            powers, inverses = _powers(max(_BLOCK, len(part)))
            starts = self.starts_T[at:stop] - begin
            bounds = np.stack([starts, self.ends_T[at:stop] - begin], axis=1).ravel()
            sums = np.add.reduceat(np.append(values * powers[: len(part)], np.uint64(0)), bounds)[::2]
            hashes[at:stop] = sums * inverses[starts]
            at = stop
        return mixed(hashes)


def _numbers(chars: npt.NDArray[np.uint8] | npt.NDArray[np.uint32]) -> U64:
    return mixed(chars.astype(np.uint64) + np.uint64(1))


@lru_cache(2)
def _powers(count: int) -> tuple[U64, U64]:
    """Return the first powers of the base of the polynomial, and of its inverse modulo 2^64."""
    both = (_BASE, pow(_BASE, -1, 1 << 64))
    first, second = (np.full(count, base, np.uint64) for base in both)
    for factors in (first, second):
        factors[0] = 1
        np.cumprod(factors, out=factors)
    return first, second


def _kind(char: str) -> int:
    if char.isalnum() or char == "_":
        return _DIGIT if char.isdecimal() else _LETTER
    return _SPACE if char.isspace() else _OTHER


_ASCII_KINDS = np.array([_kind(chr(i)) for i in range(128)], np.uint8)
_ASCII_NUMBERS = _numbers(np.arange(128, dtype=np.uint32))


def _kinds(chars: npt.NDArray[np.uint8] | npt.NDArray[np.uint32], underscores: bool) -> npt.NDArray[np.uint8]:
    table = _ASCII_KINDS
    if not underscores:
        table = table.copy()
        table[ord("_")] = _SPACE
    if chars.dtype == np.uint8:
        return table[chars]
    kinds = table[np.minimum(chars, 127)]
    wide = np.flatnonzero(chars > 127)
    known, which = np.unique(chars[wide], return_inverse=True)
    kinds[wide] = np.array([_kind(chr(char)) for char in known.tolist()], np.uint8)[which]
    return kinds


class Membership:
    """A set of 64-bit hashes that quickly finds which numbers of an array are in it. Most numbers that are not need one
    look-up.

    `sorted_G`: the set, sorted; numbers may repeat."""

    def __init__(self, sorted_G: U64) -> None:
        self._sorted = sorted_G
        bits = min(28, max(12, int(len(sorted_G) * 16).bit_length()))
        self._shift = np.uint64(64 - bits)
        self._may_be = np.zeros(1 << bits, np.bool_)
        self._may_be[(sorted_G >> self._shift).astype(np.int64)] = True

    def maybe(self, hashes_D: U64) -> npt.NDArray[np.bool_]:
        """Return True for hashes that may be in the set: [D]. It is True for all that are in the set, and for a few
        that are not."""
        return self._may_be[(hashes_D >> self._shift).astype(np.int64)]

    def contains(self, hashes_D: U64) -> npt.NDArray[np.bool_]:
        """Return which hashes are in the set: [D]."""
        found = self.maybe(hashes_D)
        places = np.flatnonzero(found)
        at = np.minimum(np.searchsorted(self._sorted, hashes_D[places]), max(0, len(self._sorted) - 1))
        found[places] = self._sorted[at] == hashes_D[places]
        return found
