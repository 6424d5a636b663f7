"""A follower that holds no image: the tensors it decodes from, and proves by, are the engine's live memory itself.

`prepare` fetches a version's objects, reads from each what changes as lists (`codec.changes`), and computes of every
target tensor the checksum that it will have, from the live bytes and the changes: what is compared is never made.
Beside the live weights that takes the lists and the objects that are on their way. Whoever runs the engine writes the
update (`targets.Target`) and says so: until `mark_adopted`, and after `mark_undone`, the version before is what is held.

Over several deltas at once lists are merged, for which one object's tensors (`objects.OBJECT_ELEMENTS`) are made at a
time; so they are from an anchor, and those of packed 4 bits are unpacked one object at a time, always. A tensor that
comes whole becomes a list against the live one, where that is the shorter; else it is in the update as it is, and at
the start that may be all of them.

Library only: the engines of a run follow by `FollowerProcess`, or `PartFollower` in vLLM. It is for your own engine
(docs/guides/weights-alone.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from etude.errors import WeightsError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights.chain import history, plans
from etude.weights.chain.manifest import Manifest
from etude.weights.delta import codec
from etude.weights.delta.arena import trim_heap
from etude.weights.delta.changes import Changes, narrow
from etude.weights.delta.checksums import checksum, checksums_around
from etude.weights.follow.follower import Update
from etude.weights.follow.head_tracker import LIMIT_BYTES, FollowedPointer, HeadTracker, check_size
from etude.weights.follow.parts import split
from etude.weights.tensors import Codes, Spec, Tensor, digest_of_parts, tensor_digest

PIECE_BYTES = 1 << 18
"""What is copied of a tensor at a time to write changes in: it stays in a core's cache."""

Tensors = Mapping[str, Tensor]
Live = Tensors | Callable[[], Tensors]
"""An engine's memory as checkpoint tensors that view it (`arrays.tensor_of`), or a call that gives them. Memory that is
not in C order is copied by such a view: give a call, so that the copy lives while a version is prepared."""


@dataclass
class _Made:
    """What a way led to so far, beside the live memory: by name what differs from it, nothing where nothing does."""

    names: Iterable[str] = ()
    found: dict[str, Changes | Tensor] = field(default_factory=dict)


