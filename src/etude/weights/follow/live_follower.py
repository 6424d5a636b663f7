"""A follower without a copy of the weights: it decodes from, and verifies, the engine's live memory itself.

`prepare` fetches the objects of a version and decodes them to lists of changes (`codec.changes`). It computes the
checksum that every target tensor will have from the live bytes and the changes, without creating the tensor. Besides
the live weights this needs memory for the lists and the objects being fetched. The engine then writes the update
(`targets.Target`) and reports it: until `mark_adopted`, and after `mark_undone`, the previous version counts as held.

If several deltas are applied at once, their lists are merged; for that, the tensors of one object
(`codec.OBJECT_ELEMENTS`) are created at a time. The same holds for an update from a full snapshot, and for packed 4-bit
tensors always. A tensor that is stored in full becomes a list of differences to the live one, if that is shorter;
otherwise it is in the update as it is. At the start that may be all tensors.

Library only, for your own engine (docs/guides/weights-alone.md): the engines of a run use `FollowerProcess`, or the
vLLM worker extension.
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
from etude.weights.delta.checksums import checksum, checksums_before_after
from etude.weights.follow.follower import Update
from etude.weights.follow.head_tracker import LIMIT_BYTES, FollowedPointer, HeadTracker, check_size
from etude.weights.follow.parts import split
from etude.weights.tensors import Codes, Spec, Tensor, digest_of_parts, tensor_digest

PIECE_BYTES = 1 << 18
"""Number of bytes of a tensor that are copied at a time to apply changes: fits in a core's cache."""

Tensors = Mapping[str, Tensor]
Live = Tensors | Callable[[], Tensors]
"""An engine's memory as checkpoint tensors that are views of it (`arrays.tensor_of`), or a function that returns them.
For memory that is not in C order, such a view is a copy: then pass a function, so that the copy lives only while a
version is prepared."""


@dataclass
class _Result:
    """The result of the hops so far, relative to live memory: by name, what differs from it; absent if nothing does."""

    names: Iterable[str] = ()
    found: dict[str, Changes | Tensor] = field(default_factory=dict)


class LiveFollower:
    """Follows a channel of a store like `Follower`, but uses an engine's own memory as its copy of the weights.

    `live`: the engine's memory by checkpoint name, or a function that returns it. Nothing may write it from `prepare`
    until the update was applied or abandoned. The other arguments are those of `Follower`. Not thread-safe.

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
        self._before: Manifest | None = None  # the version before the last update
        self._prepared: tuple[Update, Manifest] | None = None

    @property
    def version(self) -> Version | None:
        """The version in live memory; None before the first."""
        return self._held.version if self._held else None

    @property
    def followed(self) -> FollowedPointer | None:
        """The store's pointer (its record of the newest version) as followed last; None before the first update.

        Pass it to a new follower, also in another process, which then refuses a pointer that moved back.
        """
        return self._head.followed

    @property
    def specs(self) -> dict[str, Spec]:
        """The dtype and shape of all tensors of the prepared version; of the held version if none is prepared."""
        manifest = self._prepared[1] if self._prepared else self._held
        return {entry.name: entry.spec for entry in manifest.tensors} if manifest else {}

    def head_version(self) -> Version | None:
        """Read which version is the newest in the store; None before the first publish. Reads a few hundred bytes."""
        return self._head.version()

    def prepare(self, *, at_least: Version | None = None, exactly: Version | None = None) -> Update | None:
        """Fetch and verify the changes that lead the live memory to the newest version, and return them.

        Return None if the memory has the newest version or there is none. Live memory is not written. If the update is
        not adopted, the next call returns it again. `at_least`, `exactly` and the errors are those of
        `Follower.advance`.
        """
        started, self._prepared = time.perf_counter(), None
        self._prepared = self._head.follow(
            self._held, lambda target: self._update(target, started), at_least=at_least, exactly=exactly
        )
        if self._prepared is None:
            return None
        trim_heap()  # now, outside of the pause: buffers of the fetch and of the update before
        return self._prepared[0]

    def mark_adopted(self, update: Update) -> None:
        """Record that the live memory now has the version that `update`, the result of the last `prepare`, leads to.

        Raises `WeightsError` for another update.
        """
        if self._prepared is None or self._prepared[0] is not update:
            raise WeightsError(
                f"{update.version} is not the update that was prepared last",
                f"last prepared: {self._prepared[1].version if self._prepared else None}; held: {self.version}",
                hint="call `mark_adopted` once, with the result of the last `prepare`",
            )
        self._before, self._held, self._prepared = self._held, self._prepared[1], None

    def mark_undone(self) -> None:
        """Record that the live memory was set back to its state before the last adopted update (`Swap.undo`).

        The next `prepare` leads to the newest version again. Raises `WeightsError` if there is no earlier state.
        """
        if self._before is None:
            raise WeightsError(
                "there is nothing to undo",
                f"no update was made since {self.version}"
                if self._held
                else "it is not known which version is in memory",
                hint="one update can be undone; `prepare(exactly=...)` leads to any stored version",
            )
        self._held, self._before, self._prepared = self._before, None, None

    def start_from(self, version: Version) -> bool:
        """Verify that the live memory has the weights of a version, and hold that version.

        Call it for instance after the weights were loaded from disk. They are verified by SHA-256. Return False, and
        hold no version, if the store does not have the version or the memory has other tensors. Raises `StoreError`.
        """
        self.forget()
        manifest = history.find(self._store, self._name, version)
        if manifest is not None and not self._differing(manifest, None, plans.Proof.DIGEST):
            self._held = manifest
        return self._held is not None

    def check(self, names: Iterable[str] | None = None) -> list[str]:
        """Compare live memory with the held version, by checksum. Return the names of the tensors that differ.

        `names`: the tensors to compare, so that a background check can take some at a time; None: all. To repair a
        tensor, call `forget` and `prepare`, and write the update.
        """
        return self._differing(self._held, names, plans.Proof.CHECKSUM) if self._held else []

    def forget(self) -> None:
        """Forget the held version.

        The next `prepare` fetches a full snapshot and lists where the live memory differs from it.
        """
        self._held = self._before = self._prepared = None

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

        def start(plan: plans.Plan) -> _Result:
            return _Result(held if plan.start else ())

        def step(plan: plans.Plan, hop: plans.Hop, made: _Result) -> _Result:
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


def _after(store: BlobStore, hop: plans.Hop, made: _Result, views: Tensors, proof: plans.Proof | None) -> _Result:
    """Return the result after one more hop; it is compared with the hop's manifest if `proof` is given."""
    after = _Result([entry.name for entry in hop.manifest.tensors])
    for data, entries in plans.fetch_objects(store, hop.manifest, hop.way):
        names = [entry.name for entry in entries]
        old = _before(hop, names, made, views)
        found: list[Changes | Tensor | None] = [*codec.changes(data, [entry.spec for entry in entries], old)]
        for i, entry in enumerate(entries):
            live = views.get(entry.name)
            if live is not None and live.spec != entry.spec:
                live = None
            one, found[i] = found[i], None  # free memory tensor by tensor
            assert one is not None
            one = _from_live(live, made.found.get(entry.name) if hop.way.base else None, one)
            if proof is not None:
                plans.verify_lazily(
                    hop.manifest, entry, proof, partial(_digest, entry.spec, live, one), partial(_checksum, live, one)
                )
            if isinstance(one, Tensor) or one.positions.size:
                after.found[entry.name] = one
    return after


