"""Bits per byte and answers against models whose probabilities are known by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from etude.corpus.documents import Document
from etude.errors import InputError
from etude.evals.bases import Candidate, Question, compare_bases
from etude.evals.bases.measures import F64, POSITIONS, Bools, answer_of, document_loss, is_right, rolling_logprobs
from etude.evals.intervals import ratio
from etude.harness.tokenizer import SafeTokenizer


def byte_tokenizer() -> SafeTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return SafeTokenizer(tokenizer)


class Uniform:
    """Every token has probability 1/256, whatever is before it. Records its calls."""

    def __init__(self, context_tokens: int = 64, bits: float = 8.0) -> None:
        self.context_tokens, self.bits, self.calls = context_tokens, bits, list[tuple[tuple[int, ...], int]]()

    def logprobs(self, ids: Sequence[int], first: int) -> F64:
        assert 1 <= first < len(ids) <= self.context_tokens
        self.calls.append((tuple(ids), first))
        return np.full(len(ids) - first, -self.bits * math.log(2))

    def likeliest(self, ids: Sequence[int], first: int) -> Bools:
        return np.zeros(len(ids) - first, np.bool_)


class Copying(Uniform):
    """A token that was in the context before is likely: what an option repeats is preferred."""

    def logprobs(self, ids: Sequence[int], first: int) -> F64:
        super().logprobs(ids, first)
        text = bytes(i % 256 for i in ids)
        found = [-1.0 if text[max(0, i - 3) : i + 1] in text[: max(0, i - 3)] else -9.0 for i in range(first, len(ids))]
        return np.array(found)


@pytest.mark.parametrize("length", [1, 62, 63, 64, 200, 1000])
def test_each_token_counts_once_with_half_a_context_before_it(length: int) -> None:
    scorer, ids = Uniform(), list(range(length))
    assert len(rolling_logprobs(scorer, ids, 999)) == length
    counted = [id for window, first in scorer.calls for id in window[first:]]
    assert counted == ids
    assert scorer.calls[0][0][0] == 999
    for window, first in scorer.calls[1:]:
        assert first >= scorer.context_tokens // 2 - 1, "as much is before the first counted token"
        assert window[0] == window[1] - 1, "and the token before the window"


@pytest.mark.parametrize("text", ["plain", "é" * 40, "x" * 5000 + "日本語", "\U0001f600"])
def test_a_model_that_knows_nothing_needs_eight_bits_a_byte_at_every_position(text: str) -> None:
    found = document_loss(Uniform(), byte_tokenizer(), text, 0)
    size = len(text.encode())
    assert found.tokens == size
    assert found.num_bytes.sum() == size
    assert found.bits.sum() == pytest.approx(8 * size)
    assert len(found.bits) == len(POSITIONS)
    for bits, num_bytes in zip(found.bits, found.num_bytes, strict=True):
        assert bits == pytest.approx(8 * num_bytes, abs=8 * 4), "a character at a boundary counts on one side"


def test_the_likeliest_option_after_the_context_is_the_answer_and_a_prior_does_not_count() -> None:
    tokenizer, scorer = byte_tokenizer(), Copying(context_tokens=400)
    context = "PORT = 8080\nTIMEOUT = 3000\nassert PORT == "
    options = ("1234\n", "8080\n", "5678\n", "4321\n")
    asked = Question("k", context, options, 1, "o", neutral="assert PORT == ")
    assert answer_of(scorer, tokenizer, asked, 0) == 1
    short = Copying(context_tokens=24)
    assert answer_of(short, tokenizer, asked, 0) in range(4), "a context that is too long loses its start"
    assert max(len(ids) for ids, _ in short.calls) == 24


class Recalling(Uniform):
    """After ``assert NAME == `` it generates what follows ``NAME = `` in its context."""

    def likeliest(self, ids: Sequence[int], first: int) -> Bools:
        assert 1 <= first < len(ids) <= self.context_tokens
        text = byte_tokenizer().tokenizer.decode(ids[1:])
        stated = dict(line.split(" = ") for line in text.splitlines()[:-1] if line.count(" = ") == 1)
        begun, _, told = text.splitlines()[-1].removeprefix("assert ").partition(" == ")
        right = stated.get(begun, "")
        at = len(ids) - len(told)
        return np.array([at <= i and right[i - at : i - at + 1] == told[i - at] for i in range(first, len(ids))])


def test_a_stated_number_must_be_generated_in_full_from_the_context() -> None:
    tokenizer = byte_tokenizer()
    asked = Question("k", "other = 51278\nname = 51234\ntext\nassert name == ", ("51234",), 0, "o")
    assert is_right(Recalling(), tokenizer, asked, 0)
    assert not is_right(Recalling(), tokenizer, replace(asked, options=("51278",)), 0), "a part of it is not enough"
    assert not is_right(Uniform(), tokenizer, asked, 0)
    assert is_right(Recalling(context_tokens=50), tokenizer, asked, 0)
    assert not is_right(Recalling(context_tokens=32), tokenizer, asked, 0), "the statement was cut off"


class Prior(Uniform):
    """Likes digits 9 whatever the context says, and copies a little."""

    def logprobs(self, ids: Sequence[int], first: int) -> F64:
        nine, told = byte_tokenizer().encode("9")[0], bytes(i % 256 for i in ids)
        likes = [5.0 if ids[i] == nine else 0.0 for i in range(first, len(ids))]
        return np.array(likes) + (2.0 if told.count(told[-3:-1]) > 1 else 0.0) - 20


def test_what_an_option_is_worth_without_the_context_is_subtracted() -> None:
    asked = Question("k", "A = 12\nassert A == ", ("99\n", "12\n"), 1, "o", neutral="assert A == ")
    without = Question("k", asked.context, asked.options, 1, "o")
    assert answer_of(Prior(), byte_tokenizer(), without, 0) == 0
    assert answer_of(Prior(), byte_tokenizer(), asked, 0) == 1


def test_two_models_are_compared_on_the_same_documents() -> None:
    documents = [Document(str(i), "word " * (10 + i)) for i in range(8)]
    questions = [Question("k", "a", ("b\n", "c\n"), i % 2, str(i)) for i in range(4)]
    bases = [Candidate(f"m{bits}", byte_tokenizer(), 0, lambda bits=bits: Uniform(bits=bits)) for bits in (8.0, 6.5)]
    results, (apart,) = compare_bases(bases, documents, questions)
    assert [one.loss.value for one in results] == pytest.approx([8.0, 6.5])
    assert (apart.name, apart.loss.value) == ("m6.5", pytest.approx(-1.5))
    assert apart.loss.high < 0
    assert [one.bytes_per_token for one in results] == [1.0, 1.0]
    assert results[0].accuracy["k"].value == 0.5, "a tie takes the first option"


def test_one_document_is_too_little() -> None:
    with pytest.raises(InputError, match=r"(?s)too little text.*1 documents.*hint: give a folder"):
        compare_bases([], [Document("a", "text"), Document("b", "")], [])


def test_a_ratio_has_the_interval_of_its_clusters() -> None:
    draw = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        sizes = draw.uniform(1, 9, 25)
        found = ratio(list(2.0 * sizes + draw.normal(0, sizes)), list(sizes))
        covered += found.low <= 2.0 <= found.high
    assert 0.91 < covered / 400 < 0.98
    with pytest.raises(ValueError, match="sum to 0"):
        ratio([], [])
