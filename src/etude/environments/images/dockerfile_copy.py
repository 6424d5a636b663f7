"""The instructions COPY, ADD and WORKDIR of a Dockerfile.

Sources are below the build context or the root of an image. Links are resolved with that folder as root, so they never
lead out of it. User names are looked up in the image's `/etc/passwd` and `/etc/group`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from etude.environments.images import listing
from etude.environments.images.decompression import decompressed
from etude.environments.images.directory import copy_folder, root_owned
from etude.environments.images.dockerfile import Instruction
from etude.environments.images.layers import apply_layer
from etude.environments.images.limits import BadSource
from etude.environments.images.listing import Owner
from etude.environments.images.openat import open_in
from etude.environments.images.store import ImageStore
from etude.environments.images.tree import Tree, normalize_path

_MAX_USERS_BYTES = 1 << 20  # of /etc/passwd
OwnerOf = Callable[[os.stat_result], Owner]


class CopyStep(NamedTuple):
    """A build step that changes files, not yet applied.

    `facts` is everything that its result depends on, for the key of the build cache. `to` is the path that it writes.
    `apply` applies it to a tree."""

    facts: tuple[object, ...]
    to: str
    apply: Callable[[Tree], None]


@dataclass(frozen=True)
class CopySources:
    """The sources of COPY and ADD: the build context, or images of `store`.

    `context` is the descriptor of the context's folder; paths for which `skip` is true are left out."""

    store: ImageStore
    context: int
    skip: Callable[[str], bool]

    def folder(self, at: Instruction, path: str) -> CopyStep:
        """Return the step of the WORKDIR instruction `at`: make the folder `path` if it does not exist."""
        return CopyStep((at.name, path), path, lambda tree: _require_folder(tree, path))

    def copies(self, at: Instruction, names: list[str], to: str, *, into: bool, digest: str | None) -> CopyStep:
        """Return the step of the COPY or ADD instruction `at`: copy the sources `names` and its here-documents to `to`.

        `into` says that the destination is a folder, as it ends with a slash. `digest` names the image to copy from;
        None: the build context. Raises `BadSource` if a source does not exist."""
        if any(re.match("[a-z]+://|git@", name) for name in names):
            raise at.error(f"{at.name} of a URL", "download it first: a build reads only files of this host")
        with self._root(digest) as root:
            skip = self.skip if digest is None else _never
            found = [path for name in names for path in _matching(root, name, at, skip)]
            count = len(found) + len(at.documents)
            if count > 1 and not into:
                raise at.error(f"{at.name} of {count} sources to a file", "end the destination with a slash")
            facts = [self._content(root, path, skip) for path in found]
        mode = _mode(at)

        def apply(tree: Tree) -> None:
            uid, gid = _owner(at, tree)

            def owner_of(found: os.stat_result) -> Owner:
                return Owner(root_owned(found).mode if mode is None else mode, uid, gid)

            with self._root(digest) as root:
                for path in found:
                    _copy(root, path, tree, to, into, skip, owner_of, unpack=at.name == "ADD")
            for document in at.documents:
                inside = into or tree.is_folder(to)
                owner = Owner(0o644 if mode is None else mode, uid, gid)
                tree.file(f"{to}/{document.name}" if inside else to, owner, (os.fsencode(document.text),))

        return CopyStep((at.name, facts, at.documents, to, into, sorted(at.flags.items()), digest), to, apply)

    @contextmanager
    def _root(self, digest: str | None) -> Iterator[int]:
        if digest is None:
            yield self.context
        else:
            with self.store.open_root(digest) as root:
                yield root

    def _content(self, root: int, path: str, skip: Callable[[str], bool]) -> tuple[str, str]:
        fd = open_in(root, path or ".", os.O_RDONLY | os.O_NONBLOCK)
        try:
            found = os.fstat(fd)
            if stat.S_ISDIR(found.st_mode):
                entries = listing.scan(fd, skip=lambda below: skip(f"{path}/{below}" if path else below))
                return os.path.basename(path), listing.digest_of(listing.encode(entries))
            if not stat.S_ISREG(found.st_mode):
                raise BadSource(f"{path} is a device, a pipe or a socket", hint="images cannot have any: leave it out")
            with open(fd, "rb", buffering=0, closefd=False) as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            return os.path.basename(path), f"{found.st_mode:o} {content}"
        finally:
            os.close(fd)


