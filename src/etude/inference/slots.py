"""Who holds which KV slot: pure bookkeeping, no tensors, no clock.

A slot is a row of the KV cache, as long as the longest context. A session keeps its slot between two calls, so that
the next call computes only what is new; when a slot is needed, the session unused for longest loses its own. Kept
contents are worth something under one version only: a swap forgets every idle session, and what is running goes on
over keys of two versions and is forgotten at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from etude.records.wire import I32


@dataclass(slots=True, eq=False)
class Slot:
    """One row of the KV cache."""

    index: int
    session_id: str = ""  # whose context it holds, or whose request runs in it
    busy: bool = False  # a request runs in it
    stale: bool = False  # it holds keys of an older version
    kept: I32 | None = None  # [T] an idle session's tokens: position i of the KV belongs to kept[i]


class SlotTable:
    """Slots, and the sessions that keep them.

    >>> table = SlotTable(2)
    >>> slot, num_cached = table.acquire("s", np.array([5, 6, 7], np.int32))
    >>> slot.index, num_cached
    (0, 0)
    >>> table.release(slot, np.array([5, 6, 7, 8], np.int32))
    >>> table.acquire("s", np.array([5, 6, 7, 8, 9], np.int32))[1]
    4
    """

    def __init__(self, num_slots: int) -> None:
        self._free = [Slot(i) for i in range(num_slots)]  # sorted: low indices first keeps running slots together
        self._idle: dict[str, Slot] = {}  # by session, the one unused for longest first
        self._busy: set[Slot] = set()

    @property
    def num_available(self) -> int:
        """Slots that requests could have now: free ones and those of idle sessions."""
        return len(self._free) + len(self._idle)

    def idle(self, session_id: str) -> Slot | None:
        """The slot that an idle session keeps."""
        return self._idle.get(session_id)

    def acquire(self, session_id: str, prompt_ids: I32, *, spare: str | None = None) -> tuple[Slot, int] | None:
        """A slot for the request and how many of the prompt's tokens it holds already; None when all are busy. The idle
        session `spare` loses its slot only when no other can be had.

        The last token of a prompt always counts as new: its logits are what the request wants.
        """
        slot, num_cached = self._idle.pop(session_id, None), 0
        if slot is not None:
            num_cached = _num_extended(slot, prompt_ids)
        elif self._free:
            slot = self._free.pop(0)
        elif self._idle:
            slot = self._idle.pop(next((s for s in self._idle if s != spare), next(iter(self._idle))))
        else:
            return None
        slot.session_id, slot.busy, slot.stale, slot.kept = session_id, True, False, None
        self._busy.add(slot)
        return slot, num_cached

    def release(self, slot: Slot, kept: I32 | None = None) -> None:
        """The request is over; `kept` are the tokens whose KV the slot holds, None when nobody will come back."""
        self._busy.remove(slot)
        slot.busy = False
        if kept is None or slot.stale:
            self._let_go(slot)
            return
        before = self._idle.pop(slot.session_id, None)  # two calls of one session at once: the later one stays
        if before is not None:
            self._let_go(before)
        slot.kept = kept
        self._idle[slot.session_id] = slot

    def swapped(self) -> None:
        """The weights changed: idle sessions are forgotten, busy slots are stale."""
        for slot in self._idle.values():
            self._let_go(slot)
        self._idle.clear()
        for slot in self._busy:
            slot.stale = True

    def _let_go(self, slot: Slot) -> None:
        slot.session_id, slot.stale, slot.kept = "", False, None
        self._free.append(slot)
        self._free.sort(key=lambda s: s.index)


def _num_extended(slot: Slot, prompt_ids: I32) -> int:
    """Tokens of the prompt that the slot holds: all that it kept, or 0 when the prompt goes another way."""
    kept = slot.kept
    if kept is None or len(prompt_ids) < len(kept) or not np.array_equal(prompt_ids[: len(kept)], kept):
        return 0
    return min(len(kept), len(prompt_ids) - 1)


def num_shared(one: I32, other: I32) -> int:
    """The number of leading tokens in which two contexts agree.

    >>> num_shared(np.array([5, 6, 7], np.int32), np.array([5, 6, 9, 9], np.int32))
    2
    """
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
