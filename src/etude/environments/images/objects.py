"""What a git repository holds, reachable or not: the proof that an answer is not in it.

All objects are looked at, loose and packed, of alternates too, and so is every other file below `.git`, as it is:
reflogs, packed refs, FETCH_HEAD, a half-written pack. What the objects' names say is not enough: a commit message or
a stash may quote the answer, so contents are searched as well.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from etude.environments.images.git import failed, git, talking
from etude.environments.images.limits import BadSource
from etude.environments.images.listing import walk

_CHUNK_BYTES = 1 << 20
_OBJECT_FILE = re.compile(
    r"objects/(?:[0-9a-f]{2}/[0-9a-f]{38,62}|pack/pack-[0-9a-f]{40,64}\.(?:pack|idx|rev|bitmap|keep|mtimes))"
)


class Finding(NamedTuple):
    """A secret, and where in the repository it is: an object's id, or a path below `.git`."""

    secret: str
    where: str


def objects_of(repository: str | os.PathLike[str], *, tree: str | None = None) -> set[str]:
    """The ids of every object that is there, reachable or not; with `tree`, of that tree and what is below it."""
    at = Path(repository)
    if tree is not None:
        listed = git(at, "rev-list", "--objects", "--no-object-names", tree)
    else:
        listed = git(at, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered")
    return set(listed.decode().split())


def scan_objects(repository: str | os.PathLike[str], secrets: Collection[str | bytes]) -> list[Finding]:
    """Where the secrets are: ids of objects (full, in hex) that are there or are named, and texts that some object or
    file holds. None found is the proof. `BadSource` for a repository that git cannot read."""
    at = Path(repository)
    wanted = {s if isinstance(s, str) else s.decode(errors="replace"): _bytes(s) for s in secrets}
    if any(not secret for secret in wanted.values()):
        raise ValueError("an empty secret is everywhere")
    longest = max(map(len, wanted.values()), default=0)
    found: list[Finding] = []
    for object_id, chunks in _objects(at):
        found += [Finding(secret, object_id) for secret in wanted if secret == object_id]
        found += [Finding(secret, object_id) for secret in _search(chunks, wanted, longest)]
    inside = Path(os.fsdecode(git(at, "rev-parse", "--absolute-git-dir")).rstrip("\n"))
    for path, chunks in _other_files(inside):
        found += [Finding(secret, path) for secret in _search(chunks, wanted, longest)]
    return found


def _bytes(secret: str | bytes) -> bytes:
    return secret.encode() if isinstance(secret, str) else secret


def _search(chunks: Iterator[bytes], wanted: dict[str, bytes], longest: int) -> list[str]:
    left, tail = dict(wanted), b""
    for chunk in chunks:
        text = tail + chunk
        for name in [name for name, secret in left.items() if secret in text]:
            del left[name]
        tail = text[-longest:]
    return [name for name in wanted if name not in left]


def _objects(at: Path) -> Iterator[tuple[str, Iterator[bytes]]]:
    words = ("cat-file", "--batch-all-objects", "--batch", "--unordered")
    with talking(at, *words) as process:
        assert process.stdout is not None
        while line := process.stdout.readline(256):
            object_id, _, size = line.split()
            content = _content(process.stdout, int(size))
            yield object_id.decode(), content
            for _ in content:
                pass
        if process.wait():
            raise failed(at, words, b"not every object can be read")


def _content(source: IO[bytes], size: int) -> Iterator[bytes]:
    left = size + 1
    while left:
        chunk = source.read(min(left, _CHUNK_BYTES))
        if not chunk:
            return
        left -= len(chunk)
        yield chunk


def _other_files(inside: Path) -> Iterator[tuple[str, Iterator[bytes]]]:
    root = os.open(inside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path, found, folder, name in walk(root):
            if not stat.S_ISREG(found.st_mode):
                continue
            if path.startswith("objects/") and not path.startswith("objects/info/"):
                _require_searched(inside, path)
                continue
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            with open(fd, "rb", buffering=0) as file:
                yield path, iter(partial(file.read, _CHUNK_BYTES), b"")
    finally:
        os.close(root)


def _require_searched(inside: Path, path: str) -> None:
    """git reads no pack without an index, and nothing half-written, but whoever works there may."""
    unread = path.endswith(".pack") and not (inside / path).with_suffix(".idx").exists()
    if unread or not _OBJECT_FILE.fullmatch(path):
        raise BadSource(
            f"{path} cannot be searched", "git itself does not read it", hint="delete it, or index the pack"
        )
