"""Read commits, trees and text files of a git repository without a checkout.

Hooks, filters and settings of the repository are not used, and none of its code runs. Raises `NoSource` if there is no
repository, and `TaskError` if git is not installed, fails or hangs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from etude.errors import NoSource, TaskError

DEADLINE_S = 120.0
MAX_BLOB_BYTES = 1 << 20
MAX_PRINTED_BYTES = 64 << 20  # by git log, ls-tree or cat-file --batch-check
MAX_BATCH_BYTES = 64 << 20
MAX_TEXT_BYTES = 1 << 30  # of one tree
MAX_CACHED_BYTES = 1 << 30  # above it the cache is cleared before the next tree
MAX_MERGED = 1_000
_STDERR_BYTES = 2_000
_QUIET = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C.UTF-8",
}
_SETTINGS = (  # override settings with which a repository could run a program
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "log.showSignature=false",
    "safe.directory=*",
)
_FORMAT = "%H%n%P%n%B"  # entries are separated by NUL, which no message contains


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit. `parents` is empty for the first commit, and has at least two ids for a merge."""

    id: str
    parents: tuple[str, ...]
    message: str


class Repository:
    """A git repository on this host: a working directory, a bare repository, or the clone of a bundle.

    Texts of files are cached. Raises `NoSource` if there is none at `path`; all methods raise `TaskError` if git fails.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if shutil.which("git") is None:
            raise TaskError("git is not installed", "etude reads repositories with it", hint="install git")
        if not self.path.is_dir():
            raise NoSource(f"no repository at {self.path}", hint="give the folder of a Git repository")
        self._texts: dict[str, str | None] = {}
        self._cached_bytes = 0
        try:
            inside = self._git("rev-parse", "--show-prefix").decode(errors="replace").strip("\n/")
        except TaskError as error:
            raise NoSource(f"no repository at {self.path}", error.facts, hint=error.hint) from None
        if inside:
            root = str(self.path.absolute()).removesuffix(inside)
            raise NoSource(f"{self.path} is a folder inside a repository", f"{inside} in {root}", hint=f"give {root}")

    def resolve(self, name: str) -> str:
        """Return the full id of the commit that a name or short id stands for."""
        return self._git("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}").decode().strip()

    def commits(self, limit: int, head: str = "HEAD") -> list[Commit]:
        """Return the newest `limit` commits from `head`, newest first.

        Of a merged branch only the merge commit is returned (git's first parents), so no change is in two of them."""
        out = self._git(
            "log", "-z", "--first-parent", f"--max-count={limit}", f"--format={_FORMAT}", self.resolve(head), "--"
        )
        rows = (row.split("\n", 2) for row in out.decode("utf-8", "replace").split("\0") if row)
        return [Commit(id, tuple(parents.split()), message.strip()) for id, parents, message in rows]

    def merged(self, commit: Commit) -> str:
        """Return the messages of the commits that a merge commit merged, oldest first; at most `MAX_MERGED`."""
        outside = [f"^{commit.parents[0]}", *commit.parents[1:]]
        most = f"--max-count={MAX_MERGED}"
        return self._git("log", "--no-merges", "--reverse", most, "--format=%B", *outside, "--").decode(
            "utf-8", "replace"
        )

    def tree(self, commit: str) -> dict[str, str]:
        """Return the id of the blob of every regular file of a commit, by path.

        Links, submodules and paths that are not UTF-8 are left out."""
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
        """Return the text of each file of a tree (path -> blob id), by path.

        Files that are not UTF-8 or larger than 1 MiB are left out."""
        if self._cached_bytes > MAX_CACHED_BYTES:
            self._texts.clear()
            self._cached_bytes = 0
        self._read({blob for blob in tree.values() if blob not in self._texts})
        found = ((path, self._texts[blob]) for path, blob in tree.items())
        return {path: text for path, text in found if text is not None}

    def _read(self, blobs: Iterable[str]) -> None:
        """Read blobs into the cache, in batches. Blobs that are too large are not requested, to bound memory."""
        batch: list[tuple[str, int]] = []
        total = 0
        for blob, size in self._sizes(sorted(blobs)):
            if size > MAX_BLOB_BYTES:
                self._texts[blob] = None
                continue
            if total + size > MAX_BATCH_BYTES:
                self._read_batch(batch)
                batch, total = [], 0
            batch.append((blob, size))
            total += size
        if batch:
            self._read_batch(batch)

    def _sizes(self, blobs: list[str]) -> list[tuple[str, int]]:
        """The existing blobs with their sizes; all other ids are cached as "no text"."""
        out = self._git("cat-file", "--batch-check", stdin=_lines(blobs)).splitlines() if blobs else []
        sizes: list[tuple[str, int]] = []
        for blob, line in zip(blobs, out, strict=True):
            parts = line.split()
            if len(parts) == 3 and parts[1] == b"blob":
                sizes.append((blob, int(parts[2])))
            else:
                self._texts[blob] = None
        self._cached_bytes += sum(size for _, size in sizes if size <= MAX_BLOB_BYTES)
        if self._cached_bytes > MAX_TEXT_BYTES + MAX_CACHED_BYTES:
            facts = f"more than {MAX_TEXT_BYTES >> 20} MiB in files of at most {MAX_BLOB_BYTES >> 20} MiB"
            raise TaskError(f"{self.path} has too much text", facts, hint="make a repository of a part of it")
        return sizes

    def _read_batch(self, batch: list[tuple[str, int]]) -> None:
        limit = sum(size + 256 for _, size in batch)
        out = self._git("cat-file", "--batch", stdin=_lines(blob for blob, _ in batch), limit=limit)
        at = 0
        for blob, size in batch:
            head = out[at : out.find(b"\n", at)]
            if head.split() != [blob.encode(), b"blob", b"%d" % size]:
                facts = f"{blob}: {head[:80].decode(errors='replace')}"
                raise TaskError(f"{self.path} cannot be read", facts, hint="check the repository with `git fsck`")
            at += len(head) + 1
            self._texts[blob] = _text(out[at : at + size])
            at += size + 1

    def _git(self, *args: str, stdin: bytes = b"", limit: int = MAX_PRINTED_BYTES) -> bytes:
        """The output of a git command. It is killed at its deadline, and when it prints more than `limit` bytes, since
        a tree with few objects can list any number of files."""
        settings = [argument for setting in _SETTINGS for argument in ("-c", setting)]
        command = ["git", *settings, "-C", str(self.path), *args]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | _QUIET
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as stderr:
            source.write(stdin)
            source.seek(0)
            process = subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, stderr=stderr, env=environment)
            late = threading.Event()
            timer = threading.Timer(DEADLINE_S, _end, (process, late))
            timer.daemon = True
            timer.start()
            with process:
                assert process.stdout is not None
                try:
                    out = _read(process.stdout, limit)
                    code = process.wait() if len(out) <= limit else 0
                finally:
                    timer.cancel()
                    process.kill()
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _STDERR_BYTES))
            messages = stderr.read().decode(errors="replace").strip().splitlines()
        if late.is_set():
            facts = f"git {args[0]} took more than {DEADLINE_S:g} s"
            raise TaskError(f"{self.path} cannot be read", facts, hint="check the repository with `git fsck`")
        if len(out) > limit:
            facts = f"git {args[0]} prints more than {limit} bytes"
            raise TaskError(f"{self.path} is too large to be read", facts, hint="make a repository of a part of it")
        if code:
            facts = f"git {args[0]}: {messages[-1] if messages else f'exit code {code}'}"
            raise TaskError(f"{self.path} cannot be read", facts, hint="give a Git repository and a commit it has")
        return out


def _end(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


def _read(stream: IO[bytes], limit: int) -> bytes:
    """Read a stream until its end, but at most one byte more than `limit`. Memory grows with the data."""
    parts, left = [], limit + 1
    while left and (part := stream.read(min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _lines(names: Iterable[str]) -> bytes:
    return "".join(f"{name}\n" for name in names).encode()


def _text(data: bytes) -> str | None:
    if len(data) > MAX_BLOB_BYTES or b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
