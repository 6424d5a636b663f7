"""Packs texts into the input of one forward pass: their tokens one after another, and the rows with a loss.

The batches of mid-training are such batches; those of RL have more for each row (`training.flat_batch`)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self, TypeVar

import torch

from etude.models.attention import Cache, Packed
from etude.numerics.operators import Operators
from etude.training.corpus import Spans, TokenizedDocuments

Tokens = TypeVar("Tokens", bound="TokenBatch")


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The input of one forward pass: N tokens of several texts, R rows with a loss.

    - `lengths`: tokens of each text, N in all.
    - `tokens_N`: int64.
    - `rows_R`: int64, positions whose next token has a loss. `targets_R`: int64, these next tokens.
    - `kept_N`: int64, positions of this rank's tokens under context parallelism; None: all."""

    lengths: list[int]
    tokens_N: torch.Tensor
    rows_R: torch.Tensor
    targets_R: torch.Tensor
    kept_N: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all texts; 0 for an `empty` batch."""
        return self.num_forwarded

    @property
    def num_forwarded(self) -> int:
        """The number of tokens that the model computes. A token that several paths share counts once."""
        return len(self.tokens_N) if self.lengths else 0

    def cache(self, operators: Operators) -> Cache:
        """Return the cache with which a model computes all of these tokens in one forward pass."""
        return Packed(self.lengths or [1], operators, device=self.tokens_N.device)

    def to(self, device: torch.device) -> Self:
        """Return a copy with the tensors on a device."""
        return replace(self, **{name: one.to(device) for name, one in self._tensors()})  # type: ignore[arg-type]

    def empty(self) -> Self:
        """Return a batch of one token and no rows, for a rank without texts that must take part in a forward pass."""
        none = {name: one[:0] for name, one in self._tensors() if name.endswith("_R")}
        others = {name: None for name, _ in self._tensors() if name not in none}
        token = torch.zeros(1, dtype=torch.int64)
        return replace(self, lengths=[], **{**none, **others, "tokens_N": token})  # type: ignore[arg-type]

    def select(self, kept_N: torch.Tensor) -> Self:
        """Return one rank's part: the tokens at positions `kept_N` (ascending) and their rows.

        `lengths` stays that of the whole batch. Used for context parallelism."""
        here = torch.zeros(len(self.tokens_N), dtype=torch.bool)
        here[kept_N] = True
        mine_R = here[self.rows_R]
        parts = {name: one[mine_R if name.endswith("_R") else kept_N] for name, one in self._tensors()}
        rows_R = torch.searchsorted(kept_N, parts["rows_R"])
        return replace(self, **{**parts, "rows_R": rows_R, "kept_N": kept_N})  # type: ignore[arg-type]

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        found = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, one) for name, one in found if isinstance(one, torch.Tensor)]


def flatten_texts(documents: TokenizedDocuments, pieces: Spans) -> TokenBatch:
    """Pack pieces of documents into a batch. The last token of each is a target and no input.

    Without pieces it is an empty batch."""
    texts = [documents.read(start, stop) for start, stop in pieces.tolist()]
    ints = torch.zeros(0, dtype=torch.int64)
    following = torch.cat([ints, *(torch.from_numpy(tokens[1:]) for tokens, _ in texts)])
    rows_R = torch.cat([ints.bool(), *(torch.from_numpy(has_loss[1:]) for _, has_loss in texts)]).nonzero()[:, 0]
    flat = TokenBatch(
        lengths=[len(tokens) - 1 for tokens, _ in texts],
        tokens_N=torch.cat([ints, *(torch.from_numpy(tokens[:-1]) for tokens, _ in texts)]),
        rows_R=rows_R,
        targets_R=following[rows_R],
    )
    return flat if texts else flat.empty()
