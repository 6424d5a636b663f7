"""How large an image may be, and what it is made from. Torch-free; every reader of foreign bytes counts against it."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from etude.config import ranged
from etude.errors import InputError

MIB = 1 << 20


class BadSource(InputError):
    """What an image is to be made from is damaged, hostile, too large, or of no known kind. Its author's to mend."""


@dataclass(frozen=True)
class ImageLimits:
    """Bounds on one image and on each archive it is made from. The defaults fit a distribution with a toolchain."""

    total_bytes: int = ranged(16_384 * MIB, low=1)  # content of all files, and of one unpacked archive
    file_bytes: int = ranged(4096 * MIB, low=1)  # of one file
    num_files: int = ranged(2_000_000, low=1)  # files, folders and links
    path_bytes: int = ranged(4095, low=16)  # of one path, and of one link's target
    depth: int = ranged(64, low=1)  # folders in folders
    ratio: int = ranged(400, low=2)  # unpacked bytes for each packed one, beyond the first 16 MiB
    num_layers: int = ranged(256, low=1)  # of an OCI image, and instructions of a Dockerfile
    document_bytes: int = ranged(4 * MIB, low=1024)  # of one manifest, config or Dockerfile


class Budget:
    """What is left of an image's bytes and files while it is made.

    >>> budget = Budget(ImageLimits(total_bytes=10))
    >>> budget.take_bytes(8)
    >>> budget.take_bytes(8)
    Traceback (most recent call last):
    etude.environments.images.limits.BadSource: the image is too large: more than 10 bytes of files
      hint: leave out what machines do not need, or raise ImageLimits.total_bytes
    """

    def __init__(self, limits: ImageLimits) -> None:
        self.limits = limits
        self.num_bytes = self.num_files = 0

    def take_bytes(self, count: int) -> None:
        """Count content. Raises `BadSource` past the bound."""
        self.num_bytes += count
        if self.num_bytes > self.limits.total_bytes:
            raise too_large(f"more than {self.limits.total_bytes} bytes of files", "total_bytes")

    def take_file(self) -> None:
        """Count a file, folder or link. Raises `BadSource` past the bound."""
        self.num_files += 1
        if self.num_files > self.limits.num_files:
            raise too_large(f"more than {self.limits.num_files} files", "num_files")


def too_large(facts: str, limit: str) -> BadSource:
    """What to raise where a bound is passed; `limit` is its name in `ImageLimits`."""
    hint = f"leave out what machines do not need, or raise ImageLimits.{limit}"
    return BadSource("the image is too large", facts, hint=hint)


def tells_of_a_full_disk(text: str) -> None:
    """Raise `OSError`, as a write of our own would, where a program's last words tell of a full disk: that is this
    host's to mend and not the source's author's."""
    for words in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "Out of diskspace"):
        if words in text:
            raise OSError(errno.ENOSPC, text)