def _before(hop: plans.Hop, names: Sequence[str], made: _Result, views: Tensors) -> list[Tensor | None]:
    """Return the tensors that a hop applies to: live ones as they are, others created for this object."""
    there = {*made.names} if hop.way.base else set[str]()
    return [_written(views.get(name), made.found.get(name)) if name in there else None for name in names]


def _from_live(live: Tensor | None, before: Changes | Tensor | None, one: Changes | Tensor) -> Changes | Tensor:
    """Combine the result before a hop (`before`) and the hop's change to the difference to the live tensor, if any."""
    if isinstance(one, Tensor):
        return one if live is None else _as_list(live, one)
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
    made = live
    for one in changes:
        if isinstance(one, Tensor):
            made = one
        elif one is not None and one.positions.size and made is not None:
            codes = made.codes.copy()
            codes[one.positions] = one.codes
            made = Tensor(made.dtype, made.shape, codes)
    return made


def _as_list(live: Tensor, new: Tensor) -> Changes | Tensor:
    """Return the differences of two tensors of the same spec as a list; `new` itself if a list is not shorter."""
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
    if isinstance(one, Tensor):
        return tensor_digest(one)
    assert live is not None, "changes are of a live tensor"
    return digest_of_parts(spec, _pieces(live.codes, one))


def _checksum(live: Tensor | None, one: Changes | Tensor) -> str:
    if isinstance(one, Tensor):
        return checksum(one.codes)
    assert live is not None, "changes are of a live tensor"
    return checksums_before_after(live.codes, one)[1]


def _pieces(codes: Codes, changes: Changes) -> Iterator[Codes]:
    most = PIECE_BYTES // codes.itemsize
    starts = range(0, codes.size, most)
    firsts = np.searchsorted(changes.positions, np.array(starts, changes.positions.dtype)).tolist()
    for start, first, last in zip(starts, firsts, [*firsts, changes.positions.size][1:], strict=True):
        piece = codes[start : start + most]
        if first < last:
            piece = piece.copy()
            piece[changes.positions[first:last] - start] = changes.codes[first:last]
        yield piece
