"""A cache of prepared file trees. The id of a tree is the digest of its bytes.

The least recently used trees are evicted first. An evicted tree cannot be forked, so prepare it again before each fork;
that is cheap.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from etude.environments.lru_cache import LruCache
from etude.environments.namespace.guest import wire
from etude.environments.paths import encode_path


def tree(files: Mapping[str, bytes]) -> bytes:
    """Return files (path to content) and their folders as one byte string, the TREE frame of `guest.wire`.

    Equal files give equal bytes. Raises `ValueError` for a path outside the working directory, or one that is both a
    file and a folder.
    """
    named = {encode_path(path): bytes(data) for path, data in files.items()}
    entries = {path: (b"f", data) for path, data in named.items()}
    for path in named:
        while path := path.rpartition(b"/")[0]:
            if path in named:
                raise ValueError(f"{path!r} is both a file and a folder")
            entries[path] = (b"d", b"")
    return wire.pack(wire.TREE, *(part for path in sorted(entries) for part in (path, *entries[path])))


class Snapshots(LruCache[bytes]):
    """Cached file trees, serialised as `tree` does it, by their SHA-256 in hexadecimal.

    >>> kept = Snapshots(max_bytes=1 << 20)
    >>> kept.prepare({"a/b.py": b"x = 1"}) == kept.prepare({"./a/b.py": b"x = 1"})
    True
    """

    def __init__(self, *, max_bytes: int) -> None:
        super().__init__(len, max_bytes=max_bytes)

    def prepare(self, files: Mapping[str, bytes]) -> str:
        """Cache the tree of files (path to content) and return its id. Raises `ValueError` for invalid files."""
        return self.keep(tree(files))

    def keep(self, tree: bytes) -> str:
        """Cache a serialised file tree and return its id."""
        return self.put(hashlib.sha256(tree).hexdigest(), tree)

    def adopt(self, tree: bytes) -> str:
        """Validate and cache a serialised file tree from another process. Returns its id.

        Raises `ValueError` for invalid bytes.
        """
        frame = wire.unpack(tree)
        if frame.kind != wire.TREE or len(frame.fields) % 3:
            raise ValueError("not a packed tree")
        for at in range(0, len(frame.fields), 3):
            path, kind = frame.fields[at : at + 2]
            if encode_path(os.fsdecode(path)) != path or kind not in (b"f", b"x", b"d", b"l"):
                raise ValueError(f"{path!r} of kind {kind!r} is not allowed in a tree")
        return self.keep(tree)
