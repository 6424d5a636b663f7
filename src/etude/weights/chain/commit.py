"""The move of a pointer, and what may come between: a lost answer, another writer, a torn pointer, a sweep.

Knows nothing of what the pointer names.
"""

from __future__ import annotations

import enum

import msgspec

from etude.errors import StoreError, WeightsError
from etude.seams import BlobStore
from etude.weights.chain.manifest import MAX_POINTER_BYTES, Damaged, Pointer, read_pointer


class Unsure(StoreError):
    """Whether the pointer moved is not known: the store gave no answer, then could not be asked."""


class Outcome(enum.Enum):
    """How a compare-and-swap ended."""

    WON = "won"
    HEALED = "healed"  # over a pointer that was lost or torn since: nobody's word against ours
    SWEPT = "swept"  # garbage collection came between: what was put for this commit may be gone
    LOST = "lost"  # somebody else moved it


def commit(store: BlobStore, key: str, expected: bytes | None, pointer: bytes) -> Outcome:
    """Move a pointer from the bytes it had. An answer that got lost is looked up: the nonce in the pointer says whose
    it is. Raises `StoreError` where the store refused and nothing moved: then it may be repeated."""
    lost: StoreError | None = None
    try:
        if store.compare_and_swap(key, expected, pointer):
            return Outcome.WON
    except StoreError as error:
        lost = error
    try:
        now = read(store, key)
    except StoreError as error:
        raise Unsure(
            f"whether {key} moved is not known", f"{lost or 'the answer was no'}; then {error.what}", hint=error.hint
        ) from error
    if now == pointer:
        return Outcome.WON
    if lost is not None and now == expected:
        raise lost
    if expected is not None and says_nothing(now) and store.compare_and_swap(key, now, pointer):
        return Outcome.HEALED
    return Outcome.SWEPT if swept_since(expected, now) else Outcome.LOST


def read(store: BlobStore, key: str) -> bytes | None:
    """A pointer's bytes, and one more than it may have; None where there is none."""
    try:
        return store.get(key, 0, MAX_POINTER_BYTES + 1)
    except KeyError:
        return None


def swept_since(before: bytes | None, now: bytes | None) -> bool:
    """Whether a pointer names what it did, and garbage collection has raised its count."""
    try:
        a, b = (read_pointer(data) if data is not None else None for data in (before, now))
    except WeightsError:
        return False
    return a is not None and b is not None and b.sweep > a.sweep and _without_sweep(a) == _without_sweep(b)


def _without_sweep(pointer: Pointer) -> Pointer:
    return msgspec.structs.replace(pointer, sweep=0, signature="")


def says_nothing(data: bytes | None) -> bool:
    """Gone, or of a form that no writer of any etude wrote."""
    if data is None:
        return True
    try:
        read_pointer(data)
    except Damaged:
        return True
    except WeightsError:  # of another format: somebody's
        return False
    return False
