"""Documents of a local git repository at a commit, read from its objects without a checkout.

Hooks, filters and settings of the repository are not used, and none of its code runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.corpus.documents import MAX_BYTES, Document, Dropped, decoded
from etude.corpus.licences import is_licence_file, licence_of, nearest_licence
from etude.corpus.sources import Divided, in_pieces, is_wanted, no_match
from etude.errors import CorpusError, InputError

DEADLINE_S = 600.0
"""Deadline of one git command: the list of a tree, or the blobs of one piece."""
_QUIET = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C.UTF-8",
}
_SETTINGS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "safe.directory=*")


@dataclass(frozen=True)
class Git(Divided):
    """The text files of a git repository at a commit, in the order of their paths.

    `commit`: an id, a branch or a tag. `files` and `exclude` are patterns of paths; `*` also matches "/". The id of a
    document is "path@blob", so it stays the same in later commits that do not change the file. Links and submodules are
    left out. Raises `InputError` if there is no repository or no such commit, or if no file matches."""

    path: Path
    commit: str = "HEAD"
    files: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if shutil.which("git") is None:
            raise CorpusError("git is not installed", "etude reads repositories with it", hint="install git")
        if not self.path.is_dir():
            raise InputError(f"no repository at {self.path}", hint="give the folder of a git repository")

    def pieces(self) -> list[list[Any]]:
        """Divide the files into pieces that can be read in parallel.

        A piece is a list of [path, blob id, number of bytes, licence]."""
        rows = list(self._tree())
        wanted = [
            (path, blob) for path, blob, size in rows if size < 1 << 20 and is_licence_file(path.rpartition("/")[2])
        ]
        licences: dict[str, str] = {}
        for (path, _), (_, data) in zip(wanted, self._blobs([blob for _, blob in wanted]), strict=True):
            licences[path.rpartition("/")[0]] = licence_of((data or b"")[: 1 << 16].decode("utf-8", "replace"))
        pieces = in_pieces(
            ([path, blob, size, nearest_licence(path, licences)], size)
            for path, blob, size in rows
            if is_wanted(path, self.files, self.exclude)
        )
        return pieces or no_match(f"{self.path} at {self.commit}", self.files, self.exclude)

    def read(self, piece: Any) -> Iterator[Document | Dropped]:
        """Yield the documents of a piece that `pieces` returned."""
        small = [row for row in piece if row[2] <= MAX_BYTES]
        data_of = self._blobs([blob for _, blob, _, _ in small])
        for path, blob, size, licence in piece:
            name = f"{path}@{blob[:12]}"
            if size > MAX_BYTES:
                yield Dropped(name, "too-large")
                continue
            _, data = next(data_of)
            yield Dropped(name, "unreadable") if data is None else decoded(name, data, path=path, licence=licence)

    def _tree(self) -> Iterator[tuple[str, str, int]]:
        commit = self._git("rev-parse", "--verify", "--end-of-options", f"{self.commit}^{{commit}}").decode().strip()
        for row in self._git("ls-tree", "-r", "-l", "-z", "--full-tree", commit).split(b"\0"):
            head, _, path = row.partition(b"\t")
            if head.startswith((b"100644 blob ", b"100755 blob ")):
                _, _, blob, size = head.split()
                with contextlib.suppress(UnicodeDecodeError):
                    yield path.decode(), blob.decode(), int(size) if size != b"-" else 0

    def _argv(self, *arguments: str) -> list[str]:
        settings = [word for setting in _SETTINGS for word in ("-c", setting)]
        return ["git", "-C", str(self.path), *settings, *arguments]

    def _git(self, *arguments: str) -> bytes:
        env = {**os.environ, **_QUIET}
        try:
            done = subprocess.run(
                self._argv(*arguments),
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            facts = f"git {arguments[0]} did not end within {DEADLINE_S:g} s"
            raise CorpusError(f"{self.path} cannot be read", facts, hint="check the disk of the repository") from None
        if done.returncode:
            facts = done.stderr.decode("utf-8", "replace").strip()[:300]
            hint = "give the folder of a git repository, and a commit, branch or tag in it"
            raise InputError(f"no commit {self.commit!r} in {self.path}", facts, hint=hint)
        return done.stdout

    def _blobs(self, blobs: list[str]) -> Iterator[tuple[str, bytes | None]]:
        """Yield (id, content) of each blob, in order; None for one that is missing. One is in memory at a time."""
        if not blobs:
            return
        argv = self._argv("cat-file", "--batch")
        pipe = subprocess.PIPE
        child = subprocess.Popen(argv, env={**os.environ, **_QUIET}, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        timer = threading.Timer(DEADLINE_S, child.kill)
        timer.start()
        try:
            assert child.stdin
            assert child.stdout
            for blob in blobs:
                child.stdin.write(f"{blob}\n".encode())
                child.stdin.flush()
                head = child.stdout.readline().split()
                if len(head) == 2 and head[1] == b"missing":
                    yield blob, None
                    continue
                if len(head) != 3:
                    raise OSError("git cat-file ended")
                data = child.stdout.read(int(head[2]) + 1)[:-1]
                if len(data) != int(head[2]):
                    raise OSError("git cat-file ended")
                yield blob, data if len(data) <= MAX_BYTES else None
        except OSError as error:
            facts, hint = str(error), "check the repository with: git fsck"
            raise CorpusError(f"blobs of {self.path} cannot be read", facts, hint=hint) from None
        finally:
            timer.cancel()
            child.kill()
            for stream in (child.stdin, child.stdout):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()
            child.wait()
