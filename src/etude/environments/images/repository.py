"""An image with a git repository at one commit, and nothing of what came before or after it.

The repository is made anew: the objects of that commit's tree and one commit of no parent over it; no tags, remotes,
reflogs or unreachable objects, since none are ever copied. Files are written as their blobs are, past all filters.
`scan_objects` is the proof, for this and for any other repository.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from etude.environments.images.directory import copy_folder, open_folder
from etude.environments.images.git import failed, git, printed, talking
from etude.environments.images.limits import BadSource, ImageLimits
from etude.environments.images.listing import Owner
from etude.environments.images.objects import objects_of
from etude.environments.images.records import ImageRecord
from etude.environments.images.store import ImageStore
from etude.environments.images.tree import Tree
from etude.errors import StoreError
from etude.records.image import Image

_CHUNK_BYTES = 1 << 18
_MODES = {b"100644": 0o644, b"100664": 0o644, b"100755": 0o755}
_WHO = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "Developer"), ("EMAIL", "developer@localhost"), ("DATE", "1000000000 +0000"))
}


def build_from_repository(
    store: ImageStore,
    source: str | os.PathLike[str],
    commit: str = "HEAD",
    *,
    parent: str | None = None,
    workdir: str = "/testbed",
) -> ImageRecord:
    """The image `parent` (a name or digest; None: nothing) with a repository's commit in `workdir`. `BadSource` for a
    repository that git cannot read or that holds paths no repository may have."""
    path = Path(source)
    record = None if parent is None else store.get(parent)
    image = Image(digest="") if record is None else record.image
    with store.scratch() as folder, store.building(None if record is None else record.image.digest) as building:
        tree_id = export_commit(path, commit, folder / "work", store.limits)
        below = workdir.strip("/")
        building.tree.clear(below)
        building.tree.folder(below, Owner(0o755))
        with open_folder(folder / "work") as root:
            copy_folder(root, "", building.tree, below)
        return building.keep(
            ImageRecord(
                image=Image(digest="", workdir=workdir, env=image.env, user=image.user),
                source="repository",
                made=(f"tree {tree_id} of {path.name}",),
            )
        )


def export_commit(source: Path, commit: str, to: Path, limits: ImageLimits) -> str:
    """Make the folder `to` a repository of one commit that has the tree of `commit`. Returns that tree's id."""
    git(source, "rev-parse", "--git-dir")
    try:
        told = git(source, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{tree}}")
    except BadSource:  # it says nothing, and the repository is one
        told = b""
    found = told.decode().strip()
    if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", found):
        raise BadSource(f"{source} has no commit {commit[:80]!r}", hint="name a commit, a branch or a tag of it")
    to.mkdir()
    with Tree(to, limits) as tree:
        _write_files(source, found, tree)
    kind = "sha1" if len(found) == 40 else "sha256"
    git(to, "init", "--quiet", "--template=", f"--object-format={kind}", "--initial-branch=main", ".")
    _move_objects(source, found, to, limits)
    made = git(to, "commit-tree", "-m", "Initial commit", found, variables=_WHO).decode().strip()
    git(to, "update-ref", "--no-deref", "--create-reflog", "refs/heads/main", made)
    git(to, "read-tree", found)
    for name in ("logs", "hooks", "info", "description", "branches"):
        _discard(to / ".git" / name)
    unexpected = objects_of(to) - objects_of(source, tree=found) - {made}
    if unexpected:
        raise StoreError(f"{len(unexpected)} foreign objects in a new repository", min(unexpected), hint="report this")
    return found


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _move_objects(source: Path, tree: str, to: Path, limits: ImageLimits) -> None:
    """Copy the objects of a tree as one pack without deltas, so that the same tree gives the same pack."""
    options = ("--window=0", "--threads=1", "--quiet", "--no-reuse-delta", "--no-reuse-object", "--stdout", "--revs")
    pack = to / ".git" / "incoming"
    with open(pack, "xb") as file:
        git(source, "-c", "pack.packSizeLimit=0", "pack-objects", *options, stdin=f"{tree}\n".encode(), stdout=file)
    if pack.stat().st_size > limits.total_bytes:
        raise BadSource(f"{source} is too large", f"a pack of {pack.stat().st_size} bytes", hint="raise ImageLimits")
    with open(pack, "rb") as file:
        git(to, "-c", "pack.writeReverseIndex=false", "index-pack", "--stdin", "--strict", stdin=file)
    pack.unlink()


def _write_files(source: Path, tree_id: str, tree: Tree) -> None:
    """Write every file of a tree as its blob is."""
    listed = printed(source, "ls-tree", "-r", "-z", "--full-tree", tree_id)
    with _blobs(source) as (ask, answer):
        for line in listed.split(b"\0")[:-1]:
            facts, _, name = line.partition(b"\t")
            mode, kind, blob = facts.split(b" ")
            path = os.fsdecode(name)
            if path.split("/")[0].lower() in (".git", "git~1"):
                raise BadSource(f"{source} has a file {path[:80]!r}", hint="no honest repository has: do not use it")
            if kind == b"commit":
                tree.folder(path)  # a submodule: another repository's
                continue
            ask.write(blob + b"\n")
            ask.flush()
            size = _answered(answer, blob)
            content = _content(answer, size)
            if mode == b"120000":
                target = b"".join(content) if size <= tree.budget.limits.path_bytes else b""
                tree.link(path, os.fsdecode(target), Owner(0o777))
            else:
                tree.file(path, Owner(_MODES.get(mode, 0o644)), content)


def _answered(answer: IO[bytes], blob: bytes) -> int:
    words = answer.readline(256).split()
    if len(words) != 3 or words[0] != blob or words[1] != b"blob" or not words[2].isdigit():
        facts = f"git cat-file answered {b' '.join(words).decode(errors='replace')!r}"
        raise BadSource("the source repository is damaged", facts, hint="run git fsck in it")
    return int(words[2])


def _content(answer: IO[bytes], size: int) -> Iterator[bytes]:
    left = size
    while left:
        chunk = answer.read(min(left, _CHUNK_BYTES))
        if not chunk:
            facts = "git ended in the middle of a blob"
            raise BadSource("the source repository is damaged", facts, hint="run git fsck in it")
        left -= len(chunk)
        yield chunk
    answer.read(1)


@contextmanager
def _blobs(source: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    words = ("cat-file", "--batch")
    with talking(source, *words, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdin, process.stdout
        except BrokenPipeError:
            raise failed(source, words, b"it ended early") from None
