"""Publishing from shards: each rank writes the delta of its own tensors; only descriptions are gathered.

Every rank of a sharded trainer holds complete tensors (experts) or rows of tensors (`follow.parts`), after
quantisation, and the version of them that it published last. It encodes and stores its objects by itself, then sends
rank 0 their description: names, shapes, digests, sizes. Rank 0 creates one manifest from these and commits it, exactly
as `Channel` does. No weights are sent between ranks, rank 0 needs no memory for the others' tensors, and the time is
that of the largest shard.

The trainer supplies the communication (`Exchange`): two collectives of bytes, for which torch.distributed has
`gather_object` and `broadcast_object_list`. A rank that fails reports its error in the gather, rank 0 in the next
broadcast: then all ranks raise, and none waits forever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from etude.errors import EtudeError, WeightsError
from etude.records.completion import Version
from etude.records.sample import Published
from etude.seams import BlobStore
from etude.weights.chain import history
from etude.weights.chain.channel import Channel, WriterState, changed_share
from etude.weights.chain.manifest import (
    Manifest,
    PublishMetrics,
    Ref,
    StoredObject,
    TensorEntry,
    Way,
    table,
    table_digest,
)
from etude.weights.chain.objects import put_objects
from etude.weights.chain.signing import Signer
from etude.weights.delta.bound import bound_bytes
from etude.weights.follow.parts import full_specs
from etude.weights.shards.part_follower import fetch_some
from etude.weights.tensors import Tensor


class Exchange(Protocol):
    """The communication between the ranks of a trainer, which the caller of `ShardedChannel` supplies.

    Both methods are collective: every rank calls them, in the same order. They must raise if a rank does not arrive in
    time. `rank`: the number of this rank.
    """

    rank: int

    def gather(self, data: bytes) -> Sequence[bytes]:
        """Send `data` to rank 0.

        On rank 0, return the bytes of all ranks, in order of rank; on the others, an empty sequence.
        """
        ...

    def broadcast(self, data: bytes) -> bytes:
        """Send rank 0's `data` to every rank, and return it on each. The `data` of other ranks is ignored."""
        ...


class SingleRank:
    """The `Exchange` of a trainer with a single rank: both methods return the given data."""

    rank = 0

    def gather(self, data: bytes) -> Sequence[bytes]:
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        return data


class _Shard(msgspec.Struct, frozen=True):
    """The tensors that a rank wants to publish; or its error."""

    entries: tuple[TensorEntry, ...] = ()
    error: tuple[str, str, str] | None = None


class _Order(msgspec.Struct, frozen=True, tag="order"):
    """What each rank has to write now. `base` None: no delta."""

    nonce: str
    base: Ref | None
    anchor: bool


class _Written(msgspec.Struct, frozen=True):
    """What a rank has written for an order; or its error."""

    delta: tuple[StoredObject, ...] = ()
    anchor: tuple[StoredObject, ...] = ()
    facts: PublishMetrics | None = None
    num_elements: int = 0
    lost: bool = False  # the rank no longer has its part of the base
    error: tuple[str, str, str] | None = None


class _End(msgspec.Struct, frozen=True, tag="end"):
    """How the publish ended. `version`: the version that is published, or may be."""

    version: Version | None = None
    published: Published | None = None
    error: tuple[str, str, str] | None = None


