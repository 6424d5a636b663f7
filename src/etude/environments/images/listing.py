"""The canonical list of the files of a root filesystem; its SHA-256 is the digest of the image.

It has one line for each path, sorted by the bytes of the path::

    path NUL kind NUL mode NUL uid NUL gid NUL size NUL content LF

`kind` is ``d`` (folder), ``f`` (file) or ``l`` (link). `mode` is octal, permissions only. `content` is the SHA-256 of a
file or the target of a link, and empty for a folder. LF, NUL and backslash in a path or target are escaped. Times, link
counts and extended attributes are not included, so a tree has the same digest on every host and filesystem.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from etude.environments.images.openat import open_in
from etude.errors import StoreError

_ESCAPES = {"\\": "\\\\", "\0": "\\0", "\n": "\\n"}
_UNESCAPES = {escape[1]: plain for plain, escape in _ESCAPES.items()}


class Owner(NamedTuple):
    """Permission bits, user id and group id of a path, as the processes in the machine see them."""

    mode: int
    uid: int = 0
    gid: int = 0


class Entry(NamedTuple):
    """One path of a root filesystem, relative to the root.

    `kind` is "d" (folder), "f" (file) or "l" (link). `size` is the bytes of a file or of a link's target. `content` is
    the SHA-256 of a file, the target of a link, or "".

    >>> Entry("bin/sh", "l", 0o777, 0, 0, 4, "dash").owner
    Owner(mode=511, uid=0, gid=0)
    """

    path: str  # relative to the root; bytes that are not UTF-8 are surrogates
    kind: str  # "d", "f", "l"
    mode: int
    uid: int
    gid: int
    size: int  # bytes of a file or of a link target; 0 for a folder
    content: str  # SHA-256 of a file, target of a link, "" for a folder

    @property
    def owner(self) -> Owner:
        """Permissions and ids of this entry."""
        return Owner(self.mode, self.uid, self.gid)


def encode(entries: Iterable[Entry]) -> bytes:
    """Encode the files, folders and links of a root filesystem, given in any order, as the file list of an image.

    The same entries always give the same bytes. The root folder has the path "".

    >>> decode(encode([Entry("a", "l", 0o777, 0, 0, 3, "x y")]))
    [Entry(path='a', kind='l', mode=511, uid=0, gid=0, size=3, content='x y')]
    """
    lines = []
    for e in sorted(entries, key=lambda entry: os.fsencode(entry.path)):
        fields = (_escape(e.path), e.kind, f"{e.mode:o}", str(e.uid), str(e.gid), str(e.size), _escape(e.content))
        lines.append(os.fsencode("\0".join(fields) + "\n"))
    return b"".join(lines)


def decode(data: bytes) -> list[Entry]:
    """Decode the file list of an image, the output of `encode`.

    Raises `StoreError` if the bytes are damaged or not what `encode` gives for the decoded entries."""
    entries = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        fields = os.fsdecode(line).split("\0")
        try:
            path, kind, mode, uid, gid, size, content = fields
            entry = Entry(_unescape(path), kind, int(mode, 8), int(uid), int(gid), int(size), _unescape(content))
        except (ValueError, KeyError, IndexError):
            raise _damaged(number) from None
        entries.append(entry)
    if encode(entries) != data:
        raise _damaged(len(entries))
    return entries


def _damaged(line: int) -> StoreError:
    return StoreError("the listing of an image is damaged", f"line {line}", hint="remove the image and build it again")


def digest_of(listing: bytes) -> str:
    """Return the digest of an image, the SHA-256 in hex of its encoded listing."""
    return hashlib.sha256(listing).hexdigest()


def scan(
    root: int, declared: Mapping[str, Owner] | None = None, *, skip: Callable[[str], bool] = lambda path: False
) -> list[Entry]:
    """List everything in the folder with the descriptor `root`, and read every file for its SHA-256.

    `declared` has owners by path that override those on disk, for owners that an unprivileged process could not set
    there. `skip` returns whether to leave out a path and everything below it. Hard links are listed as separate files.
    Raises `StoreError` for devices, pipes and sockets."""
    known = declared if declared is not None else {}
    as_found = os.geteuid() == 0
    hashed: dict[tuple[int, int], str] = {}  # by device and inode, of those with several names
    entries = []
    for path, found, folder, name in walk(root, skip):
        mode = stat.S_IMODE(found.st_mode)
        owner = known.get(path) or (Owner(mode, found.st_uid, found.st_gid) if as_found else Owner(mode))
        size, content = 0, ""
        if stat.S_ISLNK(found.st_mode):
            kind, content, owner = "l", os.readlink(name, dir_fd=folder), owner._replace(mode=0o777)
            size = len(os.fsencode(content))
        elif stat.S_ISREG(found.st_mode):
            kind, size = "f", found.st_size
            key = (found.st_dev, found.st_ino)
            content = hashed.get(key) or _hash_of(folder, name)
            if found.st_nlink > 1:
                hashed[key] = content
        elif stat.S_ISDIR(found.st_mode):
            kind = "d"
        else:
            raise StoreError(f"{path} is a device, a pipe or a socket", hint="images cannot have any: remove it")
        entries.append(Entry(path, kind, *owner, size, content))
    return entries


def walk(root: int, skip: Callable[[str], bool] = lambda path: False) -> Iterator[tuple[str, os.stat_result, int, str]]:
    """Yield a folder and everything below it, as (path, lstat result, descriptor of the parent folder, name).

    `root` is the folder's descriptor. Parents come before their content, and names are sorted. Links are not followed.
    A yielded descriptor is valid until the next step. `skip` tells whether to leave out a path and all below it."""
    yield "", os.fstat(root), root, "."
    pending = [""]
    while pending:
        at = pending.pop()
        fd = open_in(root, at or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, follow=False)
        try:
            below = []
            for name in sorted(os.listdir(fd), key=os.fsencode):
                found = os.lstat(name, dir_fd=fd)
                path = f"{at}/{name}" if at else name
                if skip(path):
                    continue
                yield path, found, fd, name
                if stat.S_ISDIR(found.st_mode):
                    below.append(path)
            pending += reversed(below)
        finally:
            os.close(fd)


def _hash_of(folder: int, name: str) -> str:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(fd, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _escape(text: str) -> str:
    return "".join(_ESCAPES.get(c, c) for c in text)


def _unescape(text: str) -> str:
    return re.sub(r"\\(.?)", lambda found: _UNESCAPES[found[1]], text)