class LiveFollower:
    """Follows one channel of a store, or a branch of it, over live memory. Not safe between threads.

    Nobody writes the live memory from `prepare` until its update was applied or given up. `limit_bytes`, `public_key`,
    `followed`: as `Follower` has them.

    >>> from etude.stores import MemoryStore
    >>> LiveFollower(MemoryStore(), {}).prepare() is None
    True
    """

    def __init__(
        self,
        store: BlobStore,
        live: Live,
        name: str = "policy",
        *,
        branch: str = "",
        limit_bytes: int = LIMIT_BYTES,
        public_key: bytes | None = None,
        followed: FollowedPointer | None = None,
    ) -> None:
        self._store, self._live, self._name, self._limit_bytes = store, live, name, limit_bytes
        self._head = HeadTracker(store, name, branch, public_key, followed)
        self._held: Manifest | None = None
        self._before: Manifest | None = None  # what an undo leads to
        self._coming: tuple[Update, Manifest] | None = None

    @property
    def version(self) -> Version | None:
        """The version in live memory; None at the start."""
        return self._held.version if self._held else None

    @property
    def followed(self) -> FollowedPointer | None:
        """The pointer that was followed last; None at the start. Store it to continue from it in another process."""
        return self._head.followed

    @property
    def specs(self) -> dict[str, Spec]:
        """All tensors of the version that was prepared and not adopted yet; else of the held one."""
        manifest = self._coming[1] if self._coming else self._held
        return {entry.name: entry.spec for entry in manifest.tensors} if manifest else {}

    def head_version(self) -> Version | None:
        """Read the head's version; None before the first publish. Reads some hundred bytes."""
        return self._head.version()

    def prepare(self, *, at_least: Version | None = None, exactly: Version | None = None) -> Update | None:
        """Fetch and prove the changes that lead the live memory to the head; None when it has the head, or there is
        none.

        Nothing is moved: an update that is not adopted is given again by the next call. `at_least`, `exactly`, and what
        is raised: as by `Follower.advance`.
        """
        started, self._coming = time.perf_counter(), None
        self._coming = self._head.follow(
            self._held, lambda target: self._update(target, started), at_least=at_least, exactly=exactly
        )
        if self._coming is None:
            return None
        trim_heap()  # now, as nobody waits yet: what was fetched, and what is left of the update before
        return self._coming[0]

    def mark_adopted(self, update: Update) -> None:
        """The live memory now holds what `prepare` gave last. Raises `WeightsError` for another update."""
        if self._coming is None or self._coming[0] is not update:
            raise WeightsError(
                f"{update.version} is not the update that is awaited",
                f"prepared last: {self._coming[1].version if self._coming else None}; held: {self.version}",
                hint="call `mark_adopted` once, with the result of the last `prepare`",
            )
        self._before, self._held, self._coming = self._held, self._coming[1], None

    def mark_undone(self) -> None:
        """Record that the live memory was set back to its state before the last adopted update (`Swap.undo`). The next
        `prepare` leads to the head again. Raises `WeightsError` where there is no earlier state."""
        if self._before is None:
            raise WeightsError(
                "there is nothing to undo",
                f"{self.version} is held" if self._held else "nothing is held",
                hint="one update can be undone; `prepare(exactly=...)` leads to any version that is stored",
            )
        self._held, self._before, self._coming = self._before, None, None

    def start_from(self, version: Version) -> bool:
        """Start from a version whose weights are in live memory already, for instance because they were loaded from
        disk.

        Returns False, and does not start from it, where the store does not have the version, or the memory holds other
        tensors. Raises `StoreError`.
        """
        self.forget()
        manifest = history.find(self._store, self._name, version)
        if manifest is not None and not self._differing(manifest, None, plans.Proof.DIGEST):
            self._held = manifest
        return self._held is not None

    def check(self, names: Iterable[str] | None = None) -> list[str]:
        """Names whose live memory is not, by checksum, what is held: of these tensors, or of all. For a scrub in the
        background, some at a time. Where it names some, `forget`, `prepare` and adopt mend them."""
        return self._differing(self._held, names, plans.Proof.CHECKSUM) if self._held else []

    def forget(self) -> None:
        """Hold nothing: the next `prepare` comes from an anchor, and lists where the live memory differs from it."""
        self._held = self._before = self._coming = None

    def _views(self, names: Iterable[str]) -> dict[str, Tensor]:
        return split(self._live() if callable(self._live) else self._live, names)

    def _differing(self, manifest: Manifest, names: Iterable[str] | None, proof: plans.Proof) -> list[str]:
        wanted = None if names is None else {*names}
        entries = [entry for entry in manifest.tensors if wanted is None or entry.name in wanted]
        views = self._views(entry.name for entry in entries)
        found = []
        for entry in entries:
            try:
                if entry.name not in views or views[entry.name].spec != entry.spec:
                    found.append(entry.name)
                else:
                    plans.verify_tensor(manifest, entry, views[entry.name], proof)
            except plans.TensorMismatch:
                found.append(entry.name)
        return found

    def _update(self, target: Manifest, started: float) -> tuple[Update, Manifest] | None:
        if target.version == self.version:
            return None
        held = {entry.name for entry in self._held.tensors} if self._held else set[str]()
        views = self._views(held | {entry.name for entry in target.tensors})

        def start(plan: plans.Plan) -> _Made:
            return _Made(held if plan.start else ())

        def step(plan: plans.Plan, hop: plans.Hop, made: _Made) -> _Made:
            check_size(hop.manifest, self._limit_bytes)
            proof = plans.required_proof(plan) if hop.manifest is target else None
            return _after(self._store, hop, made, views, proof)

        made, num_bytes, failures = plans.try_plans(self._store, target, self.version, start, step)
        lists = {name: one for name, one in made.found.items() if isinstance(one, Changes)}
        update = Update(
            version=target.version,
            changed={name: (one.positions, one.codes) for name, one in lists.items()},
            replaced={name: one for name, one in made.found.items() if isinstance(one, Tensor)},
            removed=tuple(sorted(held - {*made.names})),
            fetch_s=time.perf_counter() - started,
            fetched_bytes=num_bytes,
            healed=failures,
        )
        return update, target