class ShardedChannel:
    """The writer of a channel over several ranks. Not thread-safe.

    Each rank creates one, with its own store object for the same location. All ranks must call its methods together.
    `exchange`: the communication between the ranks. `name`: the channel. `incarnation`, `signer`, `anchors`: as for
    `Channel`; only those of rank 0 are used.

    >>> import numpy as np
    >>> from etude.stores import MemoryStore
    >>> from etude.weights.follow.follower import Follower
    >>> store = MemoryStore()
    >>> mine = {"w[0:1]": Tensor("bf16", (1, 2), np.array([0x3F80, 0x3F81], np.uint16))}
    >>> published = ShardedChannel(store, SingleRank()).publish(mine, step=0, parent=None, rollout_ids=[])
    >>> Follower(store).advance().version == published.version
    True
    """

    def __init__(
        self,
        store: BlobStore,
        exchange: Exchange,
        name: str = "policy",
        incarnation: str | None = None,
        *,
        signer: Signer | None = None,
        anchors: bool = True,
    ) -> None:
        self._exchange = exchange
        self._writer = _ShardWriter(store, name)
        self._leader: _Leader | None = None
        if exchange.rank == 0:
            self._leader = _Leader(store, exchange, self._writer, name, incarnation, signer=signer, anchors=anchors)

    @property
    def repair_note(self) -> str:
        """A text about damage in the store that publishing repaired; "" if there was none, and on all ranks but 0."""
        return self._leader.repair_note if self._leader is not None else ""

    @repair_note.setter
    def repair_note(self, text: str) -> None:
        if self._leader is not None:
            self._leader.repair_note = text

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        *,
        step: int,
        parent: Version | None,
        rollout_ids: Sequence[str],
        owned: bool = False,
    ) -> Published:
        """Publish the tensors and parts of all ranks as one version. All ranks must call this together.

        All ranks pass the same arguments except for `tensors`: each passes its own tensors, which are copied unless
        `owned` is True. The arguments and the result are those of `Channel.publish`. Each name may be published by one
        rank only, and the parts of a tensor must follow each other without a gap; else `WeightsError`. If a rank fails,
        all ranks raise and nothing is published.
        """
        shard = self._writer.offer(tensors, owned)
        shards = self._exchange.gather(msgspec.json.encode(shard))
        if self._leader is not None:
            return self._leader.lead(shards, step, parent, rollout_ids)
        while True:
            message = msgspec.json.decode(self._exchange.broadcast(b""), type=_Order | _End)
            if isinstance(message, _End):
                return self._writer.finish(message)
            self._exchange.gather(msgspec.json.encode(self._writer.write(message)))

    def publish_once(self, tensors: Mapping[str, Tensor]) -> None:
        """Publish the tensors of all ranks as step 0, unless the newest version has the same content already.

        All ranks must call this together, each with its own tensors. Raises the errors of `publish`.
        """
        shards = self._exchange.gather(msgspec.json.encode(_Shard(table(tensors))))
        known = self._leader is not None and self._leader.holds(shards)
        if not msgspec.json.decode(self._exchange.broadcast(msgspec.json.encode(known)), type=bool):
            self.publish(tensors, step=0, parent=None, rollout_ids=())


class _ShardWriter:
    """One rank's tensors: those published last, and those about to be published."""

    def __init__(self, store: BlobStore, name: str) -> None:
        self._store, self._name = store, name
        self._offered: dict[str, Tensor] = {}
        self._held: dict[Version, dict[str, Tensor]] = {}  # of the version published last, and of a later one in doubt

    def offer(self, tensors: Mapping[str, Tensor], owned: bool) -> _Shard:
        try:
            self._offered = {name: one if owned else one.copy() for name, one in sorted(tensors.items())}
            return _Shard(table(self._offered))
        except EtudeError as error:
            return _Shard(error=_error_parts(error))

    def write(self, order: _Order) -> _Written:
        new = list(self._offered.values())
        try:
            old: list[Tensor | None] = [None] * len(new)
            delta: tuple[StoredObject, ...] = ()
            anchor: tuple[StoredObject, ...] = ()
            encode_s = more_s = 0.0
            if order.base is not None:
                base = self._base(order.base)
                if base is None:
                    return _Written(lost=True)
                old = [base.get(name) for name in self._offered]
                delta, encode_s = self._put(new, old, order)
            if order.anchor:
                anchor, more_s = self._put(new, [None] * len(new), order)
            facts = PublishMetrics(bound_bytes(new, old), changed_share(new, old), encode_s + more_s)
            return _Written(delta, anchor, facts, sum(tensor.codes.size for tensor in new))
        except EtudeError as error:
            return _Written(error=_error_parts(error))

    def hold(self, end: _End) -> None:
        if end.version is not None:
            last = {} if end.published is not None else self._held
            self._held = {**last, end.version: self._offered}

    def finish(self, end: _End) -> Published:
        """Keep what was published, and return its description; raise the error if it was not published."""
        self.hold(end)
        if end.published is not None:
            return end.published
        what, facts, hint = end.error or ("rank 0 failed", "", "see the log of rank 0")
        raise WeightsError(what, facts, hint=hint)

    def _put(
        self, new: list[Tensor], old: list[Tensor | None], order: _Order
    ) -> tuple[tuple[StoredObject, ...], float]:
        if not new:
            return (), 0.0
        return put_objects(self._store, self._name, order.nonce, new, lambda a, b: old[a:b])

    def _base(self, ref: Ref) -> dict[str, Tensor] | None:
        """Return this rank's tensors of the version published last, or read them back; None if they are lost."""
        if ref.version not in self._held:
            try:
                at = history.load(self._store, ref)
                self._held[ref.version] = fetch_some(self._store, at, self._offered.__contains__).tensors
            except WeightsError:
                return None
        return self._held[ref.version]


