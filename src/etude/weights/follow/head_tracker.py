"""Where a channel's head is, to a reader that goes forward: which pointers it follows, and which it refuses.

A pointer that moves back is not followed, unless whoever moved it said by a new generation that it was meant. While a
version is fetched the channel may go on, and garbage collection may take what it left: then the head is read again.
Knows nothing of tensors: who follows says how to come to a version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from etude.errors import WeightsError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights.chain import history
from etude.weights.chain.manifest import Manifest, Pointer

LIMIT_BYTES = 64 << 30
_MAX_TRIES = 3

Moved = TypeVar("Moved")


class Behind(WeightsError):
    """The channel is not yet at the version that was asked for."""


class MovedBack(WeightsError):
    """The pointer moved back to an older version without the new generation that marks an intended rollback."""


class FollowedPointer(msgspec.Struct, frozen=True):
    """What is remembered of the pointer that was followed last: a reader goes by the pair, which never falls."""

    pointer: str  # its key
    version: Version
    generation: int
    serial: int


class HeadTracker:
    """The head of a channel, or of a branch of it. Remembers the pointer that was followed last.

    `public_key`: only pointers that its owner signed are believed. `followed`: what was remembered by a reader before,
    and is kept by whoever outlives the process; that of another pointer says nothing.
    """

    def __init__(
        self,
        store: BlobStore,
        name: str,
        branch: str = "",
        public_key: bytes | None = None,
        followed: FollowedPointer | None = None,
    ) -> None:
        self._store, self._name, self._branch, self._public_key = store, name, branch, public_key
        self._key = history.pointer_key(name, branch)
        self.followed = followed if followed is not None and followed.pointer == self._key else None
        """The pointer that was followed last; None at the start."""
        self._noted: Pointer | None = None  # the pointer that `followed` was made of

    def version(self) -> Version | None:
        """The head's version; None before the first publish. One read of some hundred bytes."""
        pointer = self._read()
        return pointer.head.version if pointer else None

    def follow(
        self,
        held: Manifest | None,
        move: Callable[[Manifest], Moved | None],
        *,
        at_least: Version | None = None,
        exactly: Version | None = None,
    ) -> Moved | None:
        """What `move` makes of the head's manifest, or of that of `exactly`; None where the head is held, or is none.

        Raises `Behind`, `WeightsError` as `Follower.advance` says, and what `move` raises.
        """
        for tries_left in reversed(range(_MAX_TRIES)):
            pointer = self._read()
            if pointer is None:
                if at_least or exactly:
                    raise _behind(at_least or exactly, None)
                return None
            if exactly is not None and exactly != pointer.head.version:
                return move(self._find(exactly))
            if held is not None and pointer.head.version == held.version:
                self._note(pointer)
                return None
            try:
                target = history.load(self._store, pointer.head)
                followed = self._admitted(pointer, target)
                if at_least is not None and self._is_before(target, at_least):
                    raise _behind(at_least, target.version)
                moved = move(target)
            except Behind:
                raise
            except WeightsError:
                if tries_left and self._read() != pointer:
                    continue  # it went on meanwhile, and garbage collection may have taken what it left
                raise
            self.followed, self._noted = followed, pointer
            return moved
        raise AssertionError("the last try returns or raises")

    def _read(self) -> Pointer | None:
        return history.head(self._store, self._name, self._branch, public_key=self._public_key)

    def _note(self, pointer: Pointer) -> None:
        """Remember a pointer to the version that is held. By the manifest that it names: of the held one nothing but
        its tensors is proven, for after a restart it is any that the store has of that version."""
        if pointer == self._noted:
            return
        try:
            named = history.load(self._store, pointer.head)
        except WeightsError:
            return  # lost or damaged: what is held is held still
        self.followed, self._noted = self._admitted(pointer, named), pointer

    def _admitted(self, pointer: Pointer, target: Manifest) -> FollowedPointer:
        """What to remember of the pointer, unless it moved back. Raises `MovedBack`."""
        seen = self.followed
        if seen is not None:
            known = target.serial and seen.serial and pointer.head.version != seen.version
            if pointer.generation < seen.generation or (
                pointer.generation == seen.generation and known and target.serial <= seen.serial
            ):
                raise MovedBack(
                    f"{self._key} moved back to {target.version}",
                    f"{seen.version} was followed; the pointer's generation is {pointer.generation} after"
                    f" {seen.generation}, the version's serial {target.serial} after {seen.serial}",
                    hint="a stale cache or a restored copy of the store does this; a rollback that is meant is made by"
                    " `etude weights point`, under a new generation",
                )
        return FollowedPointer(self._key, pointer.head.version, pointer.generation, target.serial)

    def _is_before(self, target: Manifest, version: Version) -> bool:
        """Whether a head was published before a version, as far as can be told."""
        if target.version == version:
            return False
        other = history.find(self._store, self._name, version)
        if other is None or not other.serial or not target.serial:
            return target.version.step < version.step
        return (target.generation, target.serial) < (other.generation, other.serial)

    def _find(self, version: Version) -> Manifest:
        manifest = history.find(self._store, self._name, version)
        if manifest is None:
            raise _behind(version, self.version())
        return manifest


def check_size(manifest: Manifest, limit_bytes: int) -> None:
    """Raises `WeightsError` for a version whose tensors need more than `limit_bytes`."""
    if manifest.snapshot_bytes > limit_bytes:
        raise WeightsError(
            f"{manifest.version} needs {manifest.snapshot_bytes} bytes",
            f"the limit is {limit_bytes}",
            hint="raise limit_bytes if this is the model you expect",
        )


def _behind(wanted: Version | None, head: Version | None) -> Behind:
    return Behind(
        f"{wanted} is not there",
        f"the channel is at {head}" if head else "nothing was published",
        hint="ask again: its writer may still be publishing it, or this store lags behind another",
    )
