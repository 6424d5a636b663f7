"""How many tokens a text has at least, told without tokenising it: a text of megabytes takes seconds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

COMPOSED = 4
"""Characters of which NFC makes one, at most."""
_KEEP_ALL = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Sequence", "Split"}


def chars_per_token(tokenizer: Tokenizer) -> float:
    """The most characters of a text that become one token; infinity for a tokeniser that may leave some out, or of
    which that is not known.

    Of byte-level BPE, and of BPE that falls back to bytes, a token covers no more characters than it is written with.
    """
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
    """A component of a tokeniser as it is stored, and those that it is made of."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += [*part.get("pretokenizers", ()), *part.get("normalizers", ())]
