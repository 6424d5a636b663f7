"""Near duplicates are found and verified; which one stays depends on the order of documents only."""

from __future__ import annotations

import random

import numpy as np
import pytest

from etude.corpus.near import candidate_pairs, jaccard, near_duplicates, shingles, signature

WORDS = [f"word{i}" for i in range(400)]


def edited(rng: random.Random, text: str, edits: int) -> str:
    words = text.split()
    for _ in range(edits):
        words[rng.randrange(len(words))] = rng.choice(WORDS)
    return " ".join(words)


def found(texts: list[str], threshold: float = 0.8) -> np.ndarray:
    hashes = [shingles(text) for text in texts]
    pairs = candidate_pairs(np.stack([signature(one) for one in hashes]), threshold)
    return near_duplicates(len(texts), pairs, hashes.__getitem__, threshold)


def test_planted_near_duplicates_are_found_and_nothing_else_is_dropped():
    rng = random.Random(0)
    originals = [" ".join(rng.choices(WORDS, k=rng.randint(60, 200))) for _ in range(120)]
    copies = [(i, edited(rng, text, rng.randint(1, 12))) for i, text in enumerate(originals)]
    kept_as = found([*originals, *(text for _, text in copies)])
    near = {i for i, text in copies if jaccard(shingles(originals[i]), shingles(text)) >= 0.8}
    dropped = {place - len(originals) for place in np.flatnonzero(kept_as >= 0).tolist()}
    assert 20 < len(near) < 110
    assert (kept_as[: len(originals)] == -1).all()
    assert all(kept_as[len(originals) + i] == i for i in dropped)
    assert len(dropped & near) >= 0.95 * len(near)
    assert len(dropped & near) >= 0.98 * len(dropped)


def test_every_duplicate_is_near_a_document_that_is_kept():
    rng = random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=80))]
    for _ in range(30):
        texts.append(edited(rng, texts[-1], 2))  # a chain: the ends are far apart
    kept_as = found(texts)
    assert 1 < (kept_as < 0).sum() < len(texts)
    for i, kept in enumerate(kept_as.tolist()):
        if kept >= 0:
            assert kept_as[kept] == -1
            assert jaccard(shingles(texts[kept]), shingles(texts[i])) >= 0.8


@pytest.mark.parametrize("texts", [[], ["one text"], ["", ""], ["a b", "a b"]])
def test_few_and_short_texts_have_signatures_too(texts):
    signatures = np.array([signature(shingles(text)) for text in texts], np.uint32).reshape(-1, 128)
    pairs = candidate_pairs(signatures, 0.8)
    kept_as = near_duplicates(len(texts), pairs, lambda i: shingles(texts[i]), 0.8)
    assert (kept_as >= 0).sum() == (len(texts) == 2)


def test_many_copies_of_one_text_take_few_comparisons():
    texts = ["the same words again and again in this text"] * 500
    hashes = [shingles(text) for text in texts]
    pairs = candidate_pairs(np.stack([signature(one) for one in hashes]), 0.8)
    assert len(pairs) <= 5 * len(texts)
    assert (near_duplicates(500, pairs, hashes.__getitem__, 0.8)[1:] == 0).all()
