"""The writer's side: publishes versions of one policy into a blob store.

Objects first, then the manifest that names them, then the pointer by compare-and-swap: that move is the commit. Killed
anywhere before it, readers see the old version; after it, the new one. Every publish carries a delta from the version
published last. An anchor goes beside it when the deltas since the last anchor weigh more than an anchor does, so that
a late engine never fetches more than about two snapshots, and engines that follow never fetch one. Deltas are taken
from the last *published* bytes: a writer that restarts reads them back first. Knows nothing of optimisers.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from etude.errors import EtudeError, StoreError, WeightsError
from etude.records.completion import Version
from etude.records.sample import Published
from etude.seams import BlobStore
from etude.weights import codec, history
from etude.weights.bound import bound_bytes
from etude.weights.manifest import (
    FORMAT,
    Damaged,
    Facts,
    Manifest,
    Ref,
    StoredObject,
    Way,
    read_manifest,
    read_pointer,
    table,
    table_digest,
    write_manifest,
    write_pointer,
)
from etude.weights.tensors import Tensor

OBJECT_ELEMENTS = 1 << 26
"""Tensors are gathered into objects of about so many elements, the unit of fetching again."""

ANCHOR_EVERY = 25
"""At most so many deltas lie between two anchors, however small they are."""


@dataclass
class _Head:
    """What was published last. `pointer`: the bytes the next compare-and-swap expects."""

    pointer: bytes | None = None
    ref: Ref | None = None
    tensors: Mapping[str, Tensor] | None = None
    num_deltas: int = 0  # since the last anchor
    delta_bytes: int = 0  # of those deltas
    anchor_bytes: int = 0  # of the last anchor


class Channel:
    """The one writer of a policy's versions; a second one is found out at its first commit. Not safe between threads.

    `incarnation`: 8 hex characters, None draws them: a restart never reuses a version's name for other bytes.

    >>> from etude.stores import MemoryStore
    >>> channel = Channel(MemoryStore(), incarnation="0a1b2c3d")
    >>> weights = {"w": Tensor("bf16", (2,), np.array([0x3F80, 0x3F81], np.uint16))}
    >>> first = channel.publish(weights, step=0, parent=None, rollout_ids=[])
    >>> str(first.version), first.anchor
    ('v000000-0a1b2c3d-c4309ece18b9', True)
    """

    def __init__(self, store: BlobStore, name: str = "policy", incarnation: str | None = None) -> None:
        if not re.fullmatch("[a-z0-9][a-z0-9_-]{0,63}", name):
            raise WeightsError(f"channel name {name!r} is not allowed", hint="use a-z, 0-9, _ and -")
        if incarnation is not None and not re.fullmatch("[0-9a-f]{8}", incarnation):
            raise WeightsError(f"incarnation {incarnation!r} is not allowed", hint="8 hex characters, or None")
        self._store, self._name = store, name
        self.incarnation = incarnation or secrets.token_hex(4)
        self._head: _Head | None = None  # None: the store was not read yet
        self.mended = ""
        """What this writer found damaged and healed by publishing, in words; empty in a sound store."""

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        *,
        step: int,
        parent: Version | None,
        rollout_ids: Sequence[str],
        after: Callable[[str], None] | None = None,
    ) -> Published:
        """Publish a version; readers can have it when this returns. The tensors are copied.

        `parent`: the version these weights were trained from, None for a root. `after` is called with "objects",
        "manifest" and "pointer" when each is durable. Raises `WeightsError` when another writer moved the pointer,
        `StoreError` when the store refuses; then nothing is published and the call may be repeated.
        """
        head = self._head = self._head or self._open()
        done = after or (lambda name: None)
        entries = table(tensors)
        kept = {entry.name: tensors[entry.name].copy() for entry in entries}
        version = Version(step, self.incarnation, table_digest(entries))
        ways, facts = self._write(head, kept)
        done("objects")
        manifest = Manifest(
            format=FORMAT,
            channel=self._name,
            version=version,
            parent=self._ref(parent, head) if parent else None,
            ways=ways,
            tensors=entries,
            rollout_ids=tuple(rollout_ids),
            facts=facts,
            nonce=secrets.token_hex(16),
        )
        ref, data = write_manifest(manifest)
        read_manifest(data)  # what no reader would take is not published
        self._store.put(ref.key, data)
        done("manifest")
        pointer = write_pointer(ref, manifest.nonce)
        self._commit(head.pointer, pointer, version)
        self._head = _advanced(head, manifest, ref, pointer, kept)
        done("pointer")
        return _published(manifest)

    def _open(self) -> _Head:
        """The head as the store has it, its tensors proven; without tensors where it cannot be rebuilt any more."""
        data = self._pointer_bytes()
        if data is None:
            if history.committed(self._store, self._name):
                self.mended = "the pointer was gone, though there are versions: the one published next is an anchor"
            return _Head()
        try:
            head = _Head(pointer=data, ref=(ref := read_pointer(data).head))
        except Damaged as error:
            self.mended = f"the pointer was damaged ({error.facts}): the version published next replaces it"
            return _Head(pointer=data)
        try:
            at = history.load(self._store, ref)
            tensors = history.rebuild(self._store, at)
            while at.anchor is None and at.delta and at.base:
                head.num_deltas, head.delta_bytes = head.num_deltas + 1, head.delta_bytes + at.delta.num_bytes
                at = history.load(self._store, at.base)
        except EtudeError as error:  # damaged beyond use: the next publish is an anchor, and heals the channel
            self.mended = f"{error.what}: the version published next is an anchor"
            return _Head(pointer=data, ref=ref)
        head.tensors, head.anchor_bytes = tensors, at.anchor.num_bytes if at.anchor else 0
        return head

    def _write(self, head: _Head, tensors: Mapping[str, Tensor]) -> tuple[tuple[Way, ...], Facts]:
        """Encode and put the objects of every way to the tensors."""
        new = list(tensors.values())
        old = [head.tensors.get(name) for name in tensors] if head.tensors is not None else [None] * len(new)
        ways: list[Way] = []
        encode_s = 0.0
        if head.tensors is not None:
            objects, encode_s = self._put(new, old)
            ways.append(Way(head.ref, objects))
        delta_bytes = head.delta_bytes + sum(way.num_bytes for way in ways)
        if not ways or delta_bytes > head.anchor_bytes or head.num_deltas + 1 >= ANCHOR_EVERY:
            objects, more_s = self._put(new, [None] * len(new))
            ways.append(Way(None, objects))
            encode_s += more_s
        return tuple(ways), Facts(bound_bytes(new, old), _changed_share(new, old), encode_s)

    def _put(self, new: Sequence[Tensor], old: Sequence[Tensor | None]) -> tuple[tuple[StoredObject, ...], float]:
        """Encode in groups of whole tensors and put each under its SHA-256; and the seconds that encoding took."""
        objects: list[StoredObject] = []
        encode_s = 0.0
        for start, stop in _groups(new):
            started = time.perf_counter()
            data = codec.encode(new[start:stop], old[start:stop])
            digest = hashlib.sha256(data).hexdigest()
            encode_s += time.perf_counter() - started
            objects.append(StoredObject(f"objects/{digest[:2]}/{digest}", len(data), digest, stop - start))
            self._store.put(objects[-1].key, data)
        return tuple(objects), encode_s

    def _ref(self, version: Version, head: _Head) -> Ref:
        """The reference to a version that was published, or at least written, in this channel. A damaged manifest is
        still referred to, by what others say of it, so that a copy of it can be put back."""
        if head.ref and head.ref.version == version:
            return head.ref
        said: Ref | None = None
        for ref, manifest in history.stored(self._store, self._name):
            if ref.version == version:
                return ref
            said = next((r for r in (manifest.parent, manifest.base) if r and r.version == version), said)
        if said is not None:
            return said
        raise WeightsError(
            f"parent {version} was never published in channel {self._name!r}",
            "or its manifest is lost, and nothing whole refers to it",
            hint="start a new run from the checkpoint that was trained last: --set start=RUN/checkpoints/step-...",
        )

    def _commit(self, expected: bytes | None, pointer: bytes, version: Version) -> None:
        """Move the pointer. An answer that got lost is looked up: the pointer's nonce says whose it is. A pointer that
        was lost or torn since is nobody's word against ours: it is replaced."""
        key = history.pointer_key(self._name)
        lost: StoreError | None = None
        try:
            if self._store.compare_and_swap(key, expected, pointer):
                return
        except StoreError as error:
            lost = error
        now = self._pointer_bytes()
        if now == pointer:
            return
        if lost is not None and now == expected:
            raise lost
        if expected is not None and _is_damaged(now) and self._store.compare_and_swap(key, now, pointer):
            self.mended = "the pointer was damaged while this writer held it: this version replaces it"
            return
        raise WeightsError(
            f"{version} is not published: another writer moved channel {self._name!r}",
            hint="one learner publishes to a channel: stop the other, then restart this one from its checkpoint",
        )

    def _pointer_bytes(self) -> bytes | None:
        try:
            return self._store.get(history.pointer_key(self._name))
        except KeyError:
            return None


