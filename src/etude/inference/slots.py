"""The KV slots of an engine: which session uses each slot, and for which tokens it holds keys and values.

A slot is a row of the KV cache, as long as the longest context. What a request computed stays in its slot until the
slot is needed. Any later request whose prompt begins with the same tokens reuses it: it takes the slot itself, or a
copy. For a new request an empty slot is taken first, then the least recently used one that no session keeps, then that
of the least recently used idle session. KV is valid for one version of the weights only: a new version empties all
slots.

A model with recurrent layers can continue a sequence only where the states of these layers are known: behind all that
its slot has computed, and at multiples of `grain` tokens. Then only such prefixes are reused.

Prefixes are found by a hash per block of `BLOCK` tokens, which is compared in all slots at once. A match is then
compared token by token before it is used.

Shapes: S slots, C positions of a slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etude.records.wire import I32

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

BLOCK = 32  # tokens that are hashed together, and the fewest that are waited for
MIN_COPY = 16  # fewer tokens are computed sooner than their keys are copied
_FACTORS = np.random.default_rng(0).integers(0, 2**64, BLOCK, np.uint64, endpoint=False) | np.uint64(1)


@dataclass(slots=True, eq=False)
class Slot:
    """One row of the KV cache.

    - `index`: the number of the row.
    - `session_id`: the session whose context it has, or whose request runs in it; "" when no session keeps it.
    - `busy`: whether a request runs in it.
    - `used`: a counter that grows with each use; 0 for an empty slot."""

    index: int
    session_id: str = ""
    busy: bool = False
    used: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `num_tokens` tokens of a prompt, whose KV is in the slot with the number `row`."""

    row: int
    num_tokens: int


