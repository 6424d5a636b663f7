"""Garbage collection: deletes objects that no kept version needs. Safe for concurrent readers and writers, kills, and
clock jumps.

Kept is everything that is needed to rebuild the version of every pointer (its *head*), and every version that was a
head within `keep_s` seconds. Manifests of older versions are kept too, since history and audit read them; their objects
are deleted. Three rules make it safe:

- *A record before deletion.* Superseded or unreachable keys are deleted only if a record at least `keep_s` old says
  that they were so then (`garbage_records`). A reader that has read a pointer since then finds everything it needs. If
  the clock jumped, it finds the head's objects.
- *A fence before unreachable keys are deleted.* A publish that is suspended between writing its objects and moving its
  pointer looks like garbage. So the pointer is first rewritten with the same version and a higher `sweep`: the
  compare-and-swap of that publish then fails, and its writer writes everything again.
- *An announcement before anything is deleted.* A process that points a branch at an old version looks for announcements
  afterwards; and the collector computes again what pointers need after its announcement. One of the two sees the other.

If it is killed, it leaves a record, and the next collection deletes the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

from etude.errors import WeightsError
from etude.seams import BlobStore
from etude.weights.chain import garbage_records, history, plans
from etude.weights.chain.commit import Outcome, commit, read_pointer_bytes
from etude.weights.chain.manifest import FORMAT, Manifest, Ref, later_key, read_pointer
from etude.weights.chain.objects import objects_prefix
from etude.weights.chain.signing import Signer, check_signer, write_signed


@dataclass(frozen=True)
class Collected:
    """The result of one garbage collection, in counts.

    `num_deleted`: deleted keys. `num_kept`: versions that can be rebuilt. `num_old`: versions whose objects were
    deleted and whose manifest is kept. `num_unreachable`: keys that no pointer leads to but that are not deleted yet.
    `needs_key`: the pointer is signed and no signer was given, so unreachable keys are never deleted.
    """

    num_deleted: int
    num_kept: int
    num_old: int
    num_unreachable: int
    needs_key: bool


@dataclass(frozen=True)
class Marks:
    """The result of `mark`: all store keys of one channel, divided into needed ones and others.

    `kept`: manifests of versions that must stay rebuildable, by key. `old`: the manifests of superseded versions, by
    key. `unreachable`: keys that no pointer or record leads to. `stored`: all keys of the channel. `keys`: the keys of
    each version's objects, by `Manifest.stem`.
    """

    kept: dict[str, Manifest]
    old: dict[str, Manifest]
    unreachable: frozenset[str]
    stored: frozenset[str]
    keys: dict[str, tuple[str, ...]]

    @property
    def superseded(self) -> frozenset[str]:
        """The stored keys of old versions' objects that no kept version needs, so that they can be deleted."""
        mine = self.needed_by(self.old.values()) - self.needed_by(self.kept.values())
        return self.stored & mine

    def needed_by(self, manifests: Iterable[Manifest]) -> set[str]:
        """Return the store keys of all objects that these manifests name."""
        return {key for manifest in manifests for key in self.keys[manifest.stem]}


def collect(store: BlobStore, name: str, *, keep_s: float, now: float, signer: Signer | None = None) -> Collected:
    """Delete the keys that channel `name` does not need now (Unix time `now`) and has not needed for `keep_s` seconds.

    Call it regularly: each call writes a record of what is needed, and only records that are `keep_s` old allow
    deletion. So the first call deletes nothing. `signer`: needed to delete the remains of killed publishes in a channel
    whose pointer is signed.

    Raises `WeightsError` if a pointer or a kept manifest cannot be read, or was signed with another key. Then nothing
    is deleted.
    """
    records = garbage_records.read_sweep_records(store, name)
    past = [(key, seen) for key, seen in records if seen.time_s <= now - keep_s]
    since = past[-1][1] if past else None
    kept_records = [seen for _, seen in records if since is not None and since.time_s <= seen.time_s <= now]
    marks = mark(store, name, kept_records)
    pointers = history.pointers(store, name)
    own = pointers.get(history.pointer_key(name))
    if own is not None and signer is not None:
        check_signer(history.pointer_key(name), own, signer)
    heads = {key: pointer.head for key, pointer in pointers.items()}
    garbage_records.write_sweep_record(
        store,
        name,
        garbage_records.SweepRecord(format=FORMAT, time_s=now, heads=heads, adrift=tuple(sorted(marks.unreachable))),
    )
    deleted = frozenset[str]()
    if since is not None:
        unreachable = marks.unreachable.intersection(since.adrift)
        if unreachable or marks.superseded:
            deleted = _delete(store, name, kept_records, marks.superseded, unreachable, now, signer)
    for key, seen in records:  # older than the record that counts; or from the future, by a clock that jumped
        if (since is not None and seen.time_s < since.time_s) or seen.time_s > now:
            store.delete(key)
    for key, doomed in garbage_records.pending_deletions(store, name):  # of a collection that was killed
        if doomed.time_s <= now - keep_s:
            garbage_records.record_deleted(store, name, now, set(doomed.keys) - marks.stored)
            store.delete(key)
    needs_key = own is not None and bool(own.signature) and signer is None
    return Collected(len(deleted), len(marks.kept), len(marks.old), len(marks.unreachable - deleted), needs_key)


