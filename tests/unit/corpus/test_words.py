"""Texts that are encoded word by word have the ids of `tokenizers`."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from etude.corpus import words
from etude.corpus.words import Words
from etude.harness.tokenizer import SafeTokenizer

KNOWN = [*words._PATTERNS]
SIMPLE = st.text(st.sampled_from([*"aBzZ019 '\"\n\r\t_-./#(){}", *map(chr, range(128))]), max_size=60)
WIDE = st.text(st.sampled_from([*"ab1 \n.'", *"éß漢\u00a0\u2028\u0301ſK İ\u3000٣"]), max_size=60)


def trained(patterns: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level]) if splits else level
    tokenizer.decoder = decoders.ByteLevel()
    text = Path(words.__file__).read_text()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text, text.upper(), text.replace(" ", "\n  ")], trainer)
    return tokenizer


ENCODERS = [(safe, Words(safe)) for patterns in ((), *KNOWN) for safe in [SafeTokenizer(trained(patterns))]]


@settings(max_examples=300, deadline=None)
@given(st.lists(SIMPLE | WIDE, max_size=4).map("".join))
def test_words_have_the_ids_of_the_library_whatever_the_text(text: str) -> None:
    for tokenizer, known in ENCODERS:
        assert known.known
        assert tuple(known.encode(text).tolist()) == tokenizer.encode(text)


def test_words_have_the_ids_of_the_library_in_real_texts_and_a_full_table_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(words, "_MOST_WORDS", 50)
    rng = random.Random(0)
    for path in rng.sample(sorted(Path(__file__).parents[3].glob("**/corpus/*.py")), 8):
        text = path.read_text() + "naïve façade\nx = 1\n" + "a" * 5_000
        for tokenizer, known in ENCODERS:
            assert tuple(known.encode(text).tolist()) == tokenizer.encode(text)
            assert len(known._ids) <= 50


def changed(change: str) -> Tokenizer:
    """A tokenizer with a step that words leave out, or with a pattern that is not known."""
    tokenizer = trained(("[a-z]+|[^a-z]+",) if change == "pattern" else ())
    if change == "lower case":
        tokenizer.normalizer = normalizers.Lowercase()
    if change == "space":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    if change == "truncation":
        tokenizer.enable_truncation(4)
    if change == "dropout":
        plain = json.loads(tokenizer.to_str())
        plain["model"]["dropout"] = 0.5
        return Tokenizer.from_str(json.dumps(plain))
    return tokenizer


@pytest.mark.parametrize("change", ["lower case", "space", "truncation", "dropout", "pattern"])
def test_a_tokenizer_whose_words_are_not_known_is_left_to_the_library(change: str) -> None:
    safe = SafeTokenizer(changed(change))
    known = Words(safe)
    assert not known.known
    if change != "dropout":
        text = "Def f(x): return 'Two Words'"
        assert tuple(known.encode(text).tolist()) == safe.encode(text)


def test_a_pattern_with_other_words_than_the_library_is_found_by_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(words._PATTERNS, KNOWN[1], words._GPT2)
    assert not Words(SafeTokenizer(trained(KNOWN[1]))).known


def test_an_added_token_in_a_text_is_ordinary_text() -> None:
    tokenizer = trained(())
    tokenizer.add_tokens([AddedToken("return", special=False)])
    safe = SafeTokenizer(tokenizer)
    known = Words(safe)
    assert known.known
    assert tuple(known.encode("x return y").tolist()) == safe.encode("x return y")
    assert safe.added["return"] not in known.encode("x return y")
