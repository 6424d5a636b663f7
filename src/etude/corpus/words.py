"""Encodes texts word by word, with a table of words: several times as fast as `tokenizers`, with the same ids.

Byte-level BPE divides a text into words by a regular expression, and encodes each word by itself. Here Python's `re`
divides the text, and the ids of a word come from a table. Words that are not in the table are encoded by the library's
own model. So the ids are right if the words are those of the library. Two conditions ensure this:

- The tokenizer has one of the known patterns (`_PATTERNS`), and a trial text of all kinds of characters has the same
  ids in both ways.
- The text is ASCII, since Python and the library have Unicode tables of different years. The library encodes the parts
  of a text with other characters. A text is divided only between a letter or digit and a line break: no word of these
  patterns crosses such a place, and no pattern looks back over it.

The library encodes everything else. Decision 138 has the numbers."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.harness.tokenizer import SafeTokenizer

U32 = npt.NDArray[np.uint32]
_MOST_WORDS = 1 << 16  # in the table
_MOST_CHARS = 64  # of a word that is kept
_CUT = re.compile(r"\n(?<=[A-Za-z0-9]\n)")
_TRIALS = 8_000  # characters
_S = r" \t\n\r\f\v"
_SPACES = rf"[{_S}]*[\r\n]+|[{_S}]+(?![^{_S}])|[{_S}]+"
_ENDINGS = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_MARKS = r"!-/:-@\[-`{-~"
_LATER = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = rf"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^{_S}A-Za-z0-9]+|[{_S}]+(?![^{_S}])|[{_S}]+"
_CL100K = rf"{_ENDINGS}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]%s| ?[^{_S}A-Za-z0-9]+[\r\n]*|{_SPACES}"
_O200K = (
    rf"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+(?:{_ENDINGS})?|[^\r\nA-Za-z0-9]?[A-Z]+(?:{_ENDINGS})?|[0-9]{{1,3}}|"
    rf" ?[^{_S}A-Za-z0-9]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK = (
    rf"[0-9]{{1,3}}|[{_MARKS}][A-Za-z]+|[^\r\nA-Za-z0-9{_MARKS}]?[A-Za-z]+| ?[{_MARKS}]+[\r\n]*|"
    rf"[{_S}]*[\r\n]+|[{_S}]+(?![^{_S}0-9])|[{_S}]+"
)
_PATTERNS = {  # the patterns of a pre-tokenizer, one after another -> a pattern of the same words in ASCII texts
    (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2, ByteLevel itself
    ): _GPT2,
    (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|"
        rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LATER}",  # cl100k, Llama 3
    ): _CL100K % "{1,3}",
    (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|"
        rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LATER}",  # Qwen 2 and 3
    ): _CL100K % "",
    (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
        rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LATER}",  # Qwen 3.5
    ): _CL100K % "",
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LATER}",  # o200k, gpt-oss
    ): _O200K,
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LATER}",  # DeepSeek V3
    ): _DEEPSEEK,
}
_SPELLED = {  # bytes that ByteLevel spells as they are; the others it spells as the characters from 256 on
    byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))
}
_SPELLED |= {byte: chr(256 + i) for i, byte in enumerate(sorted({*range(256)} - {*_SPELLED}))}


class Words:
    """Encodes texts with a table of words, or by the library if the tokenizer's words are not known."""

    def __init__(self, tokenizer: SafeTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = _Table(tokenizer.tokenizer.model)
        pattern = _pattern(tokenizer)
        self._words = re.compile(pattern) if pattern else None
        if self._words is not None and self.encode(trial := _trial()).tolist() != list(tokenizer.encode(trial)):
            self._words = None

    @property
    def known(self) -> bool:
        """Whether words are looked up; False: the library encodes every text."""
        return self._words is not None

    def encode(self, text: str) -> U32:
        """Encode ordinary text as token ids, as `SafeTokenizer.encode` does: uint32 [T]."""
        if self._words is None or self._tokenizer.has_added(text):
            return np.array(self._tokenizer.encode(text), np.uint32)
        if text.isascii():
            return self._encode_ascii(text)
        parts = [self._encode_ascii(p) if p.isascii() else self._by_library(p) for p in _parts(text)]
        return np.concatenate(parts)

    def _encode_ascii(self, text: str) -> U32:
        assert self._words is not None
        words = self._words.findall(text)
        if sum(map(len, words)) != len(text):  # some character is in no word
            return self._by_library(text)
        return np.fromiter(itertools.chain.from_iterable(map(self._ids.__getitem__, words)), np.uint32)

    def _by_library(self, text: str) -> U32:
        return np.array(self._tokenizer.encode(text), np.uint32)


class _Table(dict[str, tuple[int, ...]]):
    """Maps each word to its ids. It is emptied when it has `_MOST_WORDS` words, so its memory is bounded."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(token.id for token in self._model.tokenize(word.translate(_SPELLED)))
        if len(word) <= _MOST_CHARS:
            if len(self) >= _MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids


def _parts(text: str) -> Iterator[str]:
    """Divide a text into parts that alternate between ASCII and not ASCII, at places that no word crosses."""
    cuts = [0, *(match.start() for match in _CUT.finditer(text)), len(text)]
    lines = (text[start:stop] for start, stop in itertools.pairwise(cuts))
    for _, some in itertools.groupby(lines, str.isascii):
        yield "".join(some)


def _pattern(tokenizer: SafeTokenizer) -> str | None:
    """Return the pattern of a tokenizer's words; None unless it is a byte-level BPE with known steps and patterns."""
    plain = json.loads(tokenizer.tokenizer.to_str())
    model, steps = plain["model"], plain["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    normalizers = (plain["normalizer"] or {"type": "NFC"})["type"]
    is_plain = model.get("type") == "BPE" and not any(
        model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    )
    if not is_plain or normalizers != "NFC" or plain["truncation"] or plain["padding"] or not steps:
        return None
    *splits, last = steps
    if (
        last.get("type") != "ByteLevel"
        or last.get("add_prefix_space")
        or any(step.get("type") != "Split" or step["behavior"] != "Isolated" or step["invert"] for step in splits)
    ):
        return None
    patterns = tuple(step["pattern"].get("Regex") for step in splits)
    if last.get("use_regex"):
        return _GPT2 if not splits else None
    return _PATTERNS.get(patterns)


def _trial() -> str:
    """Return a text with ASCII characters of all kinds beside each other."""
    rng = random.Random(0)
    kinds = [
        "aB",
        "Zz",
        "  ",
        "\n\r",
        "\t ",
        "01",
        "'",
        "'sreVEll",
        "_-./",
        '"#$%(){}[]<>=',
        "".join(map(chr, range(128))),
    ]
    return "".join(rng.choice(rng.choice(kinds)) * rng.choice((1, 1, 1, 2, 4)) for _ in range(_TRIALS))
