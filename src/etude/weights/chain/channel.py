"""The writer's side of a channel: publishes versions of one set of tensors into a blob store.

Objects are written first, then the manifest that names them. Then the pointer is moved by compare-and-swap; this is the
commit. If the writer is killed before the commit, readers see the old version; after it, the new one. Every publish
writes a delta from the version published last, and an anchor as well if one is due (`anchors`). Deltas are computed
from the last *published* bytes: after a restart, the writer reads them back first. Knows nothing of optimisers.
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
from etude.weights.chain.anchors import CatchUpCost, catch_up_cost
from etude.weights.chain.commit import (
    CommitUnknown,
    Outcome,
    commit,
    is_missing_or_damaged,
    read_pointer_bytes,
    swept_since,
)
from etude.weights.chain.manifest import (
    FORMAT,
    Damaged,
    Manifest,
    Pointer,
    PublishMetrics,
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
from etude.weights.chain.ownership import owned_manifests
from etude.weights.chain.signing import Signer, check_signer, sign_manifest, write_signed
from etude.weights.delta.bound import bound_bytes
from etude.weights.tensors import Tensor

_MAX_SWEEPS = 3


@dataclass(frozen=True)
class WriterState:
    """The version that was published last, from which the next delta is computed.

    `pointer`: the stored bytes of the channel's pointer, which the next compare-and-swap expects; None if there is no
    pointer. `ref`: the reference to the version's manifest. `tensors`: its tensors by name; None if they could not be
    rebuilt. `cost`: what a late reader fetches. `serial`: the manifest's serial. `generation`: the pointer's
    generation.
    """

    pointer: bytes | None = None
    ref: Ref | None = None
    tensors: Mapping[str, Tensor] | None = None
    cost: CatchUpCost = field(default_factory=CatchUpCost)
    serial: int = 0
    generation: int = 0


class Channel:
    """The writer of a channel: publishes versions of one set of tensors to a store. Not thread-safe.

    A channel can have only one writer: a second writer fails at its first commit.

    - `name`: 1 to 64 characters of a-z, 0-9, _ and -.
    - `incarnation`: 8 hex characters, random by default; they are part of each version's name, so that a restarted
      writer never reuses a name.
    - `signer`: signs the published versions; None: they are not signed.
    - `anchors`: whether to write a full snapshot (anchor) when one is due; a `Compactor` can write them instead.
    Raises `WeightsError` for a name or incarnation that is not allowed.

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
            raise WeightsError(
                f"incarnation {incarnation!r} is not allowed", hint="give 8 hex characters, or None for random ones"
            )
        self._store, self._name, self._signer, self._anchors = store, name, signer, anchors
        self._key = history.pointer_key(name)
        self.incarnation = incarnation or secrets.token_hex(4)
        self._state: WriterState | None = None  # None: the store was not read yet
        self._unknown_commit: WriterState | None = None  # a commit whose outcome is not known
        self.repair_note = ""
        """A description of damage in the store that this writer found and repaired by publishing; empty if there was
        none."""

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
        """Publish a version and return its name and sizes. Readers can fetch it when this returns.

        `tensors`: all tensors of the version by name. They are copied, unless `owned` is True; then the caller must not
        modify them afterwards. `step`: the training step. `parent`: the version that these weights were trained from;
        None for the first. `rollout_ids`: the rollouts that the step was trained on, for the audit; may be empty.
        `after` is called with "objects", "manifest" and "pointer", each time when that part is durable.

        Raises `WeightsError` if another writer moved the pointer or signed it with another key, and `StoreError` if the
        store fails. Then nothing is published and the call can be repeated. If the store gave no answer at the commit
        (`commit.CommitUnknown`), the next call finds out whether the version was published.
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
        version = Version(step, self.incarnation, table_digest(entries))
        for _ in range(_MAX_SWEEPS):
            head = self._state = self._current_state()
            made = self._manifest(head, kept, entries, version, parent, rollout_ids, done)
            manifest = sign_manifest(made, self._signer)
            ref, data = write_manifest(manifest)
            read_manifest(data)  # raises for a manifest that readers would reject
            self._store.put(ref.key, data)
            done("manifest")
            pointer = self._pointer(head, ref, manifest)
            cost = CatchUpCost(manifest.anchor.num_bytes) if manifest.anchor else head.cost.with_version(manifest)
            ahead = WriterState(pointer, ref, kept, cost, manifest.serial, head.generation)
            if self._commit(head, ahead):
                self._state = ahead
                done("pointer")
                return _published(manifest)
        raise WeightsError(
            f"{version} is not published: garbage was collected {_MAX_SWEEPS} times during the publish",
            hint="collect garbage less often than a publish takes",
        )

    def fetch(self, version: Version | None = None, *, public_key: bytes | None = None) -> dict[str, Tensor]:
        """Fetch and verify the tensors of a version, by default the newest, and return them by name.

        Does not change the state of this writer. `public_key`: without `version`, accept only a pointer signed by this
        key (32 bytes). Raises `WeightsError` if there is no such version or it cannot be rebuilt.
        """
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

    def _read_state(self) -> WriterState:
        """Read the state from the store, with verified tensors; without tensors if the head cannot be rebuilt."""
        data = read_pointer_bytes(self._store, self._key)
        if data is None:
            known = owned_manifests(self._store, self._name, self._signer).versions
            if history.built_on(known):
                self.repair_note = (
                    "the pointer was missing although versions exist: the next one published is an anchor"
                )
                return _ahead_of(WriterState(), known)
            return WriterState()
        try:
            pointer = read_pointer(data)
        except Damaged as error:
            known = owned_manifests(self._store, self._name, self._signer).versions
            self.repair_note = f"the pointer was damaged ({error.facts}): the next published version replaces it"
            return _ahead_of(WriterState(data), known)
        check_signer(self._key, pointer, self._signer)
        try:
            at = history.load(self._store, pointer.head)
            tensors = self._rebuild(at)
            cost = catch_up_cost(self._store, at)
        except EtudeError as error:  # the next publish is an anchor, which repairs the channel
            self.repair_note = f"{error.what}: the next published version is an anchor"
            known = tuple(history.stored(self._store, self._name))
            return _ahead_of(WriterState(data, pointer.head, generation=pointer.generation), known)
        return WriterState(data, pointer.head, tensors, cost, at.serial, pointer.generation)

    def _rebuild(self, at: Manifest) -> Mapping[str, Tensor]:
        return plans.rebuild(self._store, at)

    def _current_state(self) -> WriterState:
        """Return the state that the next version builds on, updated from the store."""
        if self._unknown_commit is not None:
            if read_pointer_bytes(self._store, self._key) == self._unknown_commit.pointer:
                self._state = self._unknown_commit  # the commit succeeded; only its answer was lost
            self._unknown_commit = None
        head = self._state or self._read_state()
        now = read_pointer_bytes(self._store, self._key)
        return replace(head, pointer=now) if swept_since(head.pointer, now) else head

    def _manifest(
        self,
        head: WriterState,
        kept: Mapping[str, Tensor],
        entries: tuple[TensorEntry, ...],
        version: Version,
        parent: Version | None,
        rollout_ids: Sequence[str],
        done: Callable[[str], None],
    ) -> Manifest:
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
        self, head: WriterState, tensors: Mapping[str, Tensor], entries: tuple[TensorEntry, ...], nonce: str
    ) -> tuple[tuple[Way, ...], PublishMetrics]:
        new = list(tensors.values())
        old = [head.tensors.get(name) for name in tensors] if head.tensors is not None else [None] * len(new)
        ways: list[Way] = []
        encode_s, is_due = 0.0, True
        if head.tensors is not None:
            objects, encode_s = put_objects(self._store, self._name, nonce, new, lambda a, b: old[a:b])
            ways.append(Way(head.ref, objects))
            cost = head.cost.with_delta(
                ways[0].num_bytes, len(msgspec.json.encode(entries)), sum(tensor.num_bytes for tensor in new)
            )
            is_due = self._anchors and cost.is_due
        if is_due:
            objects, more_s = put_objects(self._store, self._name, nonce, new, lambda a, b: [None] * (b - a))
            ways.append(Way(None, objects))
            encode_s += more_s
        return tuple(ways), PublishMetrics(bound_bytes(new, old), changed_share(new, old), encode_s)

    def _pointer(self, head: WriterState, ref: Ref, manifest: Manifest) -> bytes:
        sweep = 0
        if head.pointer is not None and not is_missing_or_damaged(head.pointer):
            sweep = read_pointer(head.pointer).sweep
        pointer = Pointer(format=FORMAT, head=ref, nonce=manifest.nonce, generation=head.generation, sweep=sweep)
        return write_signed(self._key, pointer, self._signer)

    def _commit(self, head: WriterState, ahead: WriterState) -> bool:
        """Move the pointer. False if garbage was collected meanwhile, so that everything must be written again."""
        assert ahead.ref is not None
        assert ahead.pointer is not None
        try:
            outcome = commit(self._store, self._key, head.pointer, ahead.pointer)
        except CommitUnknown:
            self._unknown_commit = ahead
            raise
        if outcome is Outcome.LOST:
            raise WeightsError(
                f"{ahead.ref.version} is not published: another writer moved channel {self._name!r}",
                _where(self._store, self._key),
                hint="only one learner may publish to a channel: stop the other, then restart this one from its"
                " checkpoint; do the same after a rollback",
            )
        if outcome is Outcome.HEALED:
            self.repair_note = "the pointer was damaged while this writer was running: this version replaces it"
        return outcome is not Outcome.SWEPT

    def _ref(self, version: Version, head: WriterState) -> Ref:
        """Return the reference to a version of this channel; if its manifest is damaged, from others that name it."""
        if head.ref and head.ref.version == version:
            return head.ref
        named: Ref | None = None
        for ref, manifest in history.stored(self._store, self._name):
            if ref.version == version:
                return ref
            named = next((r for r in (manifest.parent, manifest.base) if r and r.version == version), named)
        if named is not None:
            return named
        raise WeightsError(
            f"parent {version} was never published in channel {self._name!r}",
            "or its manifest is lost, and no readable manifest refers to it",
            hint="start a new run from the last checkpoint: --set start=RUN/checkpoints/step-...",
        )


def _ahead_of(head: WriterState, known: Sequence[tuple[Ref, Manifest]]) -> WriterState:
    """Return a state whose next version is newer than all in `known`, so that no reader takes it for a move back."""
    generation = max([head.generation, *(manifest.generation for _, manifest in known)]) + 1
    return replace(head, generation=generation, serial=max((manifest.serial for _, manifest in known), default=0))


def publish_once(store: BlobStore, name: str, tensors: Mapping[str, Tensor], *, signer: Signer | None = None) -> None:
    """Publish tensors as step 0, unless the newest version of channel `name` has the same content already.

    If there is a signer and the newest version is not signed, it is published again. Raises the errors of
    `Channel.publish`.
    """
    pointer = history.head(store, name)
    unsigned = signer is not None and pointer is not None and not pointer.signature
    if pointer is None or unsigned or pointer.head.version.digest != table_digest(table(tensors)):
        Channel(store, name, signer=signer).publish(tensors, step=0, parent=None, rollout_ids=())


def _where(store: BlobStore, key: str) -> str:
    try:
        data = read_pointer_bytes(store, key)
        return f"it names {read_pointer(data).head.version}" if data is not None else "it is missing"
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
    """Return the share (0 to 1) of all elements whose bits differ between `new[i]` and `old[i]`, over all i.

    If `old[i]` is None or has another dtype or shape, all elements of `new[i]` count as changed.
    """
    changed = sum(
        int(np.count_nonzero(b.codes != a.codes)) if b is not None and b.spec == a.spec else a.codes.size
        for a, b in zip(new, old, strict=True)
    )
    return changed / max(1, sum(t.codes.size for t in new))
