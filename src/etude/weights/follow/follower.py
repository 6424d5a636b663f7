"""The reader's side of a channel: holds the exact tensors of one version in memory, and moves to the newest atomically.

Everything is fetched, decoded and verified before the follower changes. So a failed update changes nothing, and an
engine's pause contains only the writes. If a delta is lost or damaged, the nearest usable full snapshot is used. The
codes that the last update overwrote are kept, so that it can be undone. A pointer that moves back to an older version
is followed only if its generation was raised, which shows that the move is intended.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from etude.errors import WeightsError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights.chain import history, plans
from etude.weights.chain.manifest import Manifest
from etude.weights.chain.undo_record import Changes, UndoRecord, compare_tensors, make_undo_record
from etude.weights.follow.head_tracker import LIMIT_BYTES, FollowedPointer, HeadTracker, check_size
from etude.weights.follow.parts import split
from etude.weights.tensors import Tensor


@dataclass(frozen=True)
class Update:
    """The difference between a reader's previous version and its new one. All tensors are verified.

    `changed`: for each tensor with changes, ascending flat positions (uint32 or int64), and the codes (new bits) there.
    `replaced`: tensors that are new, or had another dtype or shape; in the first update all tensors. `removed`: names
    of tensors that no longer exist. `fetch_s`: seconds of fetching, decoding and verifying. `fetched_bytes`: number of
    bytes fetched, without failed attempts. `healed`: the errors of failed attempts, after which another delta or
    snapshot worked.
    """

    version: Version
    changed: Changes
    replaced: Mapping[str, Tensor]
    removed: tuple[str, ...]
    fetch_s: float
    fetched_bytes: int
    healed: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeldVersion:
    """A version and its tensors by name, and, if it was kept, the record that leads back to the version `before`."""

    manifest: Manifest
    tensors: dict[str, Tensor]
    undo: UndoRecord | None = None
    before: Manifest | None = None


class Follower:
    """Follows one channel of a store, or a branch of it, and keeps the tensors of one version in memory: the *held*
    version. Not thread-safe.

    `name`: the channel. `branch`: follow this branch instead of the channel's newest version. `limit_bytes`: a version
    whose tensors need more memory is refused before anything is fetched. `public_key` (32 bytes): accept only pointers
    signed by this key. `can_undo`: whether to keep the values that the last update overwrote, for `undo`. `followed`:
    the property `followed` of an earlier follower, so that a pointer that moved back since then is refused.

    >>> from etude.stores import MemoryStore
    >>> Follower(MemoryStore()).advance() is None
    True
    """

    def __init__(
        self,
        store: BlobStore,
        name: str = "policy",
        *,
        branch: str = "",
        limit_bytes: int = LIMIT_BYTES,
        public_key: bytes | None = None,
        can_undo: bool = True,
        followed: FollowedPointer | None = None,
    ) -> None:
        self._store, self._name, self._limit_bytes, self._can_undo = store, name, limit_bytes, can_undo
        self._head = HeadTracker(store, name, branch, public_key, followed)
        self._held: HeldVersion | None = None

    @property
    def version(self) -> Version | None:
        """The held version; None before the first update."""
        return self._held.manifest.version if self._held else None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of the held version by name; empty before the first update."""
        return MappingProxyType(self._held.tensors if self._held else {})

    @property
    def followed(self) -> FollowedPointer | None:
        """The store's pointer (its record of the newest version) as followed last; None before the first update.

        Pass it to a new follower, also in another process, which then refuses a pointer that moved back.
        """
        return self._head.followed

    @property
    def undo_bytes(self) -> int:
        """Memory that is used to undo the last update, in bytes."""
        return self._held.undo.num_bytes if self._held and self._held.undo else 0

    def head_version(self) -> Version | None:
        """Read which version is the newest in the store; None before the first publish. Reads a few hundred bytes."""
        return self._head.version()

    def advance(self, *, at_least: Version | None = None, exactly: Version | None = None) -> Update | None:
        """Fetch and verify the newest version, and keep it in memory. Return the difference from the version before.

        Return None if the newest is held already or there is none. `at_least`: raise `Behind` if the newest version was
        published before this one. `exactly`: move to this version, even if another is the newest; raise `Behind` if the
        store does not have it. Raises `WeightsError` if the pointer moved back, or if no way to fetch the version works
        (with the reasons). After an error, the held version is unchanged.
        """
        started = time.perf_counter()
        held = self._held.manifest if self._held else None
        return self._head.follow(held, lambda to: self._move(to, started), at_least=at_least, exactly=exactly)

    def undo(self) -> Update:
        """Go back to the version before the last update, without using the store. Return the difference.

        Raises `WeightsError` if there is nothing to undo: before the second update, after an undo, or if `can_undo` is
        False. The next `advance` moves to the newest version again.
        """
        held, started = self._held, time.perf_counter()
        if held is None or held.undo is None or held.before is None:
            raise WeightsError(
                "there is nothing to undo",
                f"{self.version} is held" if held else "no version is held",
                hint="only the last update can be undone; `advance(exactly=...)` moves to any stored version",
            )
        tensors = plans.verify_tensors(held.before, held.undo.apply(held.tensors), plans.Proof.CHECKSUM)
        update = make_update(held.before.version, held.tensors, tensors, started)
        self._held = HeldVersion(held.before, tensors)
        return update

    def start_from(self, version: Version, tensors: Mapping[str, Tensor]) -> bool:
        """Use a version whose tensors the caller has already, for instance on disk, so that only later changes are
        fetched.

        `tensors`: all tensors of the version; they are verified by SHA-256. Return False, and change nothing, if the
        store does not have the version or these are not its tensors. Raises `StoreError`.
        """
        manifest = history.find(self._store, self._name, version)
        if manifest is None:
            return False
        held = split(tensors, (entry.name for entry in manifest.tensors))
        expected = {entry.name: entry.spec for entry in manifest.tensors}
        if len(held) < len(tensors) or {name: tensor.spec for name, tensor in held.items()} != expected:
            return False
        with suppress(plans.TensorMismatch):
            self._held = HeldVersion(manifest, plans.verify_tensors(manifest, held))
        return self._held is not None and self._held.manifest is manifest

    def rebind(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the tensors of the held version by other objects with the same names and bits.

        For instance, by tensors in shared memory. The bits are not compared.
        """
        assert self._held is not None, "there is a version to be held"
        self._held = HeldVersion(self._held.manifest, dict(tensors), self._held.undo, self._held.before)

    def _move(self, target: Manifest, started: float) -> Update | None:
        if target.version == self.version:
            return None
        self._check_size(target)
        before = self._held.tensors if self._held else {}
        fetched = plans.fetch_version(self._store, target, self.version, before, self._check_size)
        update = make_update(target.version, before, fetched.tensors, started, fetched)
        undo = make_undo_record(before, fetched.tensors, update.changed) if self._held and self._can_undo else None
        self._held = HeldVersion(target, fetched.tensors, undo, self._held.manifest if self._held else None)
        return update

    def _check_size(self, manifest: Manifest) -> None:
        check_size(manifest, self._limit_bytes)


def make_update(
    version: Version,
    before: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    started: float,
    fetched: plans.Rebuilt | None = None,
) -> Update:
    """Create the update from the tensors `before` to `tensors`, which are those of `version`.

    `started`: `time.perf_counter()` at the start of the fetch. `fetched`: the result of the fetch; its lists of changes
    are used instead of comparing tensors.
    """
    lists = fetched.decoded.lists if fetched else {}
    changed, replaced = compare_tensors(before, {name: one for name, one in tensors.items() if name not in lists})
    changed |= {name: (one.positions, one.codes) for name, one in lists.items() if name in tensors}
    return Update(
        version=version,
        changed=changed,
        replaced=replaced,
        removed=tuple(sorted(before.keys() - tensors.keys())),
        fetch_s=time.perf_counter() - started,
        fetched_bytes=fetched.fetched_bytes if fetched else 0,
        healed=fetched.failures if fetched else (),
    )
