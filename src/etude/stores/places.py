"""Where a bucket is, in one URL: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``.

A place names no options and no credentials: those come from the environment, as each provider documents it, so a place
may stand in a config, a log and an error. Knows of no client.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from etude.errors import StoreError, nearest
from etude.stores.keys import check_key

PROVIDERS = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


@dataclass(frozen=True)
class Place:
    """A bucket and a prefix in it. `str` of it is the URL.

    >>> parse_place("s3://models/a/b/")
    Place(scheme='s3', bucket='models', prefix='a/b')
    >>> str(parse_place("gs://models"))
    'gs://models'
    """

    scheme: str  # a key of PROVIDERS
    bucket: str
    prefix: str  # without slashes at its ends; "" for the whole bucket

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}{'/' if self.prefix else ''}{self.prefix}"


def parse_place(url: str) -> Place:
    """Raises `StoreError`, which quotes nothing of a URL that may hold a secret."""
    scheme, is_url, _ = url.partition("://")
    scheme = scheme.lower()
    if not is_url:
        raise StoreError("a path is no URL", hint="write file:///path, or a bucket's URL")
    if scheme == "memory":
        raise StoreError("memory:// ends with its process", hint="write file:///path or a bucket's URL")
    if scheme not in PROVIDERS:
        raise StoreError(f"no store speaks {scheme[:20]!r}", hint=nearest(scheme, [*PROVIDERS, "file", "memory"]))
    try:
        parts = urlsplit(url)
    except ValueError:
        raise StoreError(f"this {scheme}:// URL cannot be read", hint=f"write {scheme}://bucket/prefix") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise StoreError(
            f"a {scheme}:// URL with credentials or options is not taken",
            hint=f"write {scheme}://bucket/prefix and put the rest into the environment: it is not logged from there",
        )
    if not _BUCKET.fullmatch(parts.netloc):
        raise StoreError(f"{parts.netloc[:80]!r} is no bucket's name", hint=f"write {scheme}://bucket/prefix")
    prefix = parts.path.strip("/")
    return Place(scheme, parts.netloc, check_key(prefix) if prefix else "")
