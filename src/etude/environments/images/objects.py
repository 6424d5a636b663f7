"""Search all objects of a git repository, to show that it does not contain an answer.

Searched are all objects, loose, packed and from alternates, reachable or not, and every other file below `.git`:
reflogs, packed refs, FETCH_HEAD, half-written packs. Comparing object ids is not enough, since a commit message or a
stash can quote the answer. So contents are searched, too.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from etude.environments.images.git import git, git_failed, run_git
from etude.environments.images.limits import BadSource
from etude.environments.images.listing import walk

_CHUNK_BYTES = 1 << 20
_OBJECT_FILE = re.compile(
    r"objects/(?:[0-9a-f]{2}/[0-9a-f]{38,62}|pack/pack-[0-9a-f]{40,64}\.(?:pack|idx|rev|bitmap|keep|mtimes))"
)


class Finding(NamedTuple):
    """A secret that was found, and where: an object id, or a path below `.git`."""

    secret: str
    where: str


def objects_of(repository: str | os.PathLike[str], *, tree: str | None = None) -> set[str]:
    """Return the ids of all objects of a repository, reachable or not; with `tree`, only of that tree."""
    at = Path(repository)
    if tree is not None:
        listed = git(at, "rev-list", "--objects", "--no-object-names", tree)
    else:
        listed = git(at, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered")
    return set(listed.decode().split())


def scan_objects(repository: str | os.PathLike[str], secrets: Collection[str | bytes]) -> list[Finding]:
    """Search every object and every file below `.git` of a repository for secrets.

    A secret is a text, or a full object id in hex. Returns where secrets were found; an empty list proves that none is
    there. Raises `BadSource` if the repository cannot be read, `ValueError` for an empty secret."""
    at = Path(repository)
    wanted = {s if isinstance(s, str) else s.decode(errors="replace"): _bytes(s) for s in secrets}
    if any(not secret for secret in wanted.values()):
        raise ValueError("a secret must not be empty")
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
    args = ("cat-file", "--batch-all-objects", "--batch", "--unordered")
    with run_git(at, *args) as process:
        assert process.stdout is not None
        while line := process.stdout.readline(256):
            object_id, _, size = line.split()
            content = _content(process.stdout, int(size))
            yield object_id.decode(), content
            for _ in content:
                pass
        if process.wait():
            raise git_failed(at, args, b"an object cannot be read")


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
    """Raise `BadSource` for a file that git does not read, but an agent could: a pack without an index, or
    half-written."""
    unread = path.endswith(".pack") and not (inside / path).with_suffix(".idx").exists()
    if unread or not _OBJECT_FILE.fullmatch(path):
        raise BadSource(f"{path} cannot be searched", "git does not read it", hint="delete it, or index the pack")
