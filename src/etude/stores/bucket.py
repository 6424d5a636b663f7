"""A blob store in a bucket: S3 and compatible servers, Google Cloud Storage, Azure Blob Storage.

An object is created with ``If-None-Match: *``, so that one of two writers wins. An object larger than `part_bytes` is
uploaded in parts to a temporary key under ``.tmp/`` and then copied inside the store, if the target does not exist. So
a large object is complete or absent, too. Large objects are downloaded in parallel parts.

A pointer is read with its ETag (or generation), compared in this process, and written with ``If-Match``. The server
must make such writes exclude each other. A compare-and-swap is sent once. If its response is lost, `StoreError` is
raised and the caller must read the pointer again.

Transfers are checked by TLS and by length. On S3, uploads are signed with the SHA-256 of their body. The caller must
check digests end to end."""

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
from etude.stores.error_mapping import ConditionFailed, NotFound, RangeBeyondEnd, WrongLength
from etude.stores.keys import check_key, check_prefix, check_range, is_key
from etude.stores.locations import parse_bucket_url
from etude.stores.transport import Limits, Transport

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta, PutMode, UpdateVersion

PARTS_AT_ONCE = 4
MAX_OBJECT_BYTES = 5 << 30  # the limit of one copy request of S3
_QUICK_BYTES = 256 << 10
_STAGED = ".tmp"
_STRAY_AFTER = timedelta(days=1)


@dataclass(frozen=True)
class _Part:
    """A range of an object, with the size and the state of the object when it was read."""

    data: bytes
    size: int  # of the full object
    state: UpdateVersion  # for a conditional overwrite


