"""Check the paths of a machine's files."""

from __future__ import annotations

import os
from pathlib import PurePosixPath


def encode_path(path: str) -> bytes:
    """Return a path relative to the working directory in normal form, as bytes.

    Raises `ValueError` for a path that leaves the working directory or is too long.

    >>> encode_path("./a//b.py")
    b'a/b.py'
    """
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise ValueError(f"{path!r} is not a path inside the working directory")
    encoded = os.fsencode(str(pure))
    if len(encoded) > 4095 or max((len(os.fsencode(p)) for p in pure.parts), default=0) > 255:
        raise ValueError(f"a path of {len(encoded)} bytes is too long")
    return encoded
