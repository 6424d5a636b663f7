"""The tokenizer of a corpus: loads it, and encodes documents with their end token and FIM sentinels."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from etude.corpus.config import FimConfig, TokenizerConfig
from etude.corpus.fim import Sentinels, is_rearranged, rearranged, sentinels
from etude.corpus.shards import TokenizerFacts
from etude.corpus.words import Words
from etude.errors import ConfigError, nearest
from etude.harness.tokenizer import SafeTokenizer


@dataclass(frozen=True)
class Encoder:
    """Encodes documents as token ids. If a text contains the name of the end token or of a sentinel, it is encoded as
    ordinary text."""

    tokenizer: SafeTokenizer
    facts: TokenizerFacts
    fim: FimConfig
    sentinels: Sentinels | None
    seed: int

    @classmethod
    def load(cls, config: TokenizerConfig, fim: FimConfig, *, seed: int) -> Encoder:
        """Load the tokenizer of a config and create the encoder. `seed`: for fill-in-the-middle.

        Raises `ConfigError` if there is no tokenizer, or if it lacks the end token or the sentinels."""
        tokenizer, facts = load_tokenizer(config)
        return cls(tokenizer, facts, fim, sentinels(fim, tokenizer.added), seed)

    def encode_chat(
        self, text: str, said: Sequence[tuple[int, int]]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """Encode a chat. Returns the token ids with the end token, [T] uint32, and which of them are answers of the
        assistant, [T] bool.

        `text`: the rendered chat. `said`: the (first, last + 1) character of each answer. No token crosses the start or
        the end of an answer, as in RL, where answers are sampled. If the text ends with the end token, no second one is
        added."""
        ids: list[npt.NDArray[np.int32]] = []
        marks: list[npt.NDArray[np.bool_]] = []
        cuts = [0, *(place for span in said for place in span), len(text)]
        for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
            ids.append(self.tokenizer.encode_rendering(text[start:stop]))
            marks.append(np.full(len(ids[-1]), number % 2 == 1))
        return self._ended(np.concatenate(ids).astype(np.uint32), np.concatenate(marks))

    def mark_recorded(
        self, token_ids: npt.NDArray[np.uint32], said: Sequence[tuple[int, int]]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """Return a recorded rollout's token ids with the end token, uint32 [T], and whether the policy sampled each,
        bool [T].

        `token_ids`: uint32. `said`: the [first, stop) tokens of each answer. The end token is added unless it is the
        last."""
        marked = np.zeros(len(token_ids), np.bool_)
        for start, stop in said:
            marked[start:stop] = True
        return self._ended(token_ids, marked)

    def _ended(
        self, tokens: npt.NDArray[np.uint32], marked: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """Append the end token, unless it is the last one."""
        if not len(tokens) or tokens[-1] != self.facts.end_id:
            tokens, marked = np.append(tokens, np.uint32(self.facts.end_id)), np.append(marked, np.False_)
        return tokens, marked

    def encode(self, text: str, key: str, epoch: int = 0) -> npt.NDArray[np.uint32]:
        """Return a document as token ids with the end token: [T] uint32. `key` and `epoch` determine whether and where
        it is cut for fill-in-the-middle."""
        parts: list[int | str] = [text]
        if self.sentinels is not None:
            parts = rearranged(text, self.fim, self.sentinels, key=self._key(key, epoch)) or parts
        ids = [np.array([part], np.uint32) if isinstance(part, int) else self._words.encode(part) for part in parts]
        return np.concatenate([*ids, np.array([self.facts.end_id], np.uint32)])

    @cached_property
    def _words(self) -> Words:
        return Words(self.tokenizer)

    def differs(self, key: str, epoch: int) -> bool:
        """Return whether a document may have other token ids in an epoch than in the first one."""
        return any(is_rearranged(self.fim, self._key(key, one)) for one in (0, epoch)) if epoch else False

    def _key(self, key: str, epoch: int) -> str:
        return f"{self.seed}\0{epoch}\0{key}"


def tokenizer_file(path: Path) -> Path:
    """Return the path of a tokenizer.json: `path` itself, or, if it is a folder, the file in it."""
    return path / "tokenizer.json" if path.is_dir() else path


def read_tokenizer(config: TokenizerConfig) -> tuple[SafeTokenizer, str]:
    """Load a tokenizer.json. Returns it and the SHA-256 of the file. Raises `ConfigError` if there is none."""
    from tokenizers import Tokenizer

    path = tokenizer_file(config.path)
    try:
        data = path.read_bytes()
    except OSError as error:
        hint = "give a tokenizer.json, or the folder of a checkpoint that has one"
        raise ConfigError(f"tokenizer.path: no tokenizer at {config.path}", str(error.strerror), hint=hint) from None
    try:
        tokenizer = SafeTokenizer(Tokenizer.from_buffer(data))
    except Exception as error:  # noqa: BLE001  the library raises no narrower class
        hint = "give the tokenizer.json of a fast tokenizer of Hugging Face"
        raise ConfigError(f"tokenizer.path: {path} is not a tokenizer file", str(error)[:200], hint=hint) from None
    return tokenizer, hashlib.sha256(data).hexdigest()


def load_tokenizer(config: TokenizerConfig) -> tuple[SafeTokenizer, TokenizerFacts]:
    """Load a tokenizer.json and describe it. Raises `ConfigError` if there is none or it lacks the end token."""
    tokenizer, digest = read_tokenizer(config)
    end_id = tokenizer.tokenizer.token_to_id(config.end)
    if end_id is None:
        hint = f'{nearest(config.end, tokenizer.added)}; write end = "TOKEN" under [tokenizer]'
        raise ConfigError(f"the tokenizer has no token {config.end!r}", "it ends each document", hint=hint)
    vocab_size = 1 + max(tokenizer.tokenizer.get_vocab(with_added_tokens=True).values())
    facts = TokenizerFacts(
        path=str(config.path), sha256=digest, vocab_size=vocab_size, end=config.end, end_id=int(end_id)
    )
    return tokenizer, facts