class BucketStore:
    """A `BlobStore` in a bucket, at a URL such as ``s3://bucket/prefix``.

    Thread-safe. It can be pickled: the copy contains no connections and no credentials; a process that loads it reads
    the credentials from its own environment. Raises `StoreError` if the URL is invalid or obstore is not installed,
    `ValueError` for invalid limits.

    - `deadline_s`: seconds after which no further attempt of a request starts.
    - `silence_s`: the longest wait for the next bytes of a response, in seconds.
    - `attempt_s`: the longest time of one attempt, including its body, in seconds.
    - `max_requests`: the most requests in flight at once.
    - `part_bytes`: larger objects are transferred in parts of this size; at least 5 MiB."""

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
        self.location = parse_bucket_url(url)
        self._limits = Limits(deadline_s, silence_s, attempt_s, max_requests, part_bytes)
        self._transport = Transport(self.location, self._limits)
        self._at_once = min(PARTS_AT_ONCE, max_requests)

    @property
    def deadline_s(self) -> float:
        """Seconds after which no further attempt of a request starts."""
        return self._limits.deadline_s

    def __repr__(self) -> str:
        return f"BucketStore({str(self.location)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        limits = self._limits
        return (partial(BucketStore, **asdict(limits)), (str(self.location),))

    def put(self, key: str, data: bytes) -> None:
        """Write an immutable object. It is durable when this returns.

        Raises `StoreError` if the key exists with different bytes, the object is over 5 GiB, or there is no response in
        time."""
        check_key(key)
        what = f"object {key!r} cannot be written to {self.location}"
        if len(data) > MAX_OBJECT_BYTES:
            raise StoreError(
                what, f"it has {len(data)} bytes", hint=f"split it into objects of at most {MAX_OBJECT_BYTES} bytes"
            )
        if len(data) <= self._limits.part_bytes:
            create = partial(self._write, what, key, data, "create", expected=(ConditionFailed,), idempotent=True)
        else:
            if self._exists(key, data):
                return
            create = partial(self._create_large, what, key, data)
        for _ in self._attempts(what):
            with suppress(ConditionFailed):
                create()
                return
            if self._exists(key, data):
                return

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of an object or a pointer, as far as they exist. `stop` None: up to its end.

        Raises `KeyError` if the key does not exist, `StoreError` if there is no response in time."""
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
        except NotFound:
            raise KeyError(key) from None

    def list(self, prefix: str) -> list[str]:
        """Return the sorted keys that start with `prefix`.

        Requests only the directory that the prefix ends in. Raises `StoreError` if there is no response in time."""
        import obstore

        folder = check_prefix(prefix).rpartition("/")[0]
        what = f"keys under {prefix!r} cannot be listed in {self.location}"
        client = self._transport.quick
        found = self._transport.run(
            what, lambda: [meta["path"] for page in obstore.list(client, folder or None) for meta in page]
        )
        return sorted(
            key for key in found if key.startswith(prefix) and is_key(key) and not key.startswith(f"{_STAGED}/")
        )

    def delete(self, key: str) -> None:
        """Delete an object. Do nothing if it does not exist. Raises `StoreError` if there is no response in time."""
        self._delete(check_key(key))

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Replace the bytes of a pointer atomically if they equal `expected`. Return whether they were replaced.

        With `expected` None the pointer must not exist, and is created. The server must implement ``If-Match``. Raises
        `StoreError`, also if the response was lost: then read the pointer to find out whether it was replaced."""
        check_key(key)
        what = f"pointer {key!r} in {self.location} cannot be moved"
        if len(data) > self._limits.part_bytes:
            raise StoreError(
                what,
                f"{len(data)} bytes are too many for a pointer",
                hint="put the bytes as an object, and its key into the pointer",
            )
        for _ in self._attempts(what):
            found = self._pointer(key)
            if (found.data if found else None) != expected or (found and found.size > len(found.data)):
                return False
            with suppress(ConditionFailed, NotFound):
                state: PutMode = found.state if found else "create"
                self._write(
                    what,
                    key,
                    data,
                    state,
                    expected=(ConditionFailed, NotFound) if found else (ConditionFailed,),
                    idempotent=False,
                )
                return True
        raise AssertionError("unreachable")

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
            run(what, lambda: obstore.copy(client, staged, key, overwrite=False), expected=(ConditionFailed,))
        finally:
            with suppress(StoreError):  # a later sweep deletes it
                self._delete(staged)

    def _write(
        self,
        what: str,
        key: str,
        data: bytes,
        mode: PutMode,
        *,
        expected: tuple[type[Exception], ...],
        idempotent: bool,
    ) -> None:
        """Write an object if it is in the state `mode`. Raises the outcomes in `expected` if it is not."""
        import obstore

        client = self._transport.quick if len(data) <= _QUICK_BYTES else self._transport.slow
        self._transport.run(
            what, lambda: obstore.put(client, key, data, mode=mode), expected=expected, idempotent=idempotent
        )

    def _part(self, key: str, start: int, stop: int) -> _Part:
        """Read a range in one request. It is empty if the object ends before `start`. Raises `NotFound`."""
        import obstore

        client = self._transport.quick
        options: GetOptions = {"range": (start, stop)}

        def request() -> _Part:
            answer = obstore.get(client, key, options=options)
            meta, data = answer.meta, bytes(answer.bytes())
            if len(data) != min(stop, meta["size"]) - start:
                raise WrongLength(f"received {len(data)} bytes for [{start}, {stop}) of {meta['size']}")
            return _Part(data, meta["size"], _state(meta))

        try:
            return self._transport.run(self._read_error(key), request, expected=(NotFound, RangeBeyondEnd))
        except RangeBeyondEnd:
            meta = self._transport.run(self._read_error(key), lambda: obstore.head(client, key), expected=(NotFound,))
            return _Part(b"", meta["size"], _state(meta))

    def _pointer(self, key: str) -> _Part | None:
        with suppress(NotFound):
            return self._part(key, 0, self._limits.part_bytes)
        return None

    def _exists(self, key: str, data: bytes) -> bool:
        """Return whether the object exists with these bytes. Raises `StoreError` if it exists with different ones."""
        step = self._limits.part_bytes
        try:
            size = self._part(key, 0, 1).size
            if size == len(data) and all(
                self._part(key, at, at + step).data == data[at : at + step] for at in range(0, size, step)
            ):
                return True
        except NotFound:
            return False
        raise StoreError(
            f"object {key!r} already exists with other content",
            f"it has {size} bytes, the new data has {len(data)}",
            hint="an object cannot be overwritten: use another key, such as the SHA-256 of the data",
        )

    def _delete(self, key: str) -> None:
        import obstore

        client = self._transport.quick
        with suppress(NotFound):
            self._transport.run(
                f"object {key!r} cannot be deleted in {self.location}", lambda: obstore.delete(client, key)
            )

    def _sweep(self) -> None:
        """Delete objects that killed writers left in `.tmp/`, once they are `_STRAY_AFTER` old."""
        import obstore

        client = self._transport.quick
        old = datetime.now(UTC) - _STRAY_AFTER
        with suppress(StoreError):  # writing does not need the permission to list
            pages = self._transport.run(
                "temporary objects cannot be listed", lambda: list(obstore.list(client, _STAGED))
            )
            for meta in (meta for page in pages for meta in page if meta["last_modified"] < old):
                self._delete(meta["path"])

    def _attempts(self, what: str) -> Iterator[None]:
        """Yield for each attempt to read and write again. Raises `StoreError` at the deadline."""
        deadline = time.monotonic() + self._limits.deadline_s
        for attempts in itertools.count(1):
            yield
            if not self._transport.pause(attempts, deadline):
                break
        facts = f"other writers changed it between each read and write for {self._limits.deadline_s:g} s"
        raise StoreError(what, facts, hint="use fewer writers for this pointer")

    def _until(self, start: int, stop: int | None) -> int:
        """Return the end of the first part of [start, stop)."""
        end = start + self._limits.part_bytes
        return end if stop is None else min(stop, end)

    def _read_error(self, key: str) -> str:
        return f"object {key!r} cannot be read from {self.location}"


def _state(meta: ObjectMeta) -> UpdateVersion:
    """Return the state that a conditional write compares: an ETag on S3 and Azure, a generation on Google."""
    state: UpdateVersion = {}
    if meta["e_tag"] is not None:
        state["e_tag"] = meta["e_tag"]
    if meta["version"] is not None:
        state["version"] = meta["version"]
    return state
