"""A blob store in a bucket of an object store: S3 and what speaks it, Google Cloud Storage, Azure Blob Storage.

An object is created with ``If-None-Match: *``: of two writers one wins. What is larger than a part goes up in parts,
under a key of its own in ``.tmp/``, and is then copied into place inside of the store, again only if nothing is there:
so a large object, too, is there whole or not at all, and nobody overwrites it. A pointer is read together with its
ETag (or generation), its bytes are compared here, and it is written with ``If-Match``; whether two such writes exclude
each other is the server's promise. A compare-and-swap is sent once: when its answer is lost, `StoreError`, and the
caller reads back. Large objects come down in parts at once. Knows nothing of what the bytes mean: TLS and the lengths
are checked here, uploads are signed with the SHA-256 of their body; digests from end to end are the caller's.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from etude.errors import StoreError
from etude.stores.keys import check_key, check_prefix, check_range, is_key
from etude.stores.places import parse_place
from etude.stores.transport import Limits, Transport
from etude.stores.troubles import Beyond, Missing, Short, Taken

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta, PutMode, UpdateVersion

PARTS_AT_ONCE = 4
MAX_OBJECT_BYTES = 5 << 30  # what S3 copies in one request
_QUICK_BYTES = 256 << 10
_STAGED = ".tmp"
_STRAY_AFTER = timedelta(days=1)


@dataclass(frozen=True)
class _Part:
    """Bytes of an object, and which state of the object they are of."""

    data: bytes
    size: int  # of the whole object
    state: UpdateVersion  # for "overwrite it if it is still this"


class BucketStore:
    """A `BlobStore` under a URL such as ``s3://bucket/prefix``. Safe between threads; pickles without its connections
    and without credentials, which each process reads from its own environment.

    `deadline_s`: no further attempt of a request begins later; `silence_s`: the longest wait for the next bytes of an
    answer; `attempt_s`: one request, its body included; `max_requests`: in flight at once; `part_bytes`: what is larger
    travels in parts, 5 MiB or more.
    Raises `StoreError`: a URL of another form, obstore not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = 20.0,
        silence_s: float = 10.0,
        attempt_s: float = 120.0,
        max_requests: int = 16,
        part_bytes: int = 8 << 20,
    ) -> None:
        self.place = parse_place(url)
        self._limits = Limits(deadline_s, silence_s, attempt_s, max_requests, part_bytes)
        self._transport = Transport(self.place, self._limits)
        self._at_once = min(PARTS_AT_ONCE, max_requests)

    @property
    def deadline_s(self) -> float:
        """After so long no further attempt of a request begins."""
        return self._limits.deadline_s

    def __repr__(self) -> str:
        return f"BucketStore({str(self.place)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        limits = self._limits
        return (partial(BucketStore, **asdict(limits)), (str(self.place),))

    def put(self, key: str, data: bytes) -> None:
        """Durable when it returns. Raises `StoreError`: other bytes under the key, too large, no answer in time."""
        check_key(key)
        what = f"object {key!r} cannot be written to {self.place}"
        if len(data) > MAX_OBJECT_BYTES:
            raise StoreError(what, f"it has {len(data)} bytes", hint=f"cut it into pieces of {MAX_OBJECT_BYTES} bytes")
        if len(data) <= self._limits.part_bytes:
            create = partial(self._create, what, key, data)
        else:
            if self._is_there(key, data):
                return
            create = partial(self._create_large, what, key, data)
        for _ in self._attempts(what):
            with suppress(Taken):
                create()
                return
            if self._is_there(key, data):
                return

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes [start, stop), fewer at the end. Raises `KeyError`, `StoreError`: no answer in time."""
        check_range(start, stop)
        check_key(key)
        try:
            if start == stop:
                return self._part(key, 0, 1).data[:0]
            first = self._part(key, start, self._until(start, stop))
            end = first.size if stop is None else min(stop, first.size)
            at = start + len(first.data)
            if at >= end:
                return first.data
            parts = range(at, end, self._limits.part_bytes)
            with ThreadPoolExecutor(min(self._at_once, len(parts)), thread_name_prefix="parts") as threads:
                rest = threads.map(lambda at: self._part(key, at, self._until(at, end)).data, parts)
                return b"".join([first.data, *rest])
        except Missing:
            raise KeyError(key) from None

    def list(self, prefix: str) -> list[str]:
        """Sorted keys that start with `prefix`. Asks for the directory that the prefix ends in."""
        import obstore

        folder = check_prefix(prefix).rpartition("/")[0]
        what = f"keys under {prefix!r} cannot be listed in {self.place}"
        client = self._transport.quick
        found = self._transport.run(
            what, lambda: [meta["path"] for page in obstore.list(client, folder or None) for meta in page]
        )
        return sorted(
            key for key in found if key.startswith(prefix) and is_key(key) and not key.startswith(f"{_STAGED}/")
        )

    def delete(self, key: str) -> None:
        """Remove an object; no error when it is not there. Raises `StoreError`."""
        self._delete(check_key(key))

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Atomically replace a pointer's bytes if they are `expected` (None: absent), as far as the server keeps
        ``If-Match``. Raises `StoreError`, also when the answer was lost: read back whether it was done."""
        check_key(key)
        what = f"pointer {key!r} in {self.place} cannot be moved"
        if len(data) > self._limits.part_bytes:
            raise StoreError(what, f"{len(data)} bytes are no pointer", hint="put the bytes; point at their key")
        for _ in self._attempts(what):
            held = self._pointer(key)
            if (held.data if held else None) != expected or (held and held.size > len(held.data)):
                return False
            with suppress(Taken, Missing):
                state: PutMode = held.state if held else "create"
                self._write(what, key, data, state, may=(Taken, Missing) if held else (Taken,), repeat=False)
                return True
        raise AssertionError("attempts end by an error")

    def _create(self, what: str, key: str, data: bytes) -> None:
        """Raises `Taken`."""
        self._write(what, key, data, "create", may=(Taken,), repeat=True)

    def _create_large(self, what: str, key: str, data: bytes) -> None:
        import obstore

        run, client, at_once = self._transport.run, self._transport.in_parts, self._at_once
        part_bytes = self._limits.part_bytes
        staged = f"{_STAGED}/{secrets.token_hex(16)}"
        self._sweep()
        try:
            run(
                what,
                lambda: obstore.put(
                    client, staged, data, use_multipart=True, chunk_size=part_bytes, max_concurrency=at_once
                ),
                width=at_once,
            )
            run(what, lambda: obstore.copy(client, staged, key, overwrite=False), may=(Taken,))
        finally:
            with suppress(StoreError):  # a later sweep finds it
                self._delete(staged)

    def _write(
        self, what: str, key: str, data: bytes, mode: PutMode, *, may: tuple[type[Exception], ...], repeat: bool
    ) -> None:
        """Raises what it `may`: the object is not in the state that `mode` says."""
        import obstore

        client = self._transport.quick if len(data) <= _QUICK_BYTES else self._transport.slow
        self._transport.run(what, lambda: obstore.put(client, key, data, mode=mode), may=may, repeat=repeat)

    def _part(self, key: str, start: int, stop: int) -> _Part:
        """One request's bytes; none when the object ends before `start`. Raises `Missing`."""
        import obstore

        client = self._transport.quick
        options: GetOptions = {"range": (start, stop)}

        def ask() -> _Part:
            answer = obstore.get(client, key, options=options)
            meta, data = answer.meta, bytes(answer.bytes())
            if len(data) != min(stop, meta["size"]) - start:
                raise Short(f"{len(data)} bytes came of [{start}, {stop}) of {meta['size']}")
            return _Part(data, meta["size"], _state(meta))

        try:
            return self._transport.run(self._unread(key), ask, may=(Missing, Beyond))
        except Beyond:
            meta = self._transport.run(self._unread(key), lambda: obstore.head(client, key), may=(Missing,))
            return _Part(b"", meta["size"], _state(meta))

    def _pointer(self, key: str) -> _Part | None:
        with suppress(Missing):
            return self._part(key, 0, self._limits.part_bytes)
        return None

    def _is_there(self, key: str, data: bytes) -> bool:
        """Whether the object is there with these bytes. Raises `StoreError` when it is there with others."""
        step = self._limits.part_bytes
        try:
            size = self._part(key, 0, 1).size
            if size == len(data) and all(
                self._part(key, at, at + step).data == data[at : at + step] for at in range(0, size, step)
            ):
                return True
        except Missing:
            return False
        raise StoreError(
            f"object {key!r} exists with other bytes",
            f"it has {size} bytes, these are {len(data)}",
            hint="objects are immutable: choose a key from the content",
        )

    def _delete(self, key: str) -> None:
        import obstore

        client = self._transport.quick
        with suppress(Missing):
            self._transport.run(
                f"object {key!r} cannot be deleted in {self.place}", lambda: obstore.delete(client, key)
            )

    def _sweep(self) -> None:
        """Remove what killed writers left in `.tmp/`, once it is old enough to be nobody's."""
        import obstore

        client = self._transport.quick
        old = datetime.now(UTC) - _STRAY_AFTER
        with suppress(StoreError):  # whoever may not list may still write
            pages = self._transport.run("strays cannot be listed", lambda: list(obstore.list(client, _STAGED)))
            for meta in (meta for page in pages for meta in page if meta["last_modified"] < old):
                self._delete(meta["path"])

    def _attempts(self, what: str) -> Iterator[None]:
        """Times to look and write anew, until the deadline."""
        deadline = time.monotonic() + self._limits.deadline_s
        for attempts in itertools.count(1):
            yield
            if not self._transport.pause(attempts, deadline):
                break
        facts = f"others changed it between each look and each write for {self._limits.deadline_s:g} s"
        raise StoreError(what, facts, hint="have fewer writers move this pointer")

    def _until(self, start: int, stop: int | None) -> int:
        """Where one request's part of [start, stop) ends."""
        end = start + self._limits.part_bytes
        return end if stop is None else min(stop, end)

    def _unread(self, key: str) -> str:
        return f"object {key!r} cannot be read from {self.place}"


def _state(meta: ObjectMeta) -> UpdateVersion:
    """What a conditional write compares: S3 and Azure have ETags, Google generations."""
    state: UpdateVersion = {}
    if meta["e_tag"] is not None:
        state["e_tag"] = meta["e_tag"]
    if meta["version"] is not None:
        state["version"] = meta["version"]
    return state
