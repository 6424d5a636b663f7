"""Opens a blob store of any kind from its URL or path."""

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
    """Open the blob store at a path or URL.

    `url` is a path, ``file:///path``, ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``,
    ``http://host:port`` (a relay, read-only), or ``memory://`` (a new store in this process). Buckets need ``pip
    install 'etude[buckets]'`` and read their credentials from the environment. No network request is made here.

    `cache` is a local directory for copies of immutable objects (`CachedStore`). It must be writable now. If its disk
    fails later, objects are read without the cache. With `readonly`, a directory must exist, and nothing is created or
    written in it; other stores ignore it.

    Raises `StoreError` if the URL is invalid, obstore is not installed, the cache cannot be written, or a directory
    cannot be opened.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     open_store(folder).put("a", b"hello")
    ...     open_store(f"file://{folder}").get("a")
    b'hello'
    """
    if not str(url).strip():
        raise StoreError("the store URL is empty", hint="name a directory or a URL; . is the working directory")
    if cache is not None:
        store = open_store(url, readonly=readonly)
        _require_cache(Path(cache))
        return CachedStore(
            store, cache, source_id=str(store.root.absolute()) if isinstance(store, DirectoryStore) else str(url)
        )
    text = str(url)
    if isinstance(url, Path) or "://" not in text:
        return DirectoryStore(text, readonly=readonly)
    scheme = text.partition("://")[0]
    if scheme == "memory":
        if text != "memory://":
            raise StoreError("a memory:// URL has no path", hint="write memory://")
        return MemoryStore()
    if scheme in ("http", "https"):
        return HttpStore(text)
    return DirectoryStore(_file_path(text), readonly=readonly) if scheme == "file" else BucketStore(text)


def _require_cache(path: Path) -> None:
    """Create the cache directory. Raises `StoreError` if it cannot be created or written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        facts = str(error.strerror)
    else:
        if os.access(path, os.W_OK | os.X_OK):
            return
        facts = "it cannot be written"
    raise StoreError(
        f"cache {path} cannot be used", facts, hint="name a directory with write access, or leave the cache out"
    )


def _file_path(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("file://unreadable")
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise StoreError("a file:// URL must have an absolute path and no host", hint="write file:///path, or the path")
    return unquote(parts.path)
