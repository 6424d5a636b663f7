"""Size limits of images and of the archives they are built from; every reader of untrusted bytes enforces them."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from etude.config import ranged
from etude.errors import InputError

MIB = 1 << 20


class BadSource(InputError):
    """Raised if the source of an image is damaged, malicious, too large or of an unknown format."""


@dataclass(frozen=True)
class ImageLimits:
    """Limits of one image, and of each archive that it is built from.

    `total_bytes` limits all files together, `file_bytes` one file, `num_files` the files, folders and links,
    `path_bytes` one path or link target, `depth` the nesting of folders. `ratio` limits the unpacked bytes for each
    packed byte, after the first 16 MiB. `num_layers` limits the layers of an OCI image and the instructions of a
    Dockerfile, `document_bytes` one manifest, config or Dockerfile. The defaults fit a Linux distribution with a
    compiler."""

    total_bytes: int = ranged(16_384 * MIB, low=1)  # of all files together, and of one unpacked archive
    file_bytes: int = ranged(4096 * MIB, low=1)  # of one file
    num_files: int = ranged(2_000_000, low=1)  # files, folders and links
    path_bytes: int = ranged(4095, low=16)  # of one path, and of one link target
    depth: int = ranged(64, low=1)  # of nested folders
    ratio: int = ranged(400, low=2)  # unpacked bytes for each packed one, beyond the first 16 MiB
    num_layers: int = ranged(256, low=1)  # of an OCI image, and instructions of a Dockerfile
    document_bytes: int = ranged(4 * MIB, low=1024)  # of one manifest, config or Dockerfile


class Budget:
    """The bytes and files counted so far while an image is built.

    >>> budget = Budget(ImageLimits(total_bytes=10))
    >>> budget.take_bytes(8)
    >>> budget.take_bytes(8)
    Traceback (most recent call last):
    etude.environments.images.limits.BadSource: the image is too large: more than 10 bytes of files
      hint: leave out files that machines do not need, or raise ImageLimits.total_bytes
    """

    def __init__(self, limits: ImageLimits) -> None:
        self.limits = limits
        self.num_bytes = self.num_files = 0

    def take_bytes(self, count: int) -> None:
        """Count `count` more bytes of file content. Raises `BadSource` over the limit."""
        self.num_bytes += count
        if self.num_bytes > self.limits.total_bytes:
            raise too_large(f"more than {self.limits.total_bytes} bytes of files", "total_bytes")

    def take_file(self) -> None:
        """Count one more file, folder or link. Raises `BadSource` over the limit."""
        self.num_files += 1
        if self.num_files > self.limits.num_files:
            raise too_large(f"more than {self.limits.num_files} files", "num_files")


def too_large(facts: str, limit: str) -> BadSource:
    """Build the error for an exceeded limit. `facts` describes the excess, and `limit` is the limit's name in
    `ImageLimits`."""
    hint = f"leave out files that machines do not need, or raise ImageLimits.{limit}"
    return BadSource("the image is too large", facts, hint=hint)


def raise_if_disk_full(text: str) -> None:
    """Raise `OSError` (ENOSPC) if `text`, the error output of a program, reports a full disk.

    A full disk is a problem of this host, not of the image's source."""
    for message in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "Out of diskspace"):
        if message in text:
            raise OSError(errno.ENOSPC, text)
