"""Moves a channel's pointer by compare-and-swap and classifies the outcome.

The outcomes are success, a lost answer, another writer, a damaged pointer, and garbage collection in the meantime.
"""

from __future__ import annotations

import enum

import msgspec

from etude.errors import StoreError, WeightsError
from etude.seams import BlobStore
from etude.weights.chain.manifest import MAX_POINTER_BYTES, Damaged, Pointer, read_pointer


class CommitUnknown(StoreError):
    """Raised if the store did not answer a compare-and-swap and could not be read afterwards.

    It is then not known whether the pointer, which names the newest version, has moved.
    """


class Outcome(enum.Enum):
    """The outcome of moving a pointer by compare-and-swap.

    WON: the pointer moved. HEALED: it moved, and replaced a pointer that was lost or damaged in the meantime. SWEPT: it
    did not move, since garbage was collected in the meantime; objects written for this commit may be deleted. LOST: it
    did not move, since another writer moved it.
    """

    WON = "won"
    HEALED = "healed"
    SWEPT = "swept"
    LOST = "lost"


def commit(store: BlobStore, key: str, expected: bytes | None, pointer: bytes) -> Outcome:
    """Move the pointer at `key` from the bytes `expected` (None: no pointer yet) to the bytes `pointer`.

    A pointer with other bytes than `expected` is replaced only if it is missing or damaged. If the store does not
    answer, the pointer is read back: its random nonce tells whether this writer wrote it.

    Raises `StoreError` if the store failed and the pointer did not move; then the call can be repeated. Raises
    `CommitUnknown` if the pointer could not be read back either.
    """
    lost: StoreError | None = None
    try:
        if store.compare_and_swap(key, expected, pointer):
            return Outcome.WON
    except StoreError as error:
        lost = error
    try:
        now = read_pointer_bytes(store, key)
    except StoreError as error:
        raise CommitUnknown(
            f"it is not known whether {key} moved",
            f"{lost or 'the compare-and-swap was rejected'}; then {error.what}",
            hint=error.hint,
        ) from error
    if now == pointer:
        return Outcome.WON
    if lost is not None and now == expected:
        raise lost
    if expected is not None and is_missing_or_damaged(now) and store.compare_and_swap(key, now, pointer):
        return Outcome.HEALED
    return Outcome.SWEPT if swept_since(expected, now) else Outcome.LOST


def read_pointer_bytes(store: BlobStore, key: str) -> bytes | None:
    """Return the stored bytes of the pointer (the record of the newest version) at `key`; None if there is none.

    At most `MAX_POINTER_BYTES + 1` bytes are returned.
    """
    try:
        return store.get(key, 0, MAX_POINTER_BYTES + 1)
    except KeyError:
        return None


def swept_since(before: bytes | None, now: bytes | None) -> bool:
    """Return whether a pointer was rewritten since it had the bytes `before`, and only by garbage collection.

    `now`: its present bytes. None stands for a missing pointer. Garbage collection raises the `sweep` count of the
    pointer, and does not change the version that it names.
    """
    try:
        a, b = (read_pointer(data) if data is not None else None for data in (before, now))
    except WeightsError:
        return False
    return a is not None and b is not None and b.sweep > a.sweep and _without_sweep(a) == _without_sweep(b)


def _without_sweep(pointer: Pointer) -> Pointer:
    return msgspec.structs.replace(pointer, sweep=0, signature="")


def is_missing_or_damaged(data: bytes | None) -> bool:
    """Return whether a pointer (the record of the newest version), given as its bytes, is missing (None) or unreadable.

    A pointer of another format is neither: another version of etude wrote it.
    """
    if data is None:
        return True
    try:
        read_pointer(data)
    except Damaged:
        return True
    except WeightsError:  # of another format
        return False
    return False
