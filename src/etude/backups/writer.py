"""Writes one backup into a folder of backups: copies, hard links to the backup before, and a journal to go on from.

A backup is written in ``.unfinished``. Each copy is a temporary file that is synced and renamed, then a line of the
journal. At the end the manifest is written and the folder is renamed to the time of the backup. So a kill or a full
disk leaves all finished backups as they were, and the next call goes on with ``.unfinished``. Memory is bounded by the
list of files; data is copied piece by piece."""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import re
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from etude.backups.manifest import (
    FORMAT,
    MANIFEST,
    BackupFile,
    BackupManifest,
    BackupSource,
    encode_manifest,
    read_manifest,
)
from etude.errors import BackupError
from etude.file_checksums import sealed_line, verify_line
from etude.run import take_lock

PIECE = 1 << 20
BUSY_S, POLL_S = 30.0, 0.005
_UNFINISHED, _JOURNAL, _TIME = ".unfinished", "journal.jsonl", "%Y%m%dT%H%M%SZ"
_NAME = re.compile("[0-9]{8}T[0-9]{6}Z")
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.ENOENT, errno.EACCES}


class OriginalChanged(Exception):
    """Raised when a file disappeared or changed while it was copied, since the run continues during the backup. The
    caller copies again."""


class BackupWriter:
    """A backup that is being written into the folder of backups `folder`, which is created if it does not exist.

    A context manager: it locks the folder, and goes on with a backup that was interrupted. `on_file` is called with the
    path of each file the first time that it is in the backup. Raises `BackupError` when another process writes a backup
    there, or the disk is full."""

    def __init__(self, folder: Path, *, on_file: Callable[[str], None] = lambda path: None) -> None:
        self.folder, self.path, self._on_file = folder, folder / _UNFINISHED, on_file
        self.copied_bytes = 0
        self._files: dict[str, BackupFile] = {}
        self._known: dict[str, BackupFile] = {}
        self._lock: int | None = None

    def __enter__(self) -> BackupWriter:
        with self._errors():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock, holder = take_lock(self.folder / ".lock")
            if self._lock is None:
                hint = "wait until it ends; each backup needs the one before it"
                raise BackupError(
                    f"another backup is being written to {self.folder}", f"by process {holder}", hint=hint
                )
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._known = {one.path: one for one in _read_journal(self.path / _JOURNAL)}
            self._journal = (self.path / _JOURNAL).open("ab", buffering=0)
            self._journal.write(b"\n")  # ends a line that a kill has cut
        finished = backups_in(self.folder)
        self._before = finished[-1] if finished else None
        self._links: dict[str, BackupFile] = {}
        if self._before is not None:
            with contextlib.suppress(BackupError):  # a damaged one is not linked to
                self._links = {one.path: one for one in read_manifest(self._before).files if one.fixed}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._journal.close()
        if self._lock is not None:
            os.close(self._lock)

    def __contains__(self, path: str) -> bool:
        return path in self._files

    def file(self, path: str) -> BackupFile:
        """Return the entry (size, SHA-256, ...) of a file that is in the backup. Raises `KeyError` if it is not."""
        return self._files[path]

    def copy(self, original: Path, path: str, *, fixed: bool = False, lines: bool = False) -> BackupFile:
        """Copy a file to `path` in the backup, up to the size that it has at the start. Returns its size and SHA-256.

        `fixed`: the file never changes once it is written. If its size and time are still the same, it is not copied
        again: an earlier copy is kept, or the file of the previous backup is linked. `lines`: leave out what follows
        the last newline. Raises `OriginalChanged`, `BackupError`."""
        with _vanishing():
            found = original.stat()
        if fixed and (kept := self._kept(path, found)) is not None:
            return self._add(kept)
        with _vanishing():
            source = original.open("rb")
        with source:
            size = found.st_size
            if lines:
                with _vanishing():
                    size = _end_of_last_line(original, size)
            with self._written(path, found.st_mode) as (target, _):
                digest = hashlib.sha256()
                left = size
                while left:
                    data = source.read(min(PIECE, left))
                    if not data:
                        raise OriginalChanged(f"{original} is shorter than it was")
                    digest.update(data)
                    target.write(data)
                    left -= len(data)
                now = os.fstat(source.fileno())
                if fixed and (now.st_size, now.st_mtime_ns) != (found.st_size, found.st_mtime_ns):
                    raise OriginalChanged(f"{original} was changed")
        self.copied_bytes += size
        return self._add(_file(path, size, digest.hexdigest(), found, fixed=fixed), new=True)

    def copy_database(
        self, original: Path, path: str, *, at: Callable[[sqlite3.Connection], bool] = lambda snapshot: True
    ) -> BackupFile:
        """Copy an SQLite database as it is at one moment, while others write it.

        `at` is called with a connection to the database as it is at a moment, and returns whether to copy this state.
        If not, a later moment is tried, for at most `BUSY_S` seconds. Raises `OriginalChanged`, `BackupError`."""
        with _vanishing():
            found = original.stat()
        with self._written(path, found.st_mode) as (target, temporary):
            target.close()
            try:
                where = f"{original.absolute().as_uri()}?mode=ro"
                source = sqlite3.connect(where, uri=True, timeout=BUSY_S, isolation_level=None)
                copied = sqlite3.connect(temporary)
                try:
                    _begin(source, at)
                    source.backup(copied)  # of the transaction's snapshot
                    copied.execute("PRAGMA journal_mode=DELETE")  # all of it is in this one file
                finally:
                    source.close()
                    copied.close()
            except sqlite3.Error as error:
                if "full" in str(error) or "disk I/O" in str(error):
                    raise OSError(errno.ENOSPC, str(error), str(temporary)) from None
                hint = "run this as the user that writes the file; if it is damaged, restore it from an earlier backup"
                raise BackupError(f"the database {original} cannot be copied", str(error), hint=hint) from None
            with temporary.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
            size = temporary.stat().st_size
        self.copied_bytes += size
        return self._add(_file(path, size, digest, found, fixed=False), new=True)

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> BackupFile:
        """Write a file with this content. Raises `BackupError`."""
        with self._written(path, mode) as (target, temporary):
            target.write(data)
            now = temporary.stat()
        self.copied_bytes += len(data)
        return self._add(_file(path, len(data), hashlib.sha256(data).hexdigest(), now, fixed=False), new=True)

    def drop(self, path: str) -> None:
        """Remove a file from the list of the backup, because its original was deleted during the backup."""
        self._files.pop(path, None)

    def below(self, folder: str) -> list[str]:
        """Return the paths of the files in a folder of the backup, sorted."""
        return sorted(path for path in self._files if path.startswith(f"{folder}/"))

    def finish(
        self,
        sources: tuple[BackupSource, ...],
        *,
        left_out: tuple[str, ...] = (),
        damaged: tuple[str, ...] = (),
        now: datetime.datetime | None = None,
    ) -> Path:
        """Write the manifest, and give the backup its name, the time `now` in UTC. Returns its folder."""
        now = now or datetime.datetime.now(datetime.UTC)
        manifest = BackupManifest(
            format=FORMAT,
            created=now.isoformat(timespec="seconds"),
            etude=metadata.version("etude"),
            sources=sources,
            left_out=left_out,
            damaged=damaged,
            files=tuple(self._files[path] for path in sorted(self._files)),
        )
        with self._errors():
            self._sweep()
            with self._written(MANIFEST, 0o600) as (target, _):
                target.write(encode_manifest(manifest))
            last = max((one.name for one in backups_in(self.folder)), default="")
            while (name := now.strftime(_TIME)) <= last:  # two within a second, or a clock that went back
                now = max(now, datetime.datetime.strptime(last, _TIME).replace(tzinfo=datetime.UTC))
                now += datetime.timedelta(seconds=1)
            place = self.folder / name
            self.path.rename(place)
            _sync_folder(self.folder)
            (place / _JOURNAL).unlink()
        return place

    def _kept(self, path: str, found: os.stat_result) -> BackupFile | None:
        """The entry of a copy that is there already, or of the backup before, which is linked. None: there is none."""
        known = self._files.get(path) or self._known.get(path)
        if known is not None and _is_same(known, found) and _size(self.path / path) == known.size:
            return known
        linked = self._links.get(path)
        if linked is None or self._before is None or not _is_same(linked, found):
            return None
        place, target = self._before / path, self.path / path
        if _size(place) != linked.size:
            return None
        with self._errors():
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            try:
                os.link(place, target)
            except OSError as error:
                if error.errno in _NO_LINKS:
                    return None
                raise
        return linked

    def _add(self, file: BackupFile, *, new: bool = False) -> BackupFile:
        if new and file.fixed:
            with self._errors():
                self._journal.write(sealed_line(json.dumps(msgspec.to_builtins(file)).encode()) + b"\n")
        first = file.path not in self._files
        self._files[file.path] = file
        if first:
            self._on_file(file.path)
        return file

    @contextlib.contextmanager
    def _written(self, path: str, mode: int) -> Iterator[tuple[BinaryIO, Path]]:
        """A temporary file, synced and renamed to its place at the end. Nothing is left of it after an error."""
        place = self.path / path
        temporary = place.with_name(f".{place.name[:200]}.part")
        with self._errors():
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                temporary.unlink(missing_ok=True)
                with temporary.open("wb") as target:
                    yield target, temporary
                    if not target.closed:
                        target.flush()
                        os.fsync(target.fileno())
                temporary.chmod(stat.S_IMODE(mode))
                temporary.replace(place)
                _sync_folder(place.parent)
            finally:
                for name in (temporary, *(temporary.with_name(temporary.name + end) for end in ("-journal", "-wal"))):
                    name.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Delete what is in the folder and not in the backup: of an interrupted one, or of files that are gone."""
        for where, _, names in os.walk(self.path):
            for name in names:
                path = Path(where, name)
                if path.relative_to(self.path).as_posix() not in self._files and path.name != _JOURNAL:
                    path.unlink()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            hint = "free space, or delete old backups" if full else "check the disk and its permissions"
            facts = f"{error.strerror or error} ({error.filename or self.path})"
            again = f"{hint}; the same command then goes on where it stopped, and finished backups are unchanged"
            raise BackupError(f"the backup in {self.folder} cannot be written", facts, hint=again) from error


def backups_in(folder: Path) -> list[Path]:
    """Return the finished backups in a folder of backups, the oldest first."""
    try:
        names = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return []
    return [path for path in names if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]


def delete_oldest_backups(folder: Path, keep: int) -> list[str]:
    """Delete all finished backups but the newest `keep`, and return the names of those deleted.

    A backup is renamed to a hidden folder before its files are deleted. So a kill in between leaves no folder that
    looks like a complete backup but is not; the next call deletes the rest."""
    gone = [path for path in folder.glob(".*.gone") if path.is_dir()]
    names = []
    for path in backups_in(folder)[:-keep]:
        names.append(path.name)
        hidden = path.with_name(f".{path.name}.gone")
        path.rename(hidden)
        gone.append(hidden)
    for path in gone:
        shutil.rmtree(path)
    return names


def _begin(source: sqlite3.Connection, at: Callable[[sqlite3.Connection], bool]) -> None:
    """Begin a transaction that sees a moment for which `at` is true."""
    end = time.monotonic() + BUSY_S
    while True:
        source.execute("BEGIN")
        source.execute("SELECT count(*) FROM sqlite_master").fetchone()  # the first read takes the snapshot
        if at(source):
            return
        source.execute("ROLLBACK")
        if time.monotonic() > end:
            raise OriginalChanged(f"waited {BUSY_S:g} s for a moment at which the database agrees with the rest")
        time.sleep(POLL_S)


def _file(path: str, size: int, sha256: str, found: os.stat_result, *, fixed: bool) -> BackupFile:
    return BackupFile(
        path=path,
        size=size,
        sha256=sha256,
        mode=stat.S_IMODE(found.st_mode),
        mtime_ns=found.st_mtime_ns,
        original_size=found.st_size,
        fixed=fixed,
    )


def _is_same(known: BackupFile, found: os.stat_result) -> bool:
    return known.fixed and (known.original_size, known.mtime_ns) == (found.st_size, found.st_mtime_ns)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _read_journal(path: Path) -> Iterator[BackupFile]:
    """The lines of a journal that are whole."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        if verify_line(line):
            with contextlib.suppress(msgspec.ValidationError, ValueError):
                yield msgspec.convert({k: v for k, v in json.loads(line).items() if k != "crc"}, BackupFile)


def _end_of_last_line(path: Path, size: int) -> int:
    """The number of bytes up to the last newline within the first `size` bytes of a file."""
    with path.open("rb") as file:
        while size:
            start = max(0, size - PIECE)
            file.seek(start)
            if (at := file.read(size - start).rfind(b"\n")) >= 0:
                return start + at + 1
            size = start
    return 0


@contextlib.contextmanager
def _vanishing() -> Iterator[None]:
    """Raise `OriginalChanged` for an original that was deleted, and `BackupError` for one that cannot be read."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise OriginalChanged(f"{error.filename} was deleted") from None
    except OSError as error:
        hint = "give the user that makes backups access, or check the disk"
        raise BackupError(f"{error.filename} cannot be read", str(error.strerror), hint=hint) from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
