"""The writer's side of the chain: publishes versions of one policy into a blob store.

Objects are written first, then the manifest that names them; then the pointer is moved by compare-and-swap, which is
the commit. If the writer is killed before the commit, readers see the old version; after it, the new one. Every publish
writes a delta from the version published last, and an anchor beside it when one is due (`anchors`). Deltas are taken
from the last *published* bytes: a writer that restarts reads them back first. Knows nothing of optimisers.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from etude.errors import EtudeError, WeightsError
from etude.records.completion import Version
from etude.records.sample import Published
from etude.seams import BlobStore
from etude.weights.chain import history, plans
from etude.weights.chain.anchors import Debt, debt_at
from etude.weights.chain.commit import Outcome, Unsure, commit, read, says_nothing, swept_since
from etude.weights.chain.manifest import (
    FORMAT,
    Damaged,
    Facts,
    Manifest,
    Pointer,
    Ref,
    TensorEntry,
    Way,
    read_manifest,
    read_pointer,
    table,
    table_digest,
    write_manifest,
)
from etude.weights.chain.objects import put_objects
from etude.weights.chain.ownership import owned
from etude.weights.chain.signing import Signer, check_signer, signed, write_signed
from etude.weights.delta.bound import bound_bytes
from etude.weights.tensors import Tensor

_MAX_SWEEPS = 3


@dataclass(frozen=True)
class Head:
    """The version that was published last. `pointer`: the bytes that the next compare-and-swap expects."""

    pointer: bytes | None = None
    ref: Ref | None = None
    tensors: Mapping[str, Tensor] | None = None
    debt: Debt = field(default_factory=Debt)
    serial: int = 0
    generation: int = 0


class Channel:
    """The one writer of a policy's versions. A second writer fails at its first commit. Not thread-safe.

    `incarnation`: 8 hex characters, drawn at random where None, so that a restart never reuses a version's name for
    other bytes.

    >>> from etude.stores import MemoryStore
    >>> channel = Channel(MemoryStore(), incarnation="0a1b2c3d")
    >>> weights = {"w": Tensor("bf16", (2,), np.array([0x3F80, 0x3F81], np.uint16))}
    >>> first = channel.publish(weights, step=0, parent=None, rollout_ids=[])
    >>> str(first.version), first.anchor
    ('v000000-0a1b2c3d-c4309ece18b9', True)
    """

    def __init__(
        self,
        store: BlobStore,
        name: str = "policy",
        incarnation: str | None = None,
        *,
        signer: Signer | None = None,
        anchors: bool = True,
    ) -> None:
        if not re.fullmatch("[a-z0-9][a-z0-9_-]{0,63}", name):
            raise WeightsError(f"channel name {name!r} is not allowed", hint="use a-z, 0-9, _ and -")
        if incarnation is not None and not re.fullmatch("[0-9a-f]{8}", incarnation):
            raise WeightsError(f"incarnation {incarnation!r} is not allowed", hint="8 hex characters, or None")
        self._store, self._name, self._signer, self._anchors = store, name, signer, anchors
        self._key = history.pointer_key(name)
        self.incarnation = incarnation or secrets.token_hex(4)
        self._head: Head | None = None  # None: the store has not been read yet
        self._doubt: Head | None = None  # a commit that may or may not have happened
        self.mended = ""
        """A sentence on damage that this writer found and repaired by publishing; empty in a sound store."""

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        *,
        step: int,
        parent: Version | None,
        rollout_ids: Sequence[str],
        after: Callable[[str], None] | None = None,
        owned: bool = False,
    ) -> Published:
        """Publish a version; readers can fetch it when this returns. The tensors are copied, unless they are `owned`:
        then nothing may write to them afterwards.

        `parent`: the version these weights were trained from, None for a root. `after` is called with "objects",
        "manifest" and "pointer" when each is durable. Raises `WeightsError` when another writer moved the pointer, or
        signed it with another key, `StoreError` when the store refuses; then nothing is published and the call may be
        repeated. Where the store fell silent at the commit (`commit.Unsure`), the next call finds out.
        """
        done = after or (lambda name: None)
        entries = table(tensors)
        kept = {entry.name: tensors[entry.name] if owned else tensors[entry.name].copy() for entry in entries}
        return self._publish(entries, kept, step, parent, rollout_ids, done)

    def _publish(
        self,
        entries: tuple[TensorEntry, ...],
        kept: Mapping[str, Tensor],
        step: int,
        parent: Version | None,
        rollout_ids: Sequence[str],
        done: Callable[[str], None],
    ) -> Published:
        """Publish what the entries say; `kept` is passed to `_write`, and stays with the head."""
        version = Version(step, self.incarnation, table_digest(entries))
        for _ in range(_MAX_SWEEPS):
            head = self._head = self._present()
            made = self._manifest(head, kept, entries, version, parent, rollout_ids, done)
            manifest = signed(made, self._signer)
            ref, data = write_manifest(manifest)
            read_manifest(data)  # a manifest that readers would refuse is not published
            self._store.put(ref.key, data)
            done("manifest")
            pointer = self._pointer(head, ref, manifest)
            debt = Debt(manifest.anchor.num_bytes) if manifest.anchor else head.debt.grown(manifest)
            ahead = Head(pointer, ref, kept, debt, manifest.serial, head.generation)
            if self._commit(head, ahead):
                self._head = ahead
                done("pointer")
                return _published(manifest)
        raise WeightsError(
            f"{version} is not published: garbage was collected {_MAX_SWEEPS} times while it was put",
            hint="collect less often than a publish takes",
        )

    def fetch(self, version: Version | None = None, *, public_key: bytes | None = None) -> dict[str, Tensor]:
        """Fetch and prove the tensors of a version, by default the newest. Nothing is kept for a next call.
        `public_key`: take for the newest only what this key's owner signed. Raises `WeightsError` where there is no
        such version, or it cannot be rebuilt."""
        pointer = history.head(self._store, self._name, public_key=public_key) if version is None else None
        manifest = history.load(self._store, pointer.head) if pointer else None
        if version is not None:
            manifest = history.find(self._store, self._name, version)
        if manifest is None:
            raise WeightsError(
                f"channel {self._name!r} has no {version or 'version'}",
                _where(self._store, self._key),
                hint="`etude weights log` lists what was published",
            )
        return plans.rebuild(self._store, manifest)

    def _open(self) -> Head:
        """Read the head from the store, with proven tensors; without tensors where it cannot be rebuilt."""
        data = read(self._store, self._key)
        if data is None:
            known = owned(self._store, self._name, self._signer).versions
            if history.built_on(known):
                self.mended = "the pointer was gone, though there are versions: the one published next is an anchor"
                return _beyond(Head(), known)
            return Head()
        try:
            pointer = read_pointer(data)
        except Damaged as error:
            known = owned(self._store, self._name, self._signer).versions
            self.mended = f"the pointer was damaged ({error.facts}): the version published next replaces it"
            return _beyond(Head(data), known)
        check_signer(self._key, pointer, self._signer)
        try:
            at = history.load(self._store, pointer.head)
            tensors = self._rebuild(at)
            debt = debt_at(self._store, at)
        except EtudeError as error:  # damaged beyond use: the next publish is an anchor, and heals the channel
            self.mended = f"{error.what}: the version published next is an anchor"
            known = tuple(history.stored(self._store, self._name))
            return _beyond(Head(data, pointer.head, generation=pointer.generation), known)
        return Head(data, pointer.head, tensors, debt, at.serial, pointer.generation)

    def _rebuild(self, at: Manifest) -> Mapping[str, Tensor]:
        """The tensors that the next delta is taken from."""
        return plans.rebuild(self._store, at)

    def _present(self) -> Head:
        """The head that the next version applies to: the last published version, as the store has it now."""
        if self._doubt is not None:
            if read(self._store, self._key) == self._doubt.pointer:
                self._head = self._doubt  # the commit happened; only its answer was lost
            self._doubt = None
        head = self._head or self._open()
        now = read(self._store, self._key)
        return replace(head, pointer=now) if swept_since(head.pointer, now) else head

    def _manifest(
        self,
        head: Head,
        kept: Mapping[str, Tensor],
        entries: tuple[TensorEntry, ...],
        version: Version,
        parent: Version | None,
        rollout_ids: Sequence[str],
        done: Callable[[str], None],
    ) -> Manifest:
        """Put the version's objects; returns its manifest."""
        nonce = secrets.token_hex(16)
        ways, facts = self._write(head, kept, entries, nonce)
        done("objects")
        return Manifest(
            format=FORMAT,
            channel=self._name,
            version=version,
            parent=self._ref(parent, head) if parent else None,
            ways=ways,
            tensors=entries,
            rollout_ids=tuple(rollout_ids),
            facts=facts,
            nonce=nonce,
            serial=head.serial + 1,
            generation=head.generation,
        )

    def _write(
        self, head: Head, tensors: Mapping[str, Tensor], entries: tuple[TensorEntry, ...], nonce: str
    ) -> tuple[tuple[Way, ...], Facts]:
        """Encode and put the objects of every way to the version: its delta, and its anchor where one is due."""
        new = list(tensors.values())
        old = [head.tensors.get(name) for name in tensors] if head.tensors is not None else [None] * len(new)
        ways: list[Way] = []
        encode_s, is_due = 0.0, True
        if head.tensors is not None:
            objects, encode_s = put_objects(self._store, self._name, nonce, new, lambda a, b: old[a:b])
            ways.append(Way(head.ref, objects))
            debt = head.debt.after(
                ways[0].num_bytes, len(msgspec.json.encode(entries)), sum(tensor.num_bytes for tensor in new)
            )
            is_due = self._anchors and debt.is_due
        if is_due:
            objects, more_s = put_objects(self._store, self._name, nonce, new, lambda a, b: [None] * (b - a))
            ways.append(Way(None, objects))
            encode_s += more_s
        return tuple(ways), Facts(bound_bytes(new, old), changed_share(new, old), encode_s)

    def _pointer(self, head: Head, ref: Ref, manifest: Manifest) -> bytes:
        sweep = 0
        if head.pointer is not None and not says_nothing(head.pointer):
            sweep = read_pointer(head.pointer).sweep
        pointer = Pointer(format=FORMAT, head=ref, nonce=manifest.nonce, generation=head.generation, sweep=sweep)
        return write_signed(self._key, pointer, self._signer)

    def _commit(self, head: Head, ahead: Head) -> bool:
        """Move the pointer. False where garbage was collected meanwhile, so that everything must be put again."""
        assert ahead.ref is not None
        assert ahead.pointer is not None
        try:
            outcome = commit(self._store, self._key, head.pointer, ahead.pointer)
        except Unsure:
            self._doubt = ahead
            raise
        if outcome is Outcome.LOST:
            raise WeightsError(
                f"{ahead.ref.version} is not published: another writer moved channel {self._name!r}",
                _where(self._store, self._key),
                hint="one learner publishes to a channel: stop the other, then restart this one from its checkpoint;"
                " the same holds after a rollback",
            )
        if outcome is Outcome.HEALED:
            self.mended = "the pointer was damaged while this writer held it: this version replaces it"
        return outcome is not Outcome.SWEPT

    def _ref(self, version: Version, head: Head) -> Ref:
        """The reference to a version that was published, or at least written, in this channel. Where its manifest is
        damaged the reference comes from manifests that name it, so that a copy of it can be put back."""
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