def mark(store: BlobStore, name: str, records: Collection[garbage_records.SweepRecord]) -> Marks:
    """Determine which stored keys of channel `name` are needed.

    A key is needed if a pointer of the channel leads to it, or if one of the `records` of earlier collections (oldest
    first) does.
    """
    pointers = history.pointers(store, name)
    roots = [pointer.head for pointer in pointers.values()]
    roots += [ref for record in records for ref in record.heads.values()]
    known, is_whole = _closure(store, roots)
    if not is_whole:  # keys behind a lost manifest would look unreachable
        known |= {ref.key: manifest for ref, manifest in history.stored(store, name)}
    kept: dict[str, Manifest] = {}
    oldest = next(iter(records), None)
    for key, pointer in pointers.items():
        superseding = oldest.heads.get(key) if oldest else None
        _keep(store, known, pointer.head, superseding, kept)
    for record in records:
        for ref in record.heads.values():
            _keep(store, known, ref, ref, kept)
    keys = {
        manifest.stem: (
            later_key(manifest),
            *(item.key for way in (*manifest.ways, *plans.later_ways(store, manifest)) for item in way.objects),
        )
        for manifest in known.values()
    }
    stored = {key for folder in ("manifests", "later") for key in store.list(f"{folder}/{name}/")}
    stored |= set(store.list(objects_prefix(name)))
    named = {key for of_one in keys.values() for key in of_one}
    old = {key: manifest for key, manifest in known.items() if key not in kept}
    return Marks(kept, old, frozenset(stored - named - known.keys()), frozenset(stored), keys)


def _closure(store: BlobStore, roots: Iterable[Ref]) -> tuple[dict[str, Manifest], bool]:
    """Return every manifest that the roots lead to by base and parent, and whether all of them could be read."""
    known: dict[str, Manifest] = {}
    waiting, seen, is_whole = list(roots), set[str](), True
    while waiting:
        ref = waiting.pop()
        if ref.key in seen:
            continue
        seen.add(ref.key)
        try:
            known[ref.key] = manifest = history.load(store, ref)
        except WeightsError:
            is_whole = False
            continue
        waiting += [r for r in (manifest.parent, manifest.base) if r]
    return known, is_whole


def _keep(
    store: BlobStore, known: dict[str, Manifest], head: Ref, superseding: Ref | None, kept: dict[str, Manifest]
) -> None:
    """Keep the chain from a head back past `superseding` to an anchor; the complete chain if there is none."""
    at: Ref | None = head
    passed = False
    while at is not None:
        if at.key not in known:
            if head is superseding:  # only the current pointers must be complete
                return
            raise WeightsError(
                f"garbage is not collected in the channel of {head.version}",
                f"the manifest of {at.version} cannot be read, and versions before it may be needed",
                hint="list the damage with `etude weights fsck`; then publish again, which writes a new full snapshot",
            )
        manifest = kept[at.key] = known[at.key]
        passed = passed or (superseding is not None and at.key == superseding.key)
        if passed and plans.snapshot(store, manifest) is not None:
            return
        at = manifest.base


def _delete(
    store: BlobStore,
    name: str,
    records: Collection[garbage_records.SweepRecord],
    superseded: frozenset[str],
    unreachable: frozenset[str],
    now: float,
    signer: Signer | None,
) -> frozenset[str]:
    """Announce, fence, mark again, delete. Return the deleted keys."""
    announcement = garbage_records.announce_deletion(store, name, now, superseded | unreachable)
    if unreachable and not _fence(store, name, signer):
        unreachable = frozenset()
    marks = mark(store, name, records)
    doomed = (superseded & marks.superseded) | (unreachable & marks.unreachable)
    for key in sorted(doomed, key=_order):
        store.delete(key)
    garbage_records.record_deleted(store, name, now, doomed)
    store.delete(announcement)
    return doomed


def _fence(store: BlobStore, name: str, signer: Signer | None) -> bool:
    """Make the commit of every publish that began before now fail. Return whether that worked."""
    key = history.pointer_key(name)
    data = read_pointer_bytes(store, key)
    if data is None:
        return False
    pointer = read_pointer(data)
    if pointer.signature and signer is None:
        return False
    raised = msgspec.structs.replace(pointer, sweep=pointer.sweep + 1, signature="")
    return commit(store, key, data, write_signed(key, raised, signer)) in (Outcome.WON, Outcome.HEALED)


def _order(key: str) -> tuple[int, str]:
    """Return a sort key for deletion: a key that refers to others is deleted before them."""
    return ("later", "manifests", "objects").index(key.split("/")[0]), key
