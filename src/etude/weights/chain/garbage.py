"""Deletes what no kept version needs, and breaks no reader and no writer, whatever is killed and however clocks go.

Kept: all that rebuilds every pointer's head, and every version that was a head within `keep_s`, from an anchor on.
Manifests of older versions stay, since lineage and audit read them; their objects go. Three rules make it safe:

- *A record before an age.* What is superseded or adrift goes only if a record `keep_s` old says that it was so then
  (`sweeps`). A reader that read a pointer since then finds all it needs. If the clock jumped, it finds the head's.
- *A fence before what is adrift goes.* A publish that was put to sleep between its objects and its pointer looks like
  rubbish. So the pointer is moved first, to the same version with a higher `sweep`: that publish's compare-and-swap
  fails, and its writer puts everything again.
- *An announcement before anything goes.* Whoever points a branch at an old version looks for it afterwards; and what
  pointers need is found out anew after the announcement. One of the two sees the other.

Killed half-way, it leaves a record, and the next one deletes the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

from etude.errors import WeightsError
from etude.seams import BlobStore
from etude.weights.chain import history, plans, sweeps
from etude.weights.chain.commit import Outcome, commit, read
from etude.weights.chain.manifest import FORMAT, Manifest, Ref, later_key, read_pointer
from etude.weights.chain.objects import objects_prefix
from etude.weights.chain.signing import Signer, check_signer, write_signed


@dataclass(frozen=True)
class Collected:
    """What a collection did."""

    num_deleted: int  # keys
    num_kept: int  # versions that can be rebuilt
    num_old: int  # versions whose manifest alone is left
    num_adrift: int  # keys that nothing leads to and that are too young to go, or whose pointer cannot be fenced
    needs_key: bool  # the pointer is signed and no key was given: what is adrift stays


@dataclass(frozen=True)
class Marks:
    """What a store holds of a channel, and what of it is needed."""

    kept: dict[str, Manifest]  # by key: what can be rebuilt, and must stay so
    old: dict[str, Manifest]  # known to a pointer, superseded for long
    adrift: frozenset[str]  # keys that nothing leads to
    stored: frozenset[str]  # keys of this channel alone
    keys: dict[str, tuple[str, ...]]  # by stem: a version's objects and its record of later ways

    @property
    def superseded(self) -> frozenset[str]:
        """Keys of the old versions' objects that no kept one needs."""
        mine = self.needed_by(self.old.values()) - self.needed_by(self.kept.values())
        return self.stored & mine

    def needed_by(self, manifests: Iterable[Manifest]) -> set[str]:
        return {key for manifest in manifests for key in self.keys[manifest.stem]}


def collect(store: BlobStore, name: str, *, keep_s: float, now: float, signer: Signer | None = None) -> Collected:
    """Delete what was not needed `keep_s` before `now` and is not needed now. Call it now and then: the first call
    only looks. `signer`: needed to delete what killed publishes left in a channel whose pointer is signed.

    Raises `WeightsError` where a pointer or a kept manifest cannot be read, or another key signed: nothing is deleted
    then.
    """
    records = sweeps.read_seen(store, name)
    past = [(key, seen) for key, seen in records if seen.time_s <= now - keep_s]
    since = past[-1][1] if past else None
    kept_records = [seen for _, seen in records if since is not None and since.time_s <= seen.time_s <= now]
    marks = mark(store, name, kept_records)
    pointers = history.pointers(store, name)
    own = pointers.get(history.pointer_key(name))
    if own is not None and signer is not None:
        check_signer(history.pointer_key(name), own, signer)
    heads = {key: pointer.head for key, pointer in pointers.items()}
    sweeps.write_seen(
        store, name, sweeps.Seen(format=FORMAT, time_s=now, heads=heads, adrift=tuple(sorted(marks.adrift)))
    )
    deleted = frozenset[str]()
    if since is not None:
        adrift = marks.adrift.intersection(since.adrift)
        if adrift or marks.superseded:
            deleted = _delete(store, name, kept_records, marks.superseded, adrift, now, signer)
    for key, seen in records:  # older than the one that was gone by; or from a future that a clock invented
        if (since is not None and seen.time_s < since.time_s) or seen.time_s > now:
            store.delete(key)
    for key, doomed in sweeps.announced(store, name):  # of a collection that was killed
        if doomed.time_s <= now - keep_s:
            sweeps.note_taken(store, name, now, set(doomed.keys) - marks.stored)
            store.delete(key)
    needs_key = own is not None and bool(own.signature) and signer is None
    return Collected(len(deleted), len(marks.kept), len(marks.old), len(marks.adrift - deleted), needs_key)


def mark(store: BlobStore, name: str, records: Collection[sweeps.Seen]) -> Marks:
    """What is needed, by the records from the one that is old enough on; without any, all that a pointer leads to."""
    pointers = history.pointers(store, name)
    roots = [pointer.head for pointer in pointers.values()]
    roots += [ref for record in records for ref in record.heads.values()]
    known, is_whole = _closure(store, roots)
    if not is_whole:  # what lies behind a lost manifest is not told from what is adrift
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
    """Every manifest that roots lead to by base and parent; and whether all could be read."""
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
    """Keep the chain from a head back over `superseding` to an anchor; all of it where there is none."""
    at: Ref | None = head
    passed = False
    while at is not None:
        if at.key not in known:
            if head is superseding:  # of a record: the present pointers are what counts
                return
            raise WeightsError(
                f"garbage of {head.version}'s channel is not collected",
                f"the manifest of {at.version} cannot be read, and what lies behind it may be needed",
                hint="`etude weights fsck` says what is damaged; publishing again writes a fresh anchor",
            )
        manifest = kept[at.key] = known[at.key]
        passed = passed or (superseding is not None and at.key == superseding.key)
        if passed and plans.snapshot(store, manifest) is not None:
            return
        at = manifest.base


def _delete(
    store: BlobStore,
    name: str,
    records: Collection[sweeps.Seen],
    superseded: frozenset[str],
    adrift: frozenset[str],
    now: float,
    signer: Signer | None,
) -> frozenset[str]:
    """Announce, fence, look again, delete; which keys."""
    announcement = sweeps.announce(store, name, now, superseded | adrift)
    if adrift and not _fence(store, name, signer):
        adrift = frozenset()
    marks = mark(store, name, records)
    doomed = (superseded & marks.superseded) | (adrift & marks.adrift)
    for key in sorted(doomed, key=_order):
        store.delete(key)
    sweeps.note_taken(store, name, now, doomed)
    store.delete(announcement)
    return doomed


def _fence(store: BlobStore, name: str, signer: Signer | None) -> bool:
    """Make every publish that began before now fail at its commit; whether that came about."""
    key = history.pointer_key(name)
    data = read(store, key)
    if data is None:
        return False
    pointer = read_pointer(data)
    if pointer.signature and signer is None:
        return False
    raised = msgspec.structs.replace(pointer, sweep=pointer.sweep + 1, signature="")
    return commit(store, key, data, write_signed(key, raised, signer)) in (Outcome.WON, Outcome.HEALED)


def _order(key: str) -> tuple[int, str]:
    """Who refers goes before what it refers to."""
    return ("later", "manifests", "objects").index(key.split("/")[0]), key
