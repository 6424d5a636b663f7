"""Build an image with a git repository at one commit, without its history and its future.

A new repository is made with the objects of the commit's tree and one root commit. Tags, remotes, reflogs and
unreachable objects are never copied. Files are written from their blobs, without filters. `objects.scan_objects` can
check that a repository does not contain given texts.
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
from etude.environments.images.git import git, git_failed, git_output, run_git
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
    """Build an image that has a git repository with one commit, and its files, in the folder `workdir`.

    `source` is the repository, and `parent` the name or digest of the image to start from (None: an empty one). Raises
    `BadSource` if git cannot read the repository or commit, or if it has paths that git forbids."""
    path = Path(source)
    record = None if parent is None else store.get(parent)
    image = Image(digest="") if record is None else record.image
    with store.scratch() as folder, store.new_image(None if record is None else record.image.digest) as building:
        tree_id = export_commit(path, commit, folder / "work", store.limits)
        below = workdir.strip("/")
        building.tree.clear(below)
        building.tree.folder(below, Owner(0o755))
        with open_folder(folder / "work") as root:
            copy_folder(root, "", building.tree, below)
        return building.commit(
            ImageRecord(
                image=Image(digest="", workdir=workdir, env=image.env, user=image.user),
                source="repository",
                made=(f"tree {tree_id} of {path.name}",),
            )
        )


def export_commit(source: Path, commit: str, to: Path, limits: ImageLimits) -> str:
    """Make a repository in the new folder `to`, with a single commit that has the files of `commit` of `source`.

    Returns the id of the commit's tree. Raises `BadSource` if the commit does not exist or is too large."""
    git(source, "rev-parse", "--git-dir")
    try:
        output = git(source, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{tree}}")
    except BadSource:  # the commit does not exist; the repository was checked above
        output = b""
    found = output.decode().strip()
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
        raise StoreError(
            f"{len(unexpected)} unexpected objects in a new repository",
            min(unexpected),
            hint="this is a defect of etude: report it",
        )
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
        raise BadSource(
            f"{source} is too large",
            f"a pack of {pack.stat().st_size} bytes",
            hint="raise the limits of images (ImageLimits)",
        )
    with open(pack, "rb") as file:
        git(to, "-c", "pack.writeReverseIndex=false", "index-pack", "--stdin", "--strict", stdin=file)
    pack.unlink()


def _write_files(source: Path, tree_id: str, tree: Tree) -> None:
    """Write the files of a tree from their blobs, without filters."""
    listed = git_output(source, "ls-tree", "-r", "-z", "--full-tree", tree_id)
    with _blobs(source) as (requests, responses):
        for line in listed.split(b"\0")[:-1]:
            facts, _, name = line.partition(b"\t")
            mode, kind, blob = facts.split(b" ")
            path = os.fsdecode(name)
            if path.split("/")[0].lower() in (".git", "git~1"):
                raise BadSource(
                    f"{source} has a file {path[:80]!r}",
                    hint="git forbids such paths: the repository may be hostile, do not use it",
                )
            if kind == b"commit":
                tree.folder(path)  # a submodule, which is another repository
                continue
            requests.write(blob + b"\n")
            requests.flush()
            size = _blob_size(responses, blob)
            content = _content(responses, size)
            if mode == b"120000":
                target = b"".join(content) if size <= tree.budget.limits.path_bytes else b""
                tree.link(path, os.fsdecode(target), Owner(0o777))
            else:
                tree.file(path, Owner(_MODES.get(mode, 0o644)), content)


def _blob_size(responses: IO[bytes], blob: bytes) -> int:
    fields = responses.readline(256).split()
    if len(fields) != 3 or fields[0] != blob or fields[1] != b"blob" or not fields[2].isdigit():
        facts = f"git cat-file answered {b' '.join(fields).decode(errors='replace')!r}"
        raise BadSource("the source repository is damaged", facts, hint="run git fsck in it")
    return int(fields[2])


def _content(responses: IO[bytes], size: int) -> Iterator[bytes]:
    left = size
    while left:
        chunk = responses.read(min(left, _CHUNK_BYTES))
        if not chunk:
            facts = "git ended within a blob"
            raise BadSource("the source repository is damaged", facts, hint="run git fsck in it")
        left -= len(chunk)
        yield chunk
    responses.read(1)


@contextmanager
def _blobs(source: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    args = ("cat-file", "--batch")
    with run_git(source, *args, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdin, process.stdout
        except BrokenPipeError:
            raise git_failed(source, args, b"it ended early") from None