def _beyond(head: Head, known: Sequence[tuple[Ref, Manifest]]) -> Head:
    """A head whose successor is newer than everything in `known`, so that no reader takes it for a step back."""
    generation = max([head.generation, *(manifest.generation for _, manifest in known)]) + 1
    return replace(head, generation=generation, serial=max((manifest.serial for _, manifest in known), default=0))


def publish_once(store: BlobStore, name: str, tensors: Mapping[str, Tensor], *, signer: Signer | None = None) -> None:
    """Publish these tensors unless the head of a channel has them already; signed where there is a signer. Raises as
    `Channel.publish` does."""
    pointer = history.head(store, name)
    unsigned = signer is not None and pointer is not None and not pointer.signature
    if pointer is None or unsigned or pointer.head.version.digest != table_digest(table(tensors)):
        Channel(store, name, signer=signer).publish(tensors, step=0, parent=None, rollout_ids=())


def _where(store: BlobStore, key: str) -> str:
    """The version that a pointer names, in words for an error."""
    try:
        data = read(store, key)
        return f"it names {read_pointer(data).head.version}" if data is not None else "it is gone"
    except EtudeError as error:
        return error.what


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


def changed_share(new: Sequence[Tensor], old: Sequence[Tensor | None]) -> float:
    """Share of all elements whose bits differ between `new` and `old` (same order). All elements of a tensor count as
    changed where `old` has None, or another dtype or shape."""
    changed = sum(
        int(np.count_nonzero(b.codes != a.codes)) if b is not None and b.spec == a.spec else a.codes.size
        for a, b in zip(new, old, strict=True)
    )
    return changed / max(1, sum(t.codes.size for t in new))