def _is_damaged(pointer: bytes | None) -> bool:
    """Whether it says nothing: gone, or of a form that no writer of any etude wrote."""
    if pointer is None:
        return True
    try:
        read_pointer(pointer)
    except Damaged:
        return True
    except WeightsError:  # of another format: somebody's
        return False
    return False


def _advanced(head: _Head, manifest: Manifest, ref: Ref, pointer: bytes, tensors: Mapping[str, Tensor]) -> _Head:
    if manifest.anchor is not None:
        return _Head(pointer, ref, tensors, anchor_bytes=manifest.anchor.num_bytes)
    delta_bytes = head.delta_bytes + (manifest.delta.num_bytes if manifest.delta else 0)
    return _Head(pointer, ref, tensors, head.num_deltas + 1, delta_bytes, head.anchor_bytes)


def _published(manifest: Manifest) -> Published:
    anchor_bytes = manifest.anchor.num_bytes if manifest.anchor else 0
    return Published(
        version=manifest.version,
        anchor=manifest.anchor is not None,
        object_bytes=manifest.ways[0].num_bytes,
        snapshot_bytes=manifest.snapshot_bytes,
        bound_bytes=manifest.facts.bound_bytes,
        changed_share=manifest.facts.changed_share,
        encode_s=manifest.facts.encode_s,
        anchor_bytes=anchor_bytes,
    )


def _groups(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """[start, stop) of each object's tensors."""
    groups: list[tuple[int, int]] = []
    start = size = 0
    for i, tensor in enumerate(tensors):
        if i > start and size + tensor.codes.size > OBJECT_ELEMENTS:
            groups.append((start, i))
            start, size = i, 0
        size += tensor.codes.size
    return [*groups, (start, len(tensors))]


def _changed_share(new: Sequence[Tensor], old: Sequence[Tensor | None]) -> float:
    """Share of elements whose code is another; all of a tensor that has no old of its dtype and shape."""
    changed = sum(
        int(np.count_nonzero(b.codes != a.codes)) if b is not None and b.spec == a.spec else a.codes.size
        for a, b in zip(new, old, strict=True)
    )
    return changed / max(1, sum(t.codes.size for t in new))
