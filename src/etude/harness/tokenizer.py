"""Text to tokens and back, such that no text can spell a special token.

Before a template renders texts, marks break the spelling of every added token in them (`SafeTokenizer.escape`). The
marks are dropped when the rendering is encoded, so that only the template's own words become such tokens."""

from __future__ import annotations

import itertools
import json
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from etude.errors import ContextFull
from etude.records.wire import I32

_MARK = "\ue000"  # private use: breaks up text that spells a special token while the template renders
PLACEHOLDER = "\ue001"
"""Starts a placeholder for a text while a template renders; escaped in all other text."""
_SHORT_CHARS = 256  # tokens of shorter texts are cached: tool outputs and instructions repeat
_FIRST_CHARS = 131_072  # of shorter texts they are cached if a conversation begins with them
_marked = re.compile(f"{_MARK}({_MARK}?)")


class SafeTokenizer:
    """A tokeniser in which no text becomes a special token: a text that spells one is encoded as ordinary characters.

    - `added`, `special`: text → id of all added tokens, and of those that are special. `special_ids`: the ids in
      `special`.
    - `spellings`: a pattern that finds added tokens in a text.
    - `vocab_size`: the number of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.encode_special_tokens = True  # the spelling of a special token in a text is ordinary text
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.added: dict[str, int] = {t.content: i for i, t in added.items() if t.content}
        self.special: dict[str, int] = {t.content: i for i, t in added.items() if t.special and t.content}
        self.special_ids = frozenset(self.special.values())
        self.spellings, self._special_spellings = match_any(self.added), match_any(self.special)
        self._unsaid = match_any(self.added.keys() - self.special.keys())  # the tokeniser matches these in any text
        self.vocab_size = int(tokenizer.get_vocab_size(with_added_tokens=True))
        self._short = lru_cache(maxsize=4096)(self._encode_plain)
        self._first = lru_cache(maxsize=64)(lambda text: array("i", self._encode_plain(text)))

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Decode token ids to text. Ids outside the vocabulary are skipped, and special tokens too unless `special`."""
        known = [int(i) for i in ids if 0 <= i < self.vocab_size]
        return str(self.tokenizer.decode(known, skip_special_tokens=not special))

    def escape(self, text: str) -> str:
        """Return a text with marks in all spellings of added tokens, so that only the template writes such tokens."""
        return self._escape_matches(text, self.spellings)

    def escape_all(self, value: Any) -> Any:
        """Return a JSON value with all its strings escaped, those of keys included."""
        if isinstance(value, Mapping):
            return {self.escape(str(k)): self.escape_all(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.escape_all(v) for v in value]
        return self.escape(value) if isinstance(value, str) else value

    def escape_special(self, value: Any) -> Any:
        """Return the escaped text of an assistant message. Added tokens that are not special stay tokens."""
        if isinstance(value, str):
            return self._escape_matches(value, self._special_spellings)
        return self.escape_all(value)

    def _escape_matches(self, text: str, literal: re.Pattern[str]) -> str:
        if _MARK in text:
            text = text.replace(_MARK, _MARK + _MARK)
        if PLACEHOLDER in text:
            text = text.replace(PLACEHOLDER, PLACEHOLDER + _MARK)
        return literal.sub(lambda m: m[0][0] + _MARK + m[0][1:], text)

    def encode_rendering(self, rendering: str, *, max_tokens: int | None = None, begins: bool = False) -> I32:
        """Encode the output of a template whose input was escaped, as token ids, [T] int32. Raises `ContextFull` for a
        text that certainly has more than `max_tokens` tokens.

        `begins`: whether a conversation begins with it. The tokens of its texts are then cached, since other
        conversations begin with the same instructions and tools."""
        self.check_length(rendering, max_tokens)
        ids: list[int] = []
        for i, piece in enumerate(self.spellings.split(rendering)):
            if i % 2:
                ids.append(self.added[piece])
            elif piece:
                text = _marked.sub(r"\1", piece) if _MARK in piece else piece
                is_kept = begins and _SHORT_CHARS < len(text) <= _FIRST_CHARS
                ids.extend(self._first(text) if is_kept else self.encode(text))
        return np.array(ids, np.int32)

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode ordinary text as token ids."""
        return self._short(text) if len(text) <= _SHORT_CHARS else self._encode_plain(text)

    def has_added(self, text: str) -> bool:
        """Return whether a text spells an added token that is not special, which `encode` cuts."""
        return self._unsaid.search(text) is not None

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        """Tokenise in pieces: cut inside each text that the tokeniser would match as an added token."""
        cuts = [0, *(m.start() + 1 for m in self._unsaid.finditer(text)), len(text)]
        pieces = [text[start:stop] for start, stop in itertools.pairwise(cuts)]
        encode = self.tokenizer.encode_batch_fast  # without offsets, and it releases the GIL
        return tuple(itertools.chain.from_iterable(encode([p], add_special_tokens=False)[0].ids for p in pieces))

    @cached_property
    def _chars_per_token(self) -> float:
        return chars_per_token(self.tokenizer)

    def check_length(self, text: str, max_tokens: int | None) -> None:
        """Raise `ContextFull` for a text or a rendering that certainly has more than `max_tokens` tokens."""
        if max_tokens is None or len(text) <= max_tokens:
            return
        num_chars = len(text) / (2 if _MARK in text else 1)  # each mark is beside a character of the text
        least = math.ceil(num_chars / self._chars_per_token)
        if least > max_tokens:
            facts = f"{len(text):,} characters are at least {least:,} tokens"
            raise ContextFull(
                f"the text does not fit a context of {max_tokens} tokens", facts, hint="send a shorter text"
            )


def match_any(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches each of the texts, longest first. Without texts it matches nothing."""
    pattern = "|".join(re.escape(t) for t in sorted(tokens, key=lambda t: (-len(t), t)))
    return re.compile(f"({pattern})" if pattern else r"((?!))")


COMPOSED = 4
"""The maximum number of characters that NFC composes into one."""
_KEEP_ALL = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Sequence", "Split"}


def chars_per_token(tokenizer: Tokenizer) -> float:
    """Return an upper bound of the characters per token. So the number of a text's characters gives a lower bound of
    its tokens, without tokenising it.

    The bound is infinite for a tokeniser that may drop characters, or that is not known well enough. In byte-level BPE,
    and in BPE with byte fallback, a token covers at most as many characters as its spelling has."""
    parts = [*_parts(tokenizer.pre_tokenizer), *_parts(tokenizer.normalizer)]
    names = {str(part.get("type")) for part in parts}
    by_bytes = "ByteLevel" in names or bool(getattr(tokenizer.model, "byte_fallback", False))
    drops = any(part.get("behavior") == "Removed" for part in parts)
    strips = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    if type(tokenizer.model).__name__ != "BPE" or not by_bytes or drops or strips or names - _KEEP_ALL - {"NFC"}:
        return math.inf
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
    return float(longest * (COMPOSED if "NFC" in names else 1))


def _parts(component: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the serialised form of a tokeniser's component, and of the components inside it."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += [*part.get("pretokenizers", ()), *part.get("normalizers", ())]
