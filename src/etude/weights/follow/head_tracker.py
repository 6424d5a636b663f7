"""Follows a pointer forward, and refuses one that moved back.

A pointer (the stored name of the newest version) that moved back to an older version is refused unless its generation
was raised, which shows that the move is intended. While a version is being fetched, the channel may move on and garbage
collection may delete objects: then the pointer is read again. The caller supplies the function that moves to a version.
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
    """Raised if the channel has not reached the requested version yet."""


class MovedBack(WeightsError):
    """Raised if a channel's pointer names an older version than before, without the mark of an intended rollback.

    That mark is a higher `generation` of the pointer.
    """


class FollowedPointer(msgspec.Struct, frozen=True):
    """A reader's record of the pointer that it followed last. A pointer is the store's record of the newest version.

    By this record the reader recognises a pointer that moved back. `pointer`: its key in the store. `version`: the
    version that it named. The pair (`generation` of the pointer, `serial` of the version) never decreases.
    """

    pointer: str
    version: Version
    generation: int
    serial: int


class HeadTracker:
    """Reads the pointer (the record of the newest version) of a channel or branch, and refuses one that moved back.

    `public_key` (32 bytes): accept only pointers signed by this key. `followed`: the pointer that an earlier reader
    followed last; ignored if it is of another channel or branch.
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
        """The pointer that was followed last; None before the first."""
        self._noted: Pointer | None = None  # the pointer that `followed` describes

    def version(self) -> Version | None:
        """Read which version the pointer names; None before the first publish. One read of a few hundred bytes."""
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
        """Call `move` with the manifest of the newest version (or of `exactly`), and return its result.

        Return None if the newest version is held already or there is none. `held`: the manifest of the held version.
        Raises `Behind` and `WeightsError` in the cases of `Follower.advance`, and the errors of `move`.
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
                    continue  # the head moved on, and garbage collection may have deleted objects of the old one
                raise
            self.followed, self._noted = followed, pointer
            return moved
        raise AssertionError("the last try returns or raises")

    def _read(self) -> Pointer | None:
        return history.head(self._store, self._name, self._branch, public_key=self._public_key)

    def _note(self, pointer: Pointer) -> None:
        """Remember a pointer to the held version, after reading its manifest, which may differ from the held one."""
        if pointer == self._noted:
            return
        try:
            named = history.load(self._store, pointer.head)
        except WeightsError:
            return  # lost or damaged: keep the held version
        self.followed, self._noted = self._admitted(pointer, named), pointer

    def _admitted(self, pointer: Pointer, target: Manifest) -> FollowedPointer:
        seen = self.followed
        if seen is not None:
            known = target.serial and seen.serial and pointer.head.version != seen.version
            if pointer.generation < seen.generation or (
                pointer.generation == seen.generation and known and target.serial <= seen.serial
            ):
                raise MovedBack(
                    f"{self._key} moved back to {target.version}",
                    f"{seen.version} was followed before; the pointer's generation went from {seen.generation} to"
                    f" {pointer.generation}, the version's serial from {seen.serial} to {target.serial}",
                    hint="a stale cache or a restored copy of the store can cause this; for an intended"
                    " rollback use `etude weights point`, which raises the generation",
                )
        return FollowedPointer(self._key, pointer.head.version, pointer.generation, target.serial)

    def _is_before(self, target: Manifest, version: Version) -> bool:
        """Return whether the head was published before a version, as far as known."""
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
    """Raise `WeightsError` if the tensors of a version need more than `limit_bytes`."""
    if manifest.snapshot_bytes > limit_bytes:
        raise WeightsError(
            f"{manifest.version} needs {manifest.snapshot_bytes} bytes",
            f"the limit is {limit_bytes}",
            hint="raise limit_bytes if this is the model you expect",
        )


def _behind(wanted: Version | None, head: Version | None) -> Behind:
    return Behind(
        f"{wanted} is not published",
        f"the channel is at {head}" if head else "nothing was published",
        hint="try again later: its writer may still be publishing it, or this store lags behind another",
    )
