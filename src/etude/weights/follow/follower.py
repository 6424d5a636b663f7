"""The reader's side of the chain: holds the exact tensors of one version, and moves to the head, whole or not at all.

Everything is fetched, decoded and proven before the follower changes, so a failed update changes nothing, and an
engine's pause contains only the writes. Where a delta is lost or damaged, the nearest anchor that works is used. The
codes that the last update overwrote are kept, so that it can be undone. A pointer that moves back is followed only
where it has a new generation, which shows that this was intended. Knows nothing of engines: it reports which codes
changed, and where.
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
    """The differences between the version held before and the one held now. Made only of proven tensors."""

    version: Version
    changed: Changes  # name -> sorted flat positions (uint32 or int64), their new codes
    replaced: Mapping[str, Tensor]  # tensors that are new, or had another dtype or shape; all of them at the start
    removed: tuple[str, ...]  # names that are no more
    fetch_s: float  # fetching, decoding, proving
    fetched_bytes: int  # objects that were fetched, those of plans that failed not counted
    healed: tuple[str, ...] = ()  # why plans before the one that worked failed


@dataclass(frozen=True)
class HeldVersion:
    """A version, its tensors, and the way back from it."""

    manifest: Manifest
    tensors: dict[str, Tensor]
    undo: UndoRecord | None = None
    before: Manifest | None = None


class Follower:
    """Follows one channel of a store, or a branch of it. Not safe between threads.

    `limit_bytes`: a version whose tensors need more is refused before anything of it is fetched. `public_key`: only
    pointers that its owner signed are believed. `can_undo`: keep what the last update overwrote (`undo_bytes`).
    `followed`: what a follower before had as `followed`, so that what moved back since then is refused.

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
        """The held version; None at the start."""
        return self._held.manifest.version if self._held else None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The held version's tensors by name."""
        return MappingProxyType(self._held.tensors if self._held else {})

    @property
    def followed(self) -> FollowedPointer | None:
        """The pointer that was followed last; None at the start. Store it to continue from it in another process."""
        return self._head.followed

    @property
    def undo_bytes(self) -> int:
        """Bytes of memory that are kept to undo the last update."""
        return self._held.undo.num_bytes if self._held and self._held.undo else 0

    def head_version(self) -> Version | None:
        """The head's version; None before the first publish. One read of some hundred bytes."""
        return self._head.version()

    def advance(self, *, at_least: Version | None = None, exactly: Version | None = None) -> Update | None:
        """Move to the head; None when it is held already or there is none.

        `at_least`: a head that was published before this version is not moved to. `exactly`: move to this version,
        wherever the head is. Raises `Behind` for a version that is not there yet, `WeightsError` when the pointer
        moved back, or no plan leads to the target, naming why each failed; what was held is held still.
        """
        started = time.perf_counter()
        held = self._held.manifest if self._held else None
        return self._head.follow(held, lambda to: self._move(to, started), at_least=at_least, exactly=exactly)

    def undo(self) -> Update:
        """Go back to the version held before the last update, without the store. Raises `WeightsError` where nothing
        is kept: at the start, and after an undo. The next `advance` goes to the head again."""
        held, started = self._held, time.perf_counter()
        if held is None or held.undo is None or held.before is None:
            raise WeightsError(
                "there is nothing to undo",
                f"{self.version} is held" if held else "nothing is held",
                hint="one update can be undone, if it is kept; `advance(exactly=...)` goes to any that is stored",
            )
        tensors = plans.verify_tensors(held.before, held.undo.apply(held.tensors), plans.Proof.CHECKSUM)
        update = make_update(held.before.version, held.tensors, tensors, started)
        self._held = HeldVersion(held.before, tensors)
        return update

    def start_from(self, version: Version, tensors: Mapping[str, Tensor]) -> bool:
        """Hold a version that was kept elsewhere, for instance on a disk, so that only what came since is fetched.

        False, and nothing is held: the store does not know it, or these are not its tensors. Raises `StoreError`.
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
        """Keep the held version in other memory: tensors of the same names and bits, for instance a shared image."""
        assert self._held is not None, "there is a version to be held"
        self._held = HeldVersion(self._held.manifest, dict(tensors), self._held.undo, self._held.before)

    def _move(self, target: Manifest, started: float) -> Update | None:
        """Come to a version and hold it; None when it is held."""
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
    """Make the update between two sets of tensors."""
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
