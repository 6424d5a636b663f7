"""The lower bound of a text's tokens is never too high."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.harness.tokeniser import laptop_chat, laptop_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from etude.errors import ContextFull
from etude.harness.tokenizer import chars_per_token

CHAT = laptop_chat()
PER_TOKEN = chars_per_token(laptop_tokenizer())
ACCENTS = st.text(alphabet=st.sampled_from("aeo\u0301\u0345\u0313\u0300\u03b1 \n"), max_size=60)


@given(st.text(max_size=200) | ACCENTS)
def test_a_text_has_at_least_its_characters_divided_by_chars_per_token(text: str) -> None:
    assert math.isfinite(PER_TOKEN)
    assert len(CHAT.encode(text)) >= len(text) / PER_TOKEN


@given(ACCENTS)
def test_the_bound_of_tokens_holds_for_a_tokeniser_with_nfc(text: str) -> None:
    tokenizer = laptop_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) >= len(text) / chars_per_token(tokenizer)


@pytest.mark.parametrize("change", ["whole words", "spaces removed", "stripped", "swallowed", "one unknown token"])
def test_chars_per_token_is_infinite_for_a_tokeniser_that_may_drop_text(change: str) -> None:
    tokenizer = laptop_tokenizer()
    match change:
        case "whole words":
            tokenizer = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}))  # type: ignore[call-arg]
        case "spaces removed":
            split = pre_tokenizers.Split(" ", "removed")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel()])
        case "stripped":
            tokenizer.normalizer = normalizers.Strip()
        case "swallowed":
            tokenizer.add_special_tokens([AddedToken("<|wide|>", rstrip=True)])
        case "one unknown token":
            tokenizer = Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True))
    assert chars_per_token(tokenizer) == math.inf


def test_what_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    text = "x " * int(64 * PER_TOKEN)
    for refuses in (
        lambda: CHAT.encode(text, max_tokens=64),
        lambda: CHAT.encode_prompt([{"role": "user", "content": text}], max_tokens=64),
        lambda: CHAT.continuation(
            [{"role": "assistant", "content": ""}], [{"role": "user", "content": text}], max_tokens=64
        ),
    ):
        with pytest.raises(ContextFull, match=r"a context of 64 tokens: [0-9,]+ characters are at least 1[0-9]{2} "):
            refuses()
    assert len(CHAT.encode("x" * 64, max_tokens=64)) <= 64


def test_a_long_text_has_the_tokens_of_its_short_parts() -> None:
    line = "def f(x):\n    return x + 1\n"
    assert CHAT.encode(line * 2000).tolist() == CHAT.encode(line).tolist() * 2000