def _after(store: BlobStore, hop: plans.Hop, made: _Made, views: Tensors, proof: plans.Proof | None) -> _Made:
    """What is made by one hop more; compared, where a proof is named, with its manifest."""
    after = _Made([entry.name for entry in hop.manifest.tensors])
    for data, entries in plans.fetch_objects(store, hop.manifest, hop.way):
        names = [entry.name for entry in entries]
        old = _before(hop, names, made, views)
        found: list[Changes | Tensor | None] = [*codec.changes(data, [entry.spec for entry in entries], old)]
        for i, entry in enumerate(entries):
            live = views.get(entry.name)
            if live is not None and live.spec != entry.spec:
                live = None
            one, found[i] = found[i], None  # let go of, tensor by tensor
            assert one is not None
            one = _from_live(live, made.found.get(entry.name) if hop.way.base else None, one)
            if proof is not None:
                plans.verify_lazily(
                    hop.manifest, entry, proof, partial(_digest, entry.spec, live, one), partial(_checksum, live, one)
                )
            if isinstance(one, Tensor) or one.positions.size:
                after.found[entry.name] = one
    return after


def _before(hop: plans.Hop, names: Sequence[str], made: _Made, views: Tensors) -> list[Tensor | None]:
    """The tensors that a hop applies to: live ones as they are, others made for this object."""
    there = {*made.names} if hop.way.base else set[str]()
    return [_written(views.get(name), made.found.get(name)) if name in there else None for name in names]


def _from_live(live: Tensor | None, before: Changes | Tensor | None, one: Changes | Tensor) -> Changes | Tensor:
    """What differs from the live tensor of the same spec (None: there is none), by `one` that came after `before`."""
    if isinstance(one, Tensor):
        return one if live is None else _listed(live, one)
    if before is None:
        return one
    if isinstance(before, Tensor) or live is None:
        written = _written(live, before, one)
        assert written is not None, "a hop's changes are of what the hop before made"
        return written
    kept = np.isin(before.positions, one.positions, assume_unique=True, invert=True)
    positions = np.concatenate([before.positions[kept], one.positions])
    codes = np.concatenate([before.codes[kept], one.codes])
    order = np.argsort(positions)
    positions, codes = positions[order], codes[order]
    differ = live.codes[positions] != codes
    return Changes(positions[differ], codes[differ])


def _written(live: Tensor | None, *changes: Changes | Tensor | None) -> Tensor | None:
    """A tensor after what became of it; itself where nothing did."""
    made = live
    for one in changes:
        if isinstance(one, Tensor):
            made = one
        elif one is not None and one.positions.size and made is not None:
            codes = made.codes.copy()
            codes[one.positions] = one.codes
            made = Tensor(made.dtype, made.shape, codes)
    return made


def _listed(live: Tensor, new: Tensor) -> Changes | Tensor:
    """Where a tensor of the same spec differs; itself, where a list would be no shorter."""
    width, most = live.codes.itemsize, PIECE_BYTES // live.codes.itemsize
    empty = narrow(np.empty(0, np.int64), live.codes.size)
    parts, left = [empty], new.num_bytes // (empty.itemsize + width)
    for start in range(0, live.codes.size, most):
        where = np.flatnonzero(live.codes[start : start + most] != new.codes[start : start + most])
        parts.append(narrow(where + start, live.codes.size))
        left -= where.size
        if left < 0:
            return new
    positions = np.concatenate(parts)
    return Changes(positions, new.codes[positions])


def _digest(spec: Spec, live: Tensor | None, one: Changes | Tensor) -> str:
    """The digest of what a tensor will be."""
    if isinstance(one, Tensor):
        return tensor_digest(one)
    assert live is not None, "changes are of a live tensor"
    return digest_of_parts(spec, _pieces(live.codes, one))


def _checksum(live: Tensor | None, one: Changes | Tensor) -> str:
    """The checksum of what a tensor will be."""
    if isinstance(one, Tensor):
        return checksum(one.codes)
    assert live is not None, "changes are of a live tensor"
    return checksums_around(live.codes, one)[1]


def _pieces(codes: Codes, changes: Changes) -> Iterator[Codes]:
    """The codes with the changes written in, piece by piece."""
    most = PIECE_BYTES // codes.itemsize
    starts = range(0, codes.size, most)
    firsts = np.searchsorted(changes.positions, np.array(starts, changes.positions.dtype)).tolist()
    for start, first, last in zip(starts, firsts, [*firsts, changes.positions.size][1:], strict=True):
        piece = codes[start : start + most]
        if first < last:
            piece = piece.copy()
            piece[changes.positions[first:last] - start] = changes.codes[first:last]
        yield piece
