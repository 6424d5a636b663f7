"""The metadata of an image."""

from __future__ import annotations

import msgspec

from etude.records.image import Image


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metadata of an image in a store: its digest and settings, its source, and its size.

    `source` is "directory", "repository", "dockerfile", "oci" or "debian"; `made` describes the build steps. `parent`
    is the digest of the image that it was built from (None: from nothing). `num_bytes` is the total size of its files.
    `command`, `entrypoint`, `labels` and `ports` are recorded but not used: a rollout decides what runs.

    >>> ImageRecord(image=Image(digest="9f3c"), source="directory").parent is None
    True
    """

    image: Image
    source: str  # "directory", "repository", "dockerfile", "oci", "debian"
    made: tuple[str, ...] = ()  # the build steps
    parent: str | None = None  # digest of the parent image; None: built from scratch
    num_files: int = 0
    num_bytes: int = 0  # total size of its files
    command: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    ports: tuple[str, ...] = ()
