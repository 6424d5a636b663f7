"""Records that garbage collection keeps in the store: what it saw, what it is about to delete, what it deleted.

A blob store does not report ages. So each collection writes a record, with the time of its clock, of the version of
every pointer and of the keys that were unreachable. Keys that such a record lists have been superseded or unreachable
at least since then.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

import msgspec

from etude.errors import WeightsError
from etude.seams import BlobStore
from etude.weights.chain.manifest import FORMAT, Ref

MAX_SWEEP_BYTES = 64 << 20

T = TypeVar("T", bound="SweepRecord | DeletionRecord")


class SweepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one garbage collection: the version that each pointer of the channel named at that time, and the
    unreachable keys.

    `time_s`: Unix time by the collector's clock. `heads`: pointer's key -> reference to its version. `adrift`:
    unreachable keys, of a running publish or left by a killed one.
    """

    format: int
    time_s: float
    heads: dict[str, Ref]
    adrift: tuple[str, ...]


class DeletionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Keys that a garbage collection is about to delete, or has deleted. `time_s`: Unix time."""

    format: int
    time_s: float
    keys: tuple[str, ...]


def write_sweep_record(store: BlobStore, name: str, seen: SweepRecord) -> None:
    """Store the record of one garbage collection in channel `name`, under a new key."""
    store.put(_key(name, "seen", seen.time_s), msgspec.json.encode(seen))


def read_sweep_records(store: BlobStore, name: str) -> list[tuple[str, SweepRecord]]:
    """Return the records of earlier garbage collections with their store keys, the oldest first.

    Unreadable records are ignored.
    """
    records = _records(store, name, "seen", SweepRecord)
    return sorted(((key, seen) for key, seen in records), key=lambda one: one[1].time_s)


def announce_deletion(store: BlobStore, name: str, time_s: float, keys: Iterable[str]) -> str:
    """Store a record of the keys that are about to be deleted. Return the key of the record. `time_s`: Unix time."""
    key = _key(name, "doomed", time_s)
    store.put(key, msgspec.json.encode(DeletionRecord(format=FORMAT, time_s=time_s, keys=tuple(sorted(keys)))))
    return key


def pending_deletions(store: BlobStore, name: str) -> list[tuple[str, DeletionRecord]]:
    """Return all announced deletions, of running and of killed collections, with the keys of their records."""
    return list(_records(store, name, "doomed", DeletionRecord))


def record_deleted(store: BlobStore, name: str, time_s: float, keys: Iterable[str]) -> None:
    """Store a record of the keys that garbage collection deleted, so that `fsck` does not report them as lost.

    `time_s`: Unix time. Stores nothing if there are no keys.
    """
    taken = tuple(sorted(keys))
    if taken:
        store.put(
            _key(name, "taken", time_s), msgspec.json.encode(DeletionRecord(format=FORMAT, time_s=time_s, keys=taken))
        )


def deleted_keys(store: BlobStore, name: str) -> set[str]:
    """Return the keys that garbage collections have deleted or are about to delete."""
    taken = {key for _, doomed in _records(store, name, "taken", DeletionRecord) for key in doomed.keys}
    return taken | pending_keys(store, name)


def pending_keys(store: BlobStore, name: str) -> set[str]:
    """Return the keys that running garbage collections are about to delete."""
    return {key for _, doomed in pending_deletions(store, name) for key in doomed.keys}


def _key(name: str, kind: str, time_s: float) -> str:
    return f"sweeps/{name}/{kind}-{max(0, round(time_s * 1000)):015d}-{secrets.token_hex(4)}.json"


def _records(store: BlobStore, name: str, kind: str, of: type[T]) -> Iterator[tuple[str, T]]:
    for key in store.list(f"sweeps/{name}/{kind}-"):
        with suppress(KeyError, ValueError, WeightsError):
            if not re.search(f"/{kind}-[0-9]+-[0-9a-f]{{8}}[.]json$", key):
                continue
            record = msgspec.json.decode(store.get(key, 0, MAX_SWEEP_BYTES), type=of)
            if record.format == FORMAT:
                yield key, record