def _matching(root: int, name: str, at: Instruction, skip: Callable[[str], bool]) -> list[str]:
    """Return the paths of a source. Its last part can be a pattern, which never matches ignored files."""
    path = os.path.normpath(f"/{name}").lstrip("/")
    folder, _, last = path.rpartition("/")
    try:
        if not re.search(r"[*?\[]", last):
            fd = open_in(root, path or ".", os.O_PATH)
            is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
            os.close(fd)
            if not is_folder and skip(path):
                raise at.error(f"{path} is left out by .dockerignore", "change .dockerignore, or do not copy it")
            return [path]
        fd = open_in(root, folder or ".", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        raise at.error(
            f"{name[:80]} does not exist", "sources are relative to the build context, or to the image"
        ) from None
    try:
        names = sorted(fnmatch.filter(os.listdir(fd), last))
    finally:
        os.close(fd)
    found = [path for each in names if not skip(path := f"{folder}/{each}" if folder else each)]
    if not found:
        raise at.error(f"nothing matches {name[:80]}", "sources are relative to the build context, or to the image")
    return found


def _copy(
    root: int,
    path: str,
    tree: Tree,
    to: str,
    into: bool,
    skip: Callable[[str], bool],
    owner_of: OwnerOf,
    *,
    unpack: bool,
) -> None:
    fd = open_in(root, path or ".", os.O_RDONLY | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            target = normalize_path(to, tree.budget.limits)
            _require_folder(tree, target)
            copy_folder(
                fd, "", tree, target, skip=lambda below: skip(f"{path}/{below}" if path else below), owner=owner_of
            )
        elif unpack and _is_archive(fd):
            _require_folder(tree, to)
            with open(fd, "rb", closefd=False) as file:
                apply_layer(decompressed(file, tree.budget.limits), tree, below=to, whiteouts=False)
        else:
            inside = into or tree.is_folder(to)
            tree.copy(f"{to}/{os.path.basename(path)}" if inside else to, owner_of(found), fd)
    finally:
        os.close(fd)


def _require_folder(tree: Tree, path: str) -> None:
    if normalize_path(path, tree.budget.limits) and not tree.is_folder(path):
        tree.folder(path)


def _is_archive(fd: int) -> bool:
    """Whether ADD unpacks a file. True also for formats that Docker supports and `decompressed` refuses with an
    error."""
    head = os.pread(fd, 512, 0)
    return head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ\0")) or head[257:262] == b"ustar"


def _mode(at: Instruction) -> int | None:
    """The permissions from --chmod; None: those of the source."""
    mode = at.flags.get("chmod")
    if mode is not None and not re.fullmatch("0?[0-7]{3}", mode):
        raise at.error(f"--chmod={mode[:40]}", "write three octal digits such as 755")
    return None if mode is None else int(mode, 8)


def _owner(at: Instruction, tree: Tree) -> tuple[int, int]:
    """The user and group id from --chown: numbers, or names that the image has at this step. Default: root."""
    user, _, group = at.flags.get("chown", "0:0").partition(":")
    uid = _number(user, tree, "etc/passwd", at)
    return uid, _number(group, tree, "etc/group", at) if group else uid


def _number(name: str, tree: Tree, path: str, at: Instruction) -> int:
    if re.fullmatch("[0-9]{1,9}", name):
        return int(name)
    if name == "root":
        return 0
    try:
        with open(open_in(tree.root, path, os.O_RDONLY | os.O_NONBLOCK), errors="replace") as file:
            lines = [line.split(":") for line in file.read(_MAX_USERS_BYTES).splitlines()]
    except OSError:
        lines = []
    for fields in lines:
        if len(fields) > 2 and fields[0] == name and re.fullmatch("[0-9]{1,9}", fields[2]):
            return int(fields[2])
    hint = f"/{path} of the image has no {name[:40]!r}: create it with RUN, or use numbers such as 1000:1000"
    raise at.error(f"--chown={at.flags['chown'][:40]}", hint)


def _never(path: str) -> bool:
    return False
