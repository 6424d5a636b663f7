"""Stores finished rollouts as files. Workers write them, graders and the learner read them.

So no rollout is sent between processes. There is one file per rollout and attempt, `g000012.3.0.rollout`: `HEAD`, then
a packed `Rollout`. It is on disk before the ledger records that the rollout has finished. It is read with the size and
SHA-256 from the ledger, so a changed file is an error. Files that the ledger does not need any more are deleted
(`keep_only`): those of abandoned attempts, and of rollouts whose step no restart can go back to. Safe for any number of
readers and writers. This module knows nothing of the ledger. The format is in `docs/formats/run.md`."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import msgspec

from etude.errors import LedgerError, StoreError
from etude.records.rollout import Rollout
from etude.records.summary import RolloutSummary, StoredFile
from etude.records.wire import pack, unpack

SUFFIX = ".rollout"
FORMAT = 2
HEAD = b"etude-rollout %d\n" % FORMAT
"""The first line of a file: its format. Files of format 1 do not have it."""
T = TypeVar("T")


class _Exports(msgspec.Struct, frozen=True):
    exports: dict[str, bytes]


class RolloutFiles:
    """The stored rollouts of a run, in a folder that every process of the run sees.

    `write` returns the size and digest of the file (`StoredFile`); `read` needs the summary that has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, rollout_id: str, attempt: int) -> Path:
        """Return the path of the file with one attempt of a rollout."""
        return self.folder / f"{rollout_id}.{attempt}{SUFFIX}"

    def write(self, rollout: Rollout, *, durable: bool = True) -> StoredFile:
        """Store a rollout atomically, and return the size and digest of its file.

        With `durable` it is synced to disk when this returns. Raises `StoreError` when it cannot be written."""
        data, path = HEAD + pack(rollout), self.path(rollout.rollout_id, rollout.attempt)
        scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            self.folder.mkdir(exist_ok=True)
            with scratch.open("wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            scratch.replace(path)
            if durable:
                folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                scratch.unlink()
            hint = "free disk space, then etude run --resume: nothing is lost"
            raise StoreError(f"{path} cannot be written", os.strerror(error.errno or 0), hint=hint) from error
        return StoredFile(len(data), hashlib.sha256(data).hexdigest())

    def read(self, summary: RolloutSummary) -> Rollout:
        """Read the rollout of a summary. Raises `LedgerError` when its file is missing or changed."""
        return self._read(summary, Rollout)

    def read_exports(self, summary: RolloutSummary) -> dict[str, bytes]:
        """Read the exported files of a rollout: path → content.

        Raises `LedgerError` when its file is missing or changed."""
        return self._read(summary, _Exports).exports

    def _proven(self, summary: RolloutSummary) -> bytes:
        """Read a file. Raises `LedgerError` unless it has the size and digest in the ledger."""
        path, stored = self.path(summary.rollout_id, summary.attempt), summary.stored
        try:
            data = path.read_bytes()
        except OSError as error:
            raise _lost(summary, f"{path}: {os.strerror(error.errno or 0)}") from error
        found = StoredFile(len(data), hashlib.sha256(data).hexdigest())
        if found != stored:
            was = f"{stored.num_bytes} bytes, {stored.sha256[:12]}" if stored else "nothing"
            raise _lost(summary, f"{path} has {found.num_bytes} bytes, {found.sha256[:12]}; stored was {was}")
        return data

    def _read(self, summary: RolloutSummary, kind: type[T]) -> T:
        data, path = self._proven(summary), self.path(summary.rollout_id, summary.attempt)
        if not data.startswith(HEAD):
            raise LedgerError(
                f"the stored rollout {summary.rollout_id} has another format",
                f"{path} does not begin with {HEAD.decode().strip()!r}, as this version of etude writes it",
                hint="continue with the etude version that started the run, or start a new run",
            )
        try:
            return unpack(memoryview(data)[len(HEAD) :], kind)
        except ValueError as error:
            raise _lost(summary, f"{path}: {error}") from error

    def has(self, summary: RolloutSummary) -> bool:
        """Return whether a rollout's file exists with the size and digest in the summary."""
        try:
            self._proven(summary)
        except LedgerError:
            return False
        return True

    def drop(self, summary: RolloutSummary) -> None:
        """Delete a rollout's file, if it exists."""
        self.path(summary.rollout_id, summary.attempt).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return the names of the existing files, sorted.

        Call it before you query which files are needed, so that files that are written in between are not in the list.
        """
        try:
            return sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return []

    def keep_only(self, names: Collection[str], wanted: Collection[tuple[str, int]]) -> int:
        """Delete the files in `names` that are not in `wanted`, and return the number of deleted files.

        `names`: the result of `names()`. `wanted`: (rollout id, attempt) of every file to keep."""
        keep, gone = {f"{rollout_id}.{attempt}{SUFFIX}" for rollout_id, attempt in wanted}, 0
        for name in names:
            if name.partition(SUFFIX)[0] + SUFFIX not in keep:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self.folder}/{name}")
                gone += 1
        return gone


def _lost(summary: RolloutSummary, facts: str) -> LedgerError:
    return LedgerError(
        f"the stored rollout {summary.rollout_id} cannot be read",
        facts,
        hint="copy its file back and continue with etude run --resume",
    )
