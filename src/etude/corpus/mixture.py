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
    """The documents of one source, and how much of it is used.

    - `documents_N`: index of each document in the corpus; `tokens_N`: its number of tokens; `keys_N`: a hash of it.
    - `max_epochs`: cap of its tokens. `epoch`, `at`, `taken`: the current epoch, the next place in it, tokens taken."""

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
        """Number of tokens of one epoch."""
        return int(self.tokens_N.sum())

    @property
    def left(self) -> int:
        """Number of tokens until `max_epochs`."""
        return max(0, int(self.max_epochs * self.total) - self.taken)

    def take(self, num_tokens: int) -> tuple[I64, I64]:
        """Return the next documents with at least `num_tokens` tokens in all, as places in `documents_N`: [D]; and the
        epoch of each, from 0: [D].

        The last one may exceed the number, and the cap."""
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
    """The documents of one phase. `missing_tokens`: how many the phase is short of.

    - `documents_D`: indices in training order. `epochs_D`: how often each came before. `tokens_D`: its tokens.
    - `by_source`: name -> (documents, tokens, epochs of the source so far)."""

    name: str
    documents_D: I64
    epochs_D: I64
    tokens_D: I64
    by_source: Mapping[str, tuple[int, int, float]]
    missing_tokens: int


def draw(config: CorpusConfig, supplies: Sequence[Supply]) -> list[Drawn]:
    """Return the documents of each phase.

    Without `[[phases]]` in the config, there is one phase that has every document once. If a source reaches its cap,
    the other sources of the phase get its share, in proportion."""
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
    """Return how many tokens each source gives. `shares` are relative to each other; `left` are the caps.

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
