"""Drafts of the tokens that a sequence may continue with, found by n-gram in the sequences of an engine.

Speculative decoding (arXiv 2211.17192) with drafts copied from the text itself is known as prompt lookup decoding. It
needs no draft model. Imports no torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

GRAM = 3  # tokens that must agree
LONGEST = 16  # more agreeing tokens are not counted
CANDIDATES = 8  # places compared for a draft
_TABLE = 1 << 18  # places found at once; older ones are found through newer ones
_SLOT_BITS = 32


class Drafter(Protocol):
    """Proposes the next tokens of sequences. A wrong proposal costs time, and never changes a token.

    A sequence runs in a slot, and a slot has one sequence at a time. The methods are called between two steps of the
    engine, on its thread, and only for sequences that may be drafted."""

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        """Record that another sequence is in the slot. `token_ids`: its prompt, and the tokens sampled so far."""
        ...

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Record tokens that the sequence in the slot got since the last call."""
        ...

    def draft(self, slot: int, most: int) -> Sequence[int]:
        """Return at most `most` (at least 1) tokens that may follow those of the sequence; none for no draft."""
        ...


class LookUp:
    """Drafts the tokens that followed an earlier occurrence of the sequence's last tokens. It implements `Drafter`.

    It searches the tokens of the sequence itself and of the sequences that run, or ran last, in the other slots, which
    may be its siblings. The `CANDIDATES` latest places where the last `GRAM` tokens occurred are compared. It takes the
    place where the most tokens before agree too; among equal ones, the latest place.

    A hash table has the latest place of each n-gram, and each place refers to the next older one with the same hash, as
    in LZ77 compressors. So adding a token takes constant time. Entries are never removed: those of overwritten tokens
    are recognised when tokens are compared. Memory: 12 bytes per token of a slot, and 2 MB.

    >>> drafter = LookUp()
    >>> drafter.begin(0, [1, 2, 3, 4, 5, 9, 1, 2, 3])
    >>> drafter.draft(0, 4)
    [4, 5, 9, 1]
    >>> drafter.begin(1, [7, 4, 5, 9])
    >>> drafter.draft(1, 2)
    [1, 2]
    """

    def __init__(self) -> None:
        self._tokens: dict[int, array[int]] = {}  # by slot
        self._older: dict[int, array[int]] = {}  # by slot, for each place from `GRAM` on; -1 for none
        self._latest = array("q", [-1]) * _TABLE  # by hash: slot << _SLOT_BITS | index of the token after the n-gram

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        given, kept = array("i", token_ids), self._tokens.get(slot)
        if kept is None or kept != given[: len(kept)]:  # else it is a further turn of the same conversation
            self._tokens[slot], self._older[slot] = array("i"), array("q")
        self.extend(slot, given[len(self._tokens[slot]) :])

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        tokens, older, latest = self._tokens[slot], self._older[slot], self._latest
        first = max(GRAM, len(tokens) + 1)
        tokens.extend(token_ids)
        for place in range(first, len(tokens) + 1):
            at = _hash(tokens, place)
            older.append(latest[at])
            latest[at] = slot << _SLOT_BITS | place

    def draft(self, slot: int, most: int) -> list[int]:
        own = self._tokens[slot]
        if len(own) < GRAM:
            return []
        found, agreeing, code = None, GRAM - 1, self._latest[_hash(own, len(own))]
        for _ in range(CANDIDATES):
            source, place = code >> _SLOT_BITS, code & ((1 << _SLOT_BITS) - 1)
            tokens = self._tokens.get(source)
            if tokens is None or place > len(tokens):
                break
            if place < len(tokens) and (num := _num_agreeing(tokens, place, own)) > agreeing:
                found, agreeing = (tokens, place), num
                if num == LONGEST:
                    break
            code = self._older[source][place - GRAM]
        if found is None:
            return []
        tokens, place = found
        copied = tokens[place : place + most].tolist()
        if tokens is own and len(copied) < most:  # it repeats itself, and goes on doing so
            copied = (copied * -(-most // len(copied)))[:most]
        return copied


def _hash(tokens: array[int], place: int) -> int:
    return hash((tokens[place - 3], tokens[place - 2], tokens[place - 1])) & (_TABLE - 1)


def _num_agreeing(tokens: array[int], place: int, own: array[int]) -> int:
    """Return how many tokens before a place equal the last ones of `own`; at most `LONGEST`."""
    num, most = 0, min(LONGEST, place, len(own))
    while num < most and tokens[place - 1 - num] == own[-1 - num]:
        num += 1
    return num
