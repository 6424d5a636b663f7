"""Fill-in-the-middle: cuts a document in three and writes its middle last, between sentinel tokens.

Bavarian et al. 2022 (arXiv:2207.14255): PSM is prefix, suffix, middle; SPM is suffix, prefix, middle, in the variant
that can be mixed with PSM. Cuts are at characters, not at tokens, since users stop typing anywhere. Each part is
encoded by itself, as an editor sends it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from etude.corpus.config import FimConfig
from etude.corpus.hashes import text_key
from etude.errors import ConfigError, nearest

SENTINELS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)
"""Sentinel tokens for prefix, suffix and middle of public tokenizers."""


@dataclass(frozen=True)
class Sentinels:
    """The ids of the sentinel tokens."""

    prefix: int
    suffix: int
    middle: int


def sentinels(config: FimConfig, added: Mapping[str, int]) -> Sentinels | None:
    """Return the ids of the sentinel tokens, or None if `fim.rate` is 0. `added`: the tokenizer's added tokens.

    Raises `ConfigError` for a tokenizer that lacks them."""
    if not config.rate:
        return None
    choices = (config.tokens,) if config.tokens else SENTINELS
    for names in choices:
        if all(name in added for name in names):
            return Sentinels(*(added[name] for name in names))
    facts = f"fim.rate is {config.rate:g}, and the tokenizer has no token {choices[0][0]!r}"
    if config.tokens:
        missing = next(name for name in config.tokens if name not in added)
        facts = f"it has no added token {missing!r}"
        hint = f"{nearest(missing, added) if added else 'it has no added tokens'}; or set fim.rate = 0"
    else:
        hint = 'name the tokens of this tokenizer: fim.tokens = ["PREFIX", "SUFFIX", "MIDDLE"]; or set fim.rate = 0'
    raise ConfigError("the tokenizer lacks the sentinel tokens of FIM", facts, hint=hint)


def is_rearranged(config: FimConfig, key: object) -> bool:
    """Return whether fill-in-the-middle rearranges the document with this key."""
    return text_key("fim", key) < config.rate * 2.0**64


def rearranged(text: str, config: FimConfig, ids: Sentinels, *, key: object) -> list[int | str] | None:
    """Rearrange a document for fill-in-the-middle. Returns sentinel ids and parts of the text in their new order, or
    None if the document stays as it is.

    Whether and where it is cut depends only on `key`.

    >>> rearranged("abcdef", FimConfig(rate=1.0, spm=0.0), Sentinels(1, 2, 3), key=4)
    [1, 'a', 2, '', 3, 'bcdef']
    """
    if not is_rearranged(config, key):
        return None
    first, second = sorted(text_key("cut", i, key) * (len(text) + 1) >> 64 for i in range(2))
    prefix, middle, suffix = text[:first], text[first:second], text[second:]
    if text_key("spm", key) < config.spm * 2.0**64:
        return [ids.prefix, ids.suffix, suffix, ids.middle, prefix, middle]
    return [ids.prefix, prefix, ids.suffix, suffix, ids.middle, middle]
