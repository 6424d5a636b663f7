"""Which documents a phase takes, and in which order: shares of sources, caps of epochs, a keyed shuffle.

Every source has one order of documents per epoch, by a hash of seed, epoch and document. A phase goes on where the
phase before it ended, so no document comes again before its source is used up. Amounts are planned with the tokens of
a document's first epoch: with FIM, it may have a few more or less in another. Within a phase the documents of all
sources are shuffled together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from etude.corpus.config import CorpusConfig
from etude.corpus.hashes import U64, mixed, text_key

I64 = npt.NDArray[np.int64]


@dataclass
class Supply:
    """The documents of one source, and how many of its tokens were taken so far.

    - `documents_N`: the index of each document in the corpus; `tokens_N`: the number of its tokens; `keys_N`: its hash.
    - `max_epochs`: how many epochs may be taken. `epoch`, `at`: the current epoch, and the next position in it.
      `taken`: the number of tokens taken."""

    name: str
    documents_N: I64
    tokens_N: I64
    keys_N: U64
    max_epochs: float
    seed: int
    epoch: int = 0
    at: int = 0
    taken: int = 0
    _order: I64 | None = field(default=None, repr=False)

    @property
    def total(self) -> int:
        """The number of tokens of one epoch of the source."""
        return int(self.tokens_N.sum())

    @property
    def left(self) -> int:
        """The number of tokens that can still be taken before `max_epochs` is reached."""
        return max(0, int(self.max_epochs * self.total) - self.taken)

    def take(self, num_tokens: int) -> tuple[I64, I64]:
        """Take the next documents with at least `num_tokens` tokens in all.

        Returns their positions in `documents_N`, [D], and the epoch of each, counted from 0, [D]. The last document may
        exceed `num_tokens` and `max_epochs`."""
        parts, epochs, missing = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], num_tokens
        while missing > 0 and self.total:
            if self._order is None:
                salt = np.uint64(text_key("epoch", self.seed, self.name, self.epoch))
                self._order = np.argsort(mixed(self.keys_N ^ salt), kind="stable")
            rest = self._order[self.at :]
            ends = np.cumsum(self.tokens_N[rest])
            count = min(len(rest), int(np.searchsorted(ends, missing)) + 1)
            parts.append(rest[:count])
            epochs.append(np.full(count, self.epoch))
            got = int(ends[count - 1])
            self.at, self.taken, missing = self.at + count, self.taken + got, missing - got
            if self.at == len(self.tokens_N):
                self.epoch, self.at, self._order = self.epoch + 1, 0, None
        return np.concatenate(parts), np.concatenate(epochs)


@dataclass(frozen=True)
class Drawn:
    """The documents that were chosen for one phase, in training order. `missing_tokens`: how many tokens fewer it has
    than configured.

    - `documents_D`: the index of each document. `epochs_D`: how often it was used before. `tokens_D`: the number of its
      tokens.
    - `by_source`: for each source (number of documents, number of tokens, epochs used so far)."""

    name: str
    documents_D: I64
    epochs_D: I64
    tokens_D: I64
    by_source: Mapping[str, tuple[int, int, float]]
    missing_tokens: int


def draw(config: CorpusConfig, supplies: Sequence[Supply]) -> list[Drawn]:
    """Choose the documents of each phase by the configured shares.

    Without `[[phases]]` in the config, there is one phase that has every document once. If a source reaches its
    `max_epochs`, its share is divided among the other sources of the phase in proportion to theirs."""
    if config.phases:
        phases = [(phase.name, phase.tokens, config.shares(phase)) for phase in config.phases]
    else:
        phases = [("all", sum(supply.total for supply in supplies), {})]
    found = []
    for name, num_tokens, shares in phases:
        amounts = {supply.name: min(supply.total, supply.left) for supply in supplies}
        if shares:
            amounts = allotted(num_tokens, shares, {supply.name: supply.left for supply in supplies})
        parts, keys, by_source = [np.zeros((3, 0), np.int64)], [np.zeros(0, np.uint64)], {}
        for supply in supplies:
            before = supply.taken
            taken_D, epochs_D = supply.take(amounts[supply.name])
            salts_D = np.arange(len(taken_D), dtype=np.uint64)  # one document may come twice in a phase
            parts.append(np.stack([supply.documents_N[taken_D], epochs_D, supply.tokens_N[taken_D]]))
            keys.append(mixed(supply.keys_N[taken_D] + salts_D))
            epochs = supply.taken / supply.total if supply.total else 0.0
            by_source[supply.name] = (len(taken_D), supply.taken - before, epochs)
        salt = np.uint64(text_key("phase", config.seed, name))
        order = np.argsort(mixed(np.concatenate(keys) ^ salt), kind="stable")
        drawn_tokens = sum(tokens for _, tokens, _ in by_source.values())
        documents_D, epochs_D, tokens_D = np.concatenate(parts, axis=1)[:, order]
        missing = max(0, num_tokens - drawn_tokens)
        found.append(Drawn(name, documents_D, epochs_D, tokens_D, by_source, missing))
    return found


def allotted(num_tokens: int, shares: Mapping[str, float], left: Mapping[str, int]) -> dict[str, int]:
    """Divide a number of tokens among sources by their `shares`, which are relative to each other.

    `left`: the most tokens that each source can give. If it gives less than its share, the others give more.

    >>> allotted(100, {"a": 1.0, "b": 1.0, "c": 2.0}, {"a": 100, "b": 100, "c": 20})
    {'a': 40, 'b': 40, 'c': 20}
    """
    given = dict.fromkeys(shares, 0)
    while (missing := num_tokens - sum(given.values())) > 0:
        active = {name: share for name, share in shares.items() if share > 0 and given[name] < left[name]}
        if not active:
            break
        total = sum(active.values())
        before = dict(given)
        for name, share in active.items():
            given[name] = min(left[name], given[name] + int(missing * share / total))
        if given == before:  # less than one token for each
            name = max(active, key=lambda name: left[name] - given[name])
            given[name] = min(left[name], given[name] + missing)
            break
    return given
