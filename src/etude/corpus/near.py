"""Near duplicates: MinHash signatures, candidate pairs by banding (LSH), and the exact Jaccard similarity of a pair.

A document is the set of its token 5-grams (shingles). Its signature has for each of 128 hash functions the smallest
value of a shingle, so that two signatures agree in a share of places near the Jaccard similarity (Broder 1997). Two
documents are candidates if all rows of a band agree (Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, ch. 3).
The number of rows follows from the threshold, such that a pair at the threshold is a candidate with p >= 0.99."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from etude.corpus.hashes import U64, mixed, numbers, rolling
from etude.corpus.tokens import Tokens

NUM_HASHES = 128
SHINGLE = 5
_RECALL = 0.99  # of a pair at the threshold to be a candidate
_SLACK = 0.12  # of a signature's estimate: more than 3 standard deviations at any similarity
_LAGS = 4  # a document is compared with so many before it in a band's group, and with the group's first
_AT_ONCE = 1_024  # shingles: with 128 hashes they fit in a cache
_CHUNK = 4_096
_FACTORS, _ADDENDS = ((numbers(NUM_HASHES, i) >> np.uint64(32)).astype(np.uint32) for i in (1, 2))
_FACTORS |= np.uint32(1)  # an odd factor permutes the 32-bit numbers

Signatures = npt.NDArray[np.uint32]
Pairs = npt.NDArray[np.int64]


def shingles(text: str) -> U64:
    """Return the hashes of a text's distinct token 5-grams, sorted: [S]. Spaces and line breaks do not count."""
    return shingles_of(Tokens.of(text))


def shingles_of(tokens: Tokens) -> U64:
    """Return the hashes of the distinct 5-grams of tokens, sorted: [S]."""
    hashes = np.sort(rolling(tokens.hashes_T, SHINGLE))
    distinct: U64 = hashes[np.diff(hashes, prepend=~hashes[:1]) != 0]
    return distinct


def signature(shingle_hashes: U64) -> Signatures:
    """Return the MinHash signature of a set of shingles: [128] uint32."""
    smallest = np.full(NUM_HASHES, np.iinfo(np.uint32).max, np.uint32)
    high = (shingle_hashes >> np.uint64(32)).astype(np.uint32)
    hashed = np.empty((NUM_HASHES, min(_AT_ONCE, len(high))), np.uint32)
    for start in range(0, len(high), _AT_ONCE):
        part = high[start : start + _AT_ONCE]
        block = hashed[:, : len(part)]
        np.multiply(_FACTORS[:, None], part[None, :], out=block)
        np.add(block, _ADDENDS[:, None], out=block)
        np.minimum(smallest, block.min(axis=1), out=smallest)
    return smallest


def jaccard(one: U64, other: U64) -> float:
    """Return the Jaccard similarity of two sets of shingles. Two empty sets are equal.

    >>> jaccard(shingles("a b c d e f"), shingles("a b  c d e f")), jaccard(shingles("a b"), shingles("c d"))
    (1.0, 0.0)
    """
    both = np.sort(np.concatenate([one, other]))
    common = int(np.count_nonzero(both[1:] == both[:-1]))
    total = len(one) + len(other) - common
    return common / total if total else 1.0


def rows_per_band(threshold: float) -> int:
    """Return how many rows a band of the signature has (locality-sensitive hashing).

    It is the largest number with which a pair of documents at the threshold becomes a candidate with probability 0.99
    or more.

    >>> [rows_per_band(threshold) for threshold in (0.3, 0.5, 0.8, 1.0)]
    [2, 3, 6, 128]
    """
    good = (r for r in range(NUM_HASHES, 1, -1) if 1 - (1 - threshold**r) ** (NUM_HASHES // r) >= _RECALL)
    return next(good, 1)


def candidate_pairs(signatures: Signatures, threshold: float) -> Pairs:
    """Return the pairs of documents that may reach the threshold, sorted by the later document: [P, 2], i < j.

    `signatures`: [N, 128]. Among documents with equal bands, each is paired only with the first of them and with the 4
    before it, so that the number of pairs does not grow quadratically."""
    rows = rows_per_band(threshold)
    if len(signatures) < 2:
        return np.zeros((0, 2), np.int64)
    found = np.zeros(0, np.uint64)
    for start in range(0, NUM_HASHES - rows + 1, rows):
        keys = _band_keys(signatures, start, rows)
        order = np.argsort(keys, kind="stable").astype(np.uint64)
        keys = keys[order.astype(np.int64)]
        is_first = np.concatenate([[True], keys[1:] != keys[:-1]])
        first = order[np.maximum.accumulate(np.where(is_first, np.arange(len(keys)), 0))]
        pairs = [(first << np.uint64(32) | order)[~is_first]]
        lags = range(1, min(_LAGS, len(keys) - 1) + 1)
        pairs += [(order[:-lag] << np.uint64(32) | order[lag:])[keys[lag:] == keys[:-lag]] for lag in lags]
        fresh = np.setdiff1d(np.unique(np.concatenate(pairs)), found, assume_unique=True)
        found = np.union1d(found, _similar(fresh, signatures, threshold))
    pairs_2 = np.stack([found >> np.uint64(32), found & np.uint64(0xFFFFFFFF)], axis=1).astype(np.int64)
    return pairs_2[np.lexsort((pairs_2[:, 0], pairs_2[:, 1]))]


def _band_keys(signatures: Signatures, start: int, rows: int) -> U64:
    keys = np.zeros(len(signatures), np.uint64)
    for at in range(0, len(signatures), 1 << 16):  # in parts: the signatures are a file
        part = np.ascontiguousarray(signatures[at : at + (1 << 16), start : start + rows]).astype(np.uint64)
        total = np.zeros(len(part), np.uint64)
        for row in range(rows):
            total = mixed(total * np.uint64(0x9E3779B97F4A7C15) + part[:, row])
        keys[at : at + len(part)] = total
    return keys


def _similar(pairs: U64, signatures: Signatures, threshold: float) -> U64:
    """Keep the pairs whose signatures agree often enough that their similarity may reach the threshold."""
    kept = [np.zeros(0, np.uint64)]
    for at in range(0, len(pairs), _CHUNK):
        part = pairs[at : at + _CHUNK]
        one = signatures[(part >> np.uint64(32)).astype(np.int64)]
        other = signatures[(part & np.uint64(0xFFFFFFFF)).astype(np.int64)]
        kept.append(part[(one == other).mean(axis=1) >= threshold - _SLACK])
    return np.concatenate(kept)


def near_duplicates(
    num_documents: int, pairs: Pairs, shingles_of: Callable[[int], U64], threshold: float
) -> npt.NDArray[np.int64]:
    """Return for each document the earlier one that it duplicates, or -1 for one that is kept: [N].

    Documents are examined in order: one is a duplicate if its similarity with an earlier, kept document reaches the
    threshold. It is not compared with dropped documents, so a chain of small changes cannot remove documents that
    differ much. `pairs`: from `candidate_pairs`; `shingles_of` returns the shingles of a document."""
    kept_as = np.full(num_documents, -1, np.int64)
    tried: set[int] = set()
    before = -1
    for earlier, later in pairs.tolist():
        if later != before:
            tried, before = set(), later
        if kept_as[later] >= 0:
            continue
        kept = earlier if kept_as[earlier] < 0 else int(kept_as[earlier])
        if kept not in tried:
            tried.add(kept)
            if jaccard(shingles_of(kept), shingles_of(later)) >= threshold:
                kept_as[later] = kept
    return kept_as
