"""What garbage collection writes down: what it saw, so that a later one knows what is old, and what it will take.

A blob store tells no ages. So each collection leaves a record of where every pointer stood and which keys nothing led
to, with its clock's time. What such a record calls superseded or adrift has been so since then, at least.
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

T = TypeVar("T", bound="Seen | Doomed")


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A channel at a time."""

    format: int
    time_s: float  # of the collector's clock
    heads: dict[str, Ref]  # where each pointer stood, by the pointer's key
    adrift: tuple[str, ...]  # keys that nothing led to: a publish in flight, or what a killed one left


class Doomed(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection is about to delete, or has deleted."""

    format: int
    time_s: float
    keys: tuple[str, ...]


def write_seen(store: BlobStore, name: str, seen: Seen) -> None:
    store.put(_key(name, "seen", seen.time_s), msgspec.json.encode(seen))


def read_seen(store: BlobStore, name: str) -> list[tuple[str, Seen]]:
    """Every record with its key, the oldest first. Those that cannot be read are passed over."""
    records = _records(store, name, "seen", Seen)
    return sorted(((key, seen) for key, seen in records), key=lambda one: one[1].time_s)


def announce(store: BlobStore, name: str, time_s: float, keys: Iterable[str]) -> str:
    """Write down what is about to be deleted; the record's key."""
    key = _key(name, "doomed", time_s)
    store.put(key, msgspec.json.encode(Doomed(format=FORMAT, time_s=time_s, keys=tuple(sorted(keys)))))
    return key


def announced(store: BlobStore, name: str) -> list[tuple[str, Doomed]]:
    """Every such record with its key: of collections at work, and of those that were killed."""
    return list(_records(store, name, "doomed", Doomed))


def note_taken(store: BlobStore, name: str, time_s: float, keys: Iterable[str]) -> None:
    """Write down what was deleted, so that nobody takes it for lost."""
    taken = tuple(sorted(keys))
    if taken:
        store.put(_key(name, "taken", time_s), msgspec.json.encode(Doomed(format=FORMAT, time_s=time_s, keys=taken)))


def taken_keys(store: BlobStore, name: str) -> set[str]:
    """What collections have deleted, or were about to."""
    taken = {key for _, doomed in _records(store, name, "taken", Doomed) for key in doomed.keys}
    return taken | doomed_keys(store, name)


def doomed_keys(store: BlobStore, name: str) -> set[str]:
    """What collections at work are about to delete."""
    return {key for _, doomed in announced(store, name) for key in doomed.keys}


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
