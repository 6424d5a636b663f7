"""Opens a store of any kind from one string, as configs and command lines have it."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from etude.errors import StoreError
from etude.seams import BlobStore
from etude.stores.bucket import BucketStore
from etude.stores.cached import CachedStore
from etude.stores.directory import DirectoryStore
from etude.stores.http import HttpStore
from etude.stores.memory import MemoryStore


def open_store(url: str | Path, *, cache: str | Path | None = None, readonly: bool = False) -> BlobStore:
    """Open the store at a path, ``file:///path``, ``s3://bucket/prefix``, ``gs://``, ``az://`` or a relay at
    ``http://host:port``; ``memory://`` makes a new one.

    Buckets need ``pip install 'etude[buckets]'``; their credentials come from the environment, never from the URL. No
    request is made yet. `cache`: a directory that keeps copies of what never changes (`CachedStore`) and can be
    written now; what its disk does later is no error. `readonly`: a directory that is not there is a `StoreError`, and
    nothing is made or written in one that is. Raises `StoreError`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     open_store(folder).put("a", b"hello")
    ...     open_store(f"file://{folder}").get("a")
    b'hello'
    """
    if not str(url).strip():
        raise StoreError("a store's place is empty", hint="name a directory or a URL; . is the working directory")
    if cache is not None:
        store = open_store(url, readonly=readonly)
        _require_cache(Path(cache))
        return CachedStore(
            store, cache, place=str(store.root.absolute()) if isinstance(store, DirectoryStore) else str(url)
        )
    place = str(url)
    if isinstance(url, Path) or "://" not in place:
        return DirectoryStore(place, readonly=readonly)
    scheme = place.partition("://")[0]
    if scheme == "memory":
        if place != "memory://":
            raise StoreError("a memory:// URL names nothing", hint="write memory://")
        return MemoryStore()
    if scheme in ("http", "https"):
        return HttpStore(place)
    return DirectoryStore(_folder(place), readonly=readonly) if scheme == "file" else BucketStore(place)


def _require_cache(path: Path) -> None:
    """Check that a cache can be made at `path`. Raises `StoreError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        facts = str(error.strerror)
    else:
        if os.access(path, os.W_OK | os.X_OK):
            return
        facts = "it cannot be written"
    raise StoreError(
        f"{path} cannot keep copies", facts, hint="name a directory that may be written, or leave the cache out"
    )


def _folder(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("file://unreadable")
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise StoreError("a file:// URL names an absolute path and no host", hint="write file:///path, or the path")
    return unquote(parts.path)