class _Leader(Channel):
    """Rank 0's channel: it commits what all ranks wrote, and holds no tensors."""

    def __init__(
        self,
        store: BlobStore,
        exchange: Exchange,
        writer: _ShardWriter,
        name: str,
        incarnation: str | None,
        *,
        signer: Signer | None,
        anchors: bool,
    ) -> None:
        super().__init__(store, name, incarnation, signer=signer, anchors=anchors)
        self._exchange, self._writer = exchange, writer
        self._counts: list[int] = []  # number of entries of each rank

    def lead(self, shards: Sequence[bytes], step: int, parent: Version | None, rollout_ids: Sequence[str]) -> Published:
        """Publish. Whatever happens, the other ranks are sent the result."""
        end = _End()
        try:
            entries = self._merge([msgspec.json.decode(data, type=_Shard) for data in shards])
            published = self._publish(entries, {}, step, parent, rollout_ids, _nothing)
            end = _End(published.version, published)
        except EtudeError as error:
            end = _End(self._version_in_doubt, None, _error_parts(error))
            raise
        finally:
            self._writer.hold(end)
            self._exchange.broadcast(msgspec.json.encode(end))
        return published

    def holds(self, shards: Sequence[bytes]) -> bool:
        """Return whether the head has the same content as these shards; False if that cannot be determined."""
        try:
            entries = self._merge([msgspec.json.decode(data, type=_Shard) for data in shards])
            pointer = history.head(self._store, self._name)
        except EtudeError:
            return False
        unsigned = pointer is not None and self._signer is not None and not pointer.signature
        return pointer is not None and not unsigned and pointer.head.version.digest == table_digest(entries)

    @property
    def _version_in_doubt(self) -> Version | None:
        """The version of a commit that got no answer; None if there is none."""
        unknown = self._unknown_commit
        return unknown.ref.version if unknown is not None and unknown.ref is not None else None

    def _merge(self, shards: Sequence[_Shard]) -> tuple[TensorEntry, ...]:
        for rank, shard in enumerate(shards):
            _refuse(rank, shard.error)
        self._counts = [len(shard.entries) for shard in shards]
        entries = tuple(entry for shard in shards for entry in shard.entries)
        owners: dict[str, int] = {}
        for rank, shard in enumerate(shards):
            for entry in shard.entries:
                if owners.setdefault(entry.name, rank) != rank:
                    raise WeightsError(
                        f"ranks {owners[entry.name]} and {rank} both publish {entry.name!r}",
                        hint="if several ranks hold a tensor, pass it to `publish` on only one of them",
                    )
        full_specs({entry.name: entry.spec for entry in entries})
        return entries

    def _rebuild(self, at: Manifest) -> Mapping[str, Tensor]:
        return {}  # each rank has its own tensors

    def _write(
        self, head: WriterState, tensors: Mapping[str, Tensor], entries: tuple[TensorEntry, ...], nonce: str
    ) -> tuple[tuple[Way, ...], PublishMetrics]:
        """Let all ranks write, and combine the results. Anchors come one version later than with `Channel`."""
        base = head.ref if head.tensors is not None else None
        order = _Order(nonce, base, base is None or (self._anchors and head.cost.is_due))
        written = self._ask(order)
        if any(one.lost for one in written):
            self.repair_note = "a rank cannot read back what it published last: this version is an anchor"
            order = _Order(nonce, None, True)
            written = self._ask(order)
        ways = []
        if order.base is not None:
            ways.append(Way(order.base, tuple(item for one in written for item in one.delta)))
        if order.anchor:
            ways.append(Way(None, tuple(item for one in written for item in one.anchor)))
        return tuple(ways), _combine_metrics(written)

    def _ask(self, order: _Order) -> list[_Written]:
        self._exchange.broadcast(msgspec.json.encode(order))
        responses = self._exchange.gather(msgspec.json.encode(self._writer.write(order)))
        written = [msgspec.json.decode(data, type=_Written) for data in responses]
        for rank, (one, count) in enumerate(zip(written, self._counts, strict=True)):
            _refuse(rank, one.error)
            for objects in (one.delta, one.anchor):
                if objects and sum(item.num_tensors for item in objects) != count:
                    raise WeightsError(
                        f"rank {rank} did not write all of its {count} tensors", hint="restart the ranks"
                    )
        return written


def _combine_metrics(written: Sequence[_Written]) -> PublishMetrics:
    """Combine the metrics of all shards: the sum of bounds, the share of all elements, the longest encoding time."""
    facts = [(one.facts, one.num_elements) for one in written if one.facts is not None]
    total = max(1, sum(size for _, size in facts))
    return PublishMetrics(
        bound_bytes=sum(fact.bound_bytes for fact, _ in facts),
        changed_share=sum(fact.changed_share * size for fact, size in facts) / total,
        encode_s=max((fact.encode_s for fact, _ in facts), default=0.0),
    )


def _refuse(rank: int, error: tuple[str, str, str] | None) -> None:
    if error is not None:
        what, facts, hint = error
        raise WeightsError(f"rank {rank} cannot publish: {what}", facts, hint=hint)


def _error_parts(error: EtudeError) -> tuple[str, str, str]:
    return error.what, error.facts, error.hint


def _nothing(step: str) -> None:
    """Ignore the progress reports of a publish."""
