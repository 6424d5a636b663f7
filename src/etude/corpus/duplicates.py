"""Duplicates over all pieces of a build: exact ones by digest, near ones by MinHash signatures."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from etude import progress
from etude.corpus.hashes import U64
from etude.corpus.near import candidate_pairs, near_duplicates, shingles
from etude.corpus.pieces import Pieces

_CACHED_BYTES = 8 << 20


@dataclass(frozen=True)
class Duplicates:
    """The duplicates among N documents.

    `earlier_N`: for each document the index of the earlier one that it repeats, or -1. `is_exact_N`: whether it repeats
    that one exactly."""

    earlier_N: npt.NDArray[np.int64]
    is_exact_N: npt.NDArray[np.bool_]

    @property
    def kept_N(self) -> npt.NDArray[np.bool_]:
        """bool [N]: True for documents that repeat no earlier one, and so are kept."""
        return self.earlier_N < 0

    @property
    def by_reason(self) -> dict[str, npt.NDArray[np.bool_]]:
        """For each reason to drop a duplicate, which documents it applies to: bool [N]."""
        return {"exact-duplicate": self.is_exact_N, "near-duplicate": ~self.is_exact_N & ~self.kept_N}

    @classmethod
    def find(cls, pieces: Pieces, threshold: float) -> Duplicates:
        """Find the duplicates among all documents. Of equal or similar documents, the first is kept.

        `threshold`: the Jaccard similarity from which two documents are near duplicates. The result of an earlier call
        is used again."""
        path = pieces.work / "duplicates.npz"
        if path.exists():
            with np.load(path) as file:
                return cls(file["earlier"], file["is_exact"])
        earlier = _exact(pieces.exact_N2)
        is_exact = earlier >= 0
        is_compared = ~is_exact & ~pieces.is_recorded_N  # rollouts of a task have its prompt in common
        unique = np.flatnonzero(is_compared)

        def shingles_of(index: int) -> U64:
            progress.tick()
            piece, place = pieces.find(int(unique[index]))
            return shingles(piece.text(place))

        if len(unique):
            pairs = candidate_pairs(_signatures(pieces, is_compared), threshold)
            near = near_duplicates(len(unique), pairs, _Recent(shingles_of), threshold)
            earlier[unique[near >= 0]] = unique[near[near >= 0]]
        scratch = path.with_name("duplicates.tmp.npz")
        np.savez(scratch, earlier=earlier, is_exact=is_exact)
        scratch.replace(path)
        return cls(earlier, is_exact)


class _Recent:
    """Caches the most recently used results of a function, up to `_CACHED_BYTES` but at least two.

    A limit in documents would keep too little of small documents, and too much of large ones."""

    def __init__(self, function: Callable[[int], U64]) -> None:
        self._function, self._kept, self._bytes = function, OrderedDict[int, U64](), 0

    def __call__(self, index: int) -> U64:
        if index in self._kept:
            self._kept.move_to_end(index)
            return self._kept[index]
        result = self._kept[index] = self._function(index)
        self._bytes += result.nbytes
        while self._bytes > _CACHED_BYTES and len(self._kept) > 2:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return result


def _exact(digests_N2: U64) -> npt.NDArray[np.int64]:
    """Return for each document the first one with its digest, or -1 for the first itself."""
    earlier = np.full(len(digests_N2), -1, np.int64)
    order = np.lexsort((digests_N2[:, 1], digests_N2[:, 0]))
    ordered = digests_N2[order]
    is_first = np.concatenate([[True], (ordered[1:] != ordered[:-1]).any(axis=1)])[: len(ordered)]
    firsts = order[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))]
    earlier[order[~is_first]] = firsts[~is_first]
    return earlier


def _signatures(pieces: Pieces, wanted_N: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """Return the signatures of the wanted documents, as a file that is mapped into memory: [W, 128] uint32."""
    path: Path = pieces.work / "signatures.bin"
    with path.open("wb") as file:
        for piece, wanted in zip(pieces, pieces.split(wanted_N), strict=True):
            at = 0
            for rows in piece.signatures():
                file.write(rows[wanted[at : at + len(rows)]].tobytes())
                at += len(rows)
    return np.memmap(path, "<u4", "r").reshape(int(wanted_N.sum()), -1)
