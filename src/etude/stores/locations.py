"""Bucket URLs: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``.

A URL has no options and no credentials, so it is safe to write it in configs, logs and error messages. Clients read
credentials from the environment, as each provider documents.
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
class BucketLocation:
    """A bucket and a prefix in it. `parse_bucket_url` makes one; `str` returns the URL.

    `scheme` is "s3", "gs" or "az". `prefix` has no slash at its start and end; "" is the full bucket.

    >>> parse_bucket_url("s3://models/a/b/")
    BucketLocation(scheme='s3', bucket='models', prefix='a/b')
    >>> str(parse_bucket_url("gs://models"))
    'gs://models'
    """

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}{'/' if self.prefix else ''}{self.prefix}"


def parse_bucket_url(url: str) -> BucketLocation:
    """Parse the URL of a bucket. Raises `StoreError` if it is invalid. The error never quotes possible secrets."""
    scheme, is_url, _ = url.partition("://")
    scheme = scheme.lower()
    if not is_url:
        raise StoreError("this is a path, not a bucket URL", hint="write file:///path, or a bucket URL")
    if scheme == "memory":
        raise StoreError("memory:// is lost when the process ends", hint="write file:///path or a bucket URL")
    if scheme not in PROVIDERS:
        raise StoreError(f"unknown store scheme {scheme[:20]!r}", hint=nearest(scheme, [*PROVIDERS, "file", "memory"]))
    try:
        parts = urlsplit(url)
    except ValueError:
        raise StoreError(f"this {scheme}:// URL cannot be parsed", hint=f"write {scheme}://bucket/prefix") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise StoreError(
            f"a {scheme}:// URL with credentials or options is refused",
            hint=f"write {scheme}://bucket/prefix and set the rest in the environment, which is not logged",
        )
    if not _BUCKET.fullmatch(parts.netloc):
        raise StoreError(f"{parts.netloc[:80]!r} is not a valid bucket name", hint=f"write {scheme}://bucket/prefix")
    prefix = parts.path.strip("/")
    return BucketLocation(scheme, parts.netloc, check_key(prefix) if prefix else "")