class SlotTable:
    """All KV slots, the tokens of each, and the idle sessions that keep some of them.

    `held`: the number of leading tokens for which each slot has valid KV, [S] int64. With `share` False no KV is
    reused, for comparisons. `grain`: prefixes are reused at multiples of this number of tokens; 1: at any.

    >>> table, ids = SlotTable(2, 64), np.arange(32, dtype=np.int32)
    >>> first = table.acquire("s", ids)
    >>> table.begin(first, ids, Prefix(0, 0))
    >>> table.extend(first, [], held=32)
    >>> second = table.acquire("t", ids)
    >>> table.longest(second, ids, table.shared(ids))
    Prefix(row=0, num_tokens=32)
    """

    def __init__(self, num_slots: int, context_tokens: int, *, share: bool = True, grain: int = 1) -> None:
        self._grain = grain
        self._slots = [Slot(i) for i in range(num_slots)]
        self._resting = dict.fromkeys(self._slots)  # no request runs in them
        self._idle: dict[str, Slot] = {}  # by the session that keeps it
        self._share, self._clock = share, 0
        num_blocks = context_tokens // BLOCK + 1
        self._tokens = np.zeros((num_slots, num_blocks * BLOCK), np.int32)
        self._hashes = np.zeros((num_slots, num_blocks), np.uint64)  # 0 for blocks that are not full
        self._written: I64 = np.zeros(num_slots, np.int64)  # known tokens: those held, and those of a prompt in work
        self.held: I64 = np.zeros(num_slots, np.int64)

    @property
    def num_available(self) -> int:
        """The number of slots in which no request runs."""
        return len(self._resting)

    def idle(self, session_id: str) -> Slot | None:
        """Return the slot that an idle session keeps, or None if it keeps none."""
        return self._idle.get(session_id)

    def acquire(self, session_id: str, ids: I32) -> Slot | None:
        """Take a slot for a request whose prompt begins with `ids`, [T]. Returns None when a request runs in every
        slot.

        The slot that the session keeps is taken if there is one. Otherwise a slot that no session keeps is preferred.
        Among these, the slot with the longest prefix of `ids` is taken last, so that its KV can be copied to the slot
        that is taken. The taken slot keeps its KV until `begin`."""
        slot = self._idle.pop(session_id, None)
        if slot is None and self._resting:
            source = self.longest(None, ids, self.shared(ids)).row if self.held.any() else -1
            slot = min(self._resting, key=lambda s: (s.session_id != "", s.index == source, s.used, s.index))
            self._idle.pop(slot.session_id, None)
        if slot is not None:
            del self._resting[slot]
            slot.session_id, slot.busy = session_id, True
        return slot

    def release(self, slot: Slot, *, keep: bool) -> None:
        """Release the slot of a request that has ended. With `keep` the slot's KV stays reserved for the session."""
        slot.busy = False
        self._resting[slot] = None
        slot.used = self._tick() if self.held[slot.index] else 0
        if keep and slot.used:
            before = self._idle.get(slot.session_id)  # two concurrent calls of one session: keep the later
            if before is not None:
                before.session_id = ""
            self._idle[slot.session_id] = slot
        else:
            slot.session_id = ""

    def shared(self, ids: I32) -> I64:
        """Return for each slot the length of the prefix that it shares with `ids`, [S] int64, as far as `grain` allows.

        The KV of these tokens may not be computed yet (`held`). A hash collision can make a length too large; `longest`
        compares the tokens."""
        if not self._share:
            return np.zeros_like(self.held)
        num_blocks = len(ids) // BLOCK
        given = np.full((num_blocks + 1) * BLOCK, -1, np.int32)
        given[: len(ids)] = ids
        equal = self._hashes[:, :num_blocks] == _hashes(given[: num_blocks * BLOCK])
        blocks = np.where(equal.all(1), num_blocks, equal.argmin(1)) if num_blocks else np.zeros_like(self.held)
        at = (blocks * BLOCK)[:, None] + np.arange(BLOCK)
        same = np.take_along_axis(self._tokens, at, 1) == given[at]
        more = np.where(same.all(1), BLOCK, same.argmin(1))
        shared: I64 = np.minimum(blocks * BLOCK + more, self._written)
        return np.where(self.held <= shared, np.maximum(self.held, self._cut(shared)), self._cut(shared))

    def _cut(self, num_tokens: I64) -> I64:
        """Round numbers of tokens down to lengths of prefixes with which another sequence can begin."""
        return num_tokens // self._grain * self._grain

    def longest(self, slot: Slot | None, ids: I32, shared: I64) -> Prefix:
        """Return the longest prefix of `ids` for which a slot has KV. `shared` is the result of `shared(ids)`.

        The prefix in `slot` is preferred, unless another one is longer by at least `MIN_COPY` tokens."""
        here = np.where(self.held <= shared, self.held, self._cut(shared))
        row = int(here.argmax())
        if slot is not None and here[row] < here[slot.index] + MIN_COPY:
            row = slot.index
        num = int(here[row])
        same = num_shared_tokens(self._tokens[row, :num], ids[:num])
        return Prefix(row, same if same == num else same // self._grain * self._grain)

    def begin(self, slot: Slot, prompt_ids: I32, prefix: Prefix) -> None:
        """Record that a request starts in `slot` from the KV of `prefix`, and will compute the rest of its prompt.

        If the prefix is in another slot, the caller copies its KV."""
        row, source = slot.index, self._slots[prefix.row]
        if not source.busy:
            source.used = self._tick()
        self._written[row], self.held[row] = 0, prefix.num_tokens
        self._hashes[row] = 0
        self._write(row, prompt_ids)

    def extend(self, slot: Slot, sampled: list[int], *, held: int) -> None:
        """Record the progress of a request: `sampled` are newly sampled token ids, `held` is the number of tokens with
        KV by now."""
        if sampled:
            self._write(slot.index, np.array(sampled, np.int32))
        self.held[slot.index] = held

    def written(self, slot: Slot) -> int:
        """Return the number of recorded tokens of the slot's request, including tokens whose KV is not computed yet."""
        return int(self._written[slot.index])

    def swapped(self) -> None:
        """Empty all slots after a change of the weights. No session keeps a slot any more."""
        self._written[:] = 0
        self.held[:] = 0
        self._idle.clear()
        for slot in self._resting:
            slot.session_id, slot.used = "", 0

    def _write(self, row: int, ids: I32) -> None:
        start = int(self._written[row])
        stop = start + len(ids)
        self._tokens[row, start:stop] = ids
        self._written[row] = stop
        first, last = start // BLOCK, stop // BLOCK
        self._hashes[row, first:last] = _hashes(self._tokens[row, first * BLOCK : last * BLOCK])

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _hashes(ids: I32) -> U64:
    """Return the hash of each block of `BLOCK` tokens. The length of `ids` must be a multiple of `BLOCK`."""
    blocks = ids.reshape(-1, BLOCK).astype(np.uint64) + np.uint64(1)
    hashes: U64 = (blocks * _FACTORS).sum(1, dtype=np.uint64)
    return hashes


def num_shared_tokens(one: I32, other: I32) -> int:
    """Return the length of the common prefix of two contexts.

    >>> num_shared_tokens(np.array([5, 6, 7], np.int32), np.array([5, 6, 9, 9], np.int32))
    2
    """
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
