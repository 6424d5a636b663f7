"""A Git repository, read: its commits, their trees, their texts. Nothing of it is run and no hook, filter or setting
of it is heard; trees are read from the object store, not checked out.

Raises `TaskError` for what is no repository and for a git that is not there, hangs or fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.errors import NoSource, TaskError

DEADLINE_S = 120.0
MAX_BLOB_BYTES = 1 << 20
_QUIET = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C.UTF-8",
}
_SETTINGS = (  # what a repository's own could have a program run by
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "log.showSignature=false",
    "safe.directory=*",
)
_FORMAT = "%H%x00%P%x00%B%x01"


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit; `parents` is empty for a first one and has two or more for a merge."""

    id: str
    parents: tuple[str, ...]
    message: str


class Repository:
    """Reads a repository: a working directory, a bare one, or a bundle's clone. Blobs that were read are kept."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if shutil.which("git") is None:
            raise TaskError("git is not installed", "repositories are read with it", hint="install git")
        if not self.path.is_dir():
            raise NoSource(f"no repository at {self.path}", hint="give a folder that Git knows as a repository")
        self._texts: dict[str, str | None] = {}
        try:
            inside = self._git("rev-parse", "--show-prefix").decode(errors="replace").strip("\n/")
        except TaskError as error:
            raise NoSource(f"no repository at {self.path}", error.facts, hint=error.hint) from None
        if inside:
            root = str(self.path.absolute()).removesuffix(inside)
            raise NoSource(f"{self.path} is a folder of another repository", f"{inside} in {root}", hint=f"give {root}")

    def resolve(self, name: str) -> str:
        """The full id of a commit."""
        return self._git("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}").decode().strip()

    def commits(self, limit: int, head: str = "HEAD") -> list[Commit]:
        """The newest `limit` commits of the main line from `head`, newest first: of what was merged, the merge alone.
        No change is in two of them."""
        out = self._git(
            "log", "--first-parent", f"--max-count={limit}", f"--format={_FORMAT}", self.resolve(head), "--"
        )
        rows = (row.strip("\n").split("\0") for row in out.decode("utf-8", "replace").split("\x01") if row.strip())
        return [Commit(id, tuple(parents.split()), message.strip()) for id, parents, message in rows]

    def merged(self, commit: Commit) -> str:
        """The messages of the commits that a merge brought, oldest first."""
        outside = [f"^{commit.parents[0]}", *commit.parents[1:]]
        return self._git("log", "--no-merges", "--reverse", "--format=%B", *outside, "--").decode("utf-8", "replace")

    def tree(self, commit: str) -> dict[str, str]:
        """path -> id of the blob, of every regular file. Links and submodules are left out, and paths that are no
        UTF-8."""
        files: dict[str, str] = {}
        for row in self._git("ls-tree", "-r", "-z", "--full-tree", self.resolve(commit)).split(b"\0"):
            if row:
                head, _, path = row.partition(b"\t")
                mode, kind, blob = head.split()
                if kind == b"blob" and mode in (b"100644", b"100755"):
                    try:
                        files[path.decode()] = blob.decode()
                    except UnicodeDecodeError:
                        continue
        return files

    def texts(self, tree: Mapping[str, str]) -> dict[str, str]:
        """path -> text of a tree; files that are no UTF-8 text, or larger than a mebibyte, are left out."""
        self._read({blob for blob in tree.values() if blob not in self._texts})
        found = ((path, self._texts[blob]) for path, blob in tree.items())
        return {path: text for path, text in found if text is not None}

    def _read(self, blobs: Iterable[str]) -> None:
        wanted = sorted(blobs)
        if not wanted:
            return
        out = self._git("cat-file", "--batch", stdin="".join(f"{blob}\n" for blob in wanted).encode())
        at = 0
        for blob in wanted:
            head = out[at : out.index(b"\n", at)]
            at += len(head) + 1
            if head.endswith(b" missing"):
                self._texts[blob] = None
                continue
            size = int(head.split()[2])
            self._texts[blob] = _text(out[at : at + size])
            at += size + 1

    def _git(self, *words: str, stdin: bytes = b"") -> bytes:
        settings = [word for one in _SETTINGS for word in ("-c", one)]
        command = ["git", *settings, "-C", str(self.path), *words]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | _QUIET
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, timeout=DEADLINE_S, env=environment, check=False
            )
        except subprocess.TimeoutExpired:
            facts = f"git {words[0]} took more than {DEADLINE_S:g} s"
            raise TaskError(f"{self.path} cannot be read", facts, hint="try `git fsck` on it") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            facts = f"git {words[0]}: {said[-1] if said else f'exit code {done.returncode}'}"
            raise TaskError(f"{self.path} cannot be read", facts, hint="give a Git repository and a commit it has")
        return done.stdout


def _text(data: bytes) -> str | None:
    if len(data) > MAX_BLOB_BYTES or b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
