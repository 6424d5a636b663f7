"""Keeps a checkpoint directory at a version by changing its safetensors files in place. Safe against a kill at any
point.

Files are changed in place, since a step changes about one weight in a hundred and a directory may have a terabyte. Each
change of version first writes all of its changes to a journal, atomically and synced; then it writes the files, records
the version, and deletes the journal. The journal contains absolute values: opening the directory after a kill writes
them again and completes the new version. A kill before the journal is complete leaves the old version.
`docs/formats/checkpoint_folder.md` describes the files.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import msgspec
import numpy as np

from etude.errors import InputError, StoreError, WeightsError
from etude.file_checksums import SUMS
from etude.records.completion import Version
from etude.weights.chain.undo_record import compare_tensors
from etude.weights.files.checkpoint import (
    INDEX,
    WEIGHTS,
    Checkpoint,
    CheckpointWriter,
    index_of,
    is_checkpoint,
    layout,
    read_checkpoint,
)
from etude.weights.files.disk import store_errors, sync_folder, write_synced
from etude.weights.files.journal import Change, Journal, read_journal, write_journal
from etude.weights.follow.head_tracker import FollowedPointer
from etude.weights.follow.parts import split
from etude.weights.tensors import Tensor, content_digest, tensor_digest

STATE, JOURNAL, LOCK, NEXT = ".etude-version.json", ".etude-journal", ".etude-lock", ".etude-next"
FORMAT = 1
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

After = Callable[[str], None]


class _State(msgspec.Struct, frozen=True):
    format: int
    version: Version
    followed: FollowedPointer | None = None  # None: no pointer was passed


class CheckpointFolder:
    """A checkpoint directory that this process updates to new versions. A lock file prevents that others do so too. Not
    thread-safe.

    An update that was interrupted is completed when the directory is opened. A context manager: the block's end
    releases the lock. Raises `InputError` for a path that is not a directory or contains linked weight files,
    `WeightsError` if another process has the lock, `StoreError` if the disk refuses a write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        taken = next((place for place in (path, *path.parents) if place.exists()), path)
        if taken.exists() and not taken.is_dir():
            facts, hint = "a checkpoint is kept in a directory", "give a directory, or a path that does not exist yet"
            raise InputError(f"{taken} is not a directory", facts, hint=hint)
        with store_errors(f"{path} cannot be kept"):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK, _LOCK_FLAGS, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise WeightsError(
                f"{path} is used by another process",
                "that process has locked it",
                hint=f"stop it: fuser {path / LOCK} names it",
            ) from None
        try:
            self._recover()
            self._state = self._read_state()
            self._held = read_checkpoint(path) if is_checkpoint(path) else None
            self._refuse_links()
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock, so that another process can update the directory."""
        os.close(self._lock)

    @property
    def version(self) -> Version | None:
        """The version in the directory; None before the first `adopt`."""
        return self._state.version if self._state else None

    @property
    def followed(self) -> FollowedPointer | None:
        """The store's pointer (its record of the newest version) that led to the version.

        None if none was passed to `adopt` or `remember`.
        """
        return self._state.followed if self._state else None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of the files by name, as views of the mapped files: the next `adopt` changes their values."""
        return self._held.tensors if self._held else MappingProxyType({})

    def files(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the directory's files that contain the tensors with these names.

        A tensor that is in no file counts as one of the default weights file.
        """
        places = self._held.places if self._held else {}
        return tuple(sorted({places[name][0] if name in places else WEIGHTS for name in names}))

    def adopt(
        self,
        version: Version,
        tensors: Mapping[str, Tensor],
        *,
        followed: FollowedPointer | None = None,
        after: After | None = None,
    ) -> int:
        """Write the tensors of a version to the directory, durably. Return the number of weight bytes written.

        `tensors`: all tensors of the version, already verified; objects of `self.tensors` count as unchanged and are
        not compared. `followed`: the pointer that led to the version; it is stored too. `after` is called with
        "journal", "file ...", "files", "version" and "end", each time when that part is durable. Raises `StoreError`:
        then the directory has the old version, or opening it again completes the new one.
        """
        done = after or (lambda step: None)
        changed, replaced = compare_tensors(self.tensors, tensors)
        if replaced or self.tensors.keys() - tensors.keys() or self._held is None:
            journal, num_bytes = self._lay_out(version, tensors, followed)
        else:
            changes = [_change(self._held, name, *lists, tensors[name]) for name, lists in changed.items()]
            journal = Journal(version, changes, followed=followed)
            num_bytes = sum(change.codes.nbytes for change in changes)
        with store_errors(f"{self.path} cannot be written"):
            write_synced(self.path / JOURNAL, write_journal(journal))
            done("journal")
            self._follow(journal, done)
        self._state = _State(FORMAT, version, followed)
        self._held = read_checkpoint(self.path)
        return num_bytes

    def remember(self, followed: FollowedPointer) -> None:
        """Store the pointer (the store's record of the newest version) that led to the held version, durably.

        Does nothing if it names another version. Raises `StoreError`.
        """
        if self._state is None or self._state.version != followed.version or self._state.followed == followed:
            return
        state = _State(FORMAT, followed.version, followed)
        with store_errors(f"{self.path} cannot be written"):
            write_synced(self.path / STATE, msgspec.json.encode(state))
        self._state = state

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Read all weights and compare their content digest with the version's.

        Raises `WeightsError` with both digests if they differ. `names`: the tensor names in the version's manifest.
        They are needed if parts of tensors were published (`follow.parts`).
        """
        tensors = self.tensors if names is None else split(self.tensors, names)
        found = content_digest({name: tensor_digest(tensor) for name, tensor in tensors.items()})
        if self.version is not None and found != self.version.digest:
            raise WeightsError(
                f"{self.path} does not contain {self.version}",
                f"its files have digest {found[:12]}, the version {self.version.digest[:12]}",
                hint=f"another program changed them: delete {self.path / STATE}, then start the follower again",
            )

    def _lay_out(
        self, version: Version, tensors: Mapping[str, Tensor], followed: FollowedPointer | None
    ) -> tuple[Journal, int]:
        """Write all tensors into new files. Return the journal that moves these into place, and the tensors' size."""
        headers = layout(tensors)
        index = index_of(headers)
        with CheckpointWriter(self.path / NEXT, headers, index) as writer:
            for name, tensor in tensors.items():
                writer.put(name, tensor)
        moves = [*headers, *([INDEX] if index else [])]
        old = [*(self._held.headers if self._held else ()), INDEX]
        removes = [name for name in old if name not in moves and (self.path / name).exists()]
        return Journal(version, [], moves, removes, followed), sum(tensor.num_bytes for tensor in tensors.values())

    def _recover(self) -> None:
        """Complete the change of a complete journal; else remove the files of an incomplete one. May be repeated."""
        with store_errors(f"{self.path} cannot be recovered"):
            if (self.path / NEXT).is_symlink():  # not created by etude: it could lead anywhere
                (self.path / NEXT).unlink()
            if (self.path / JOURNAL).exists():
                try:
                    self._follow(read_journal((self.path / JOURNAL).read_bytes()), lambda step: None)
                except ValueError as error:
                    raise StoreError(
                        f"{self.path / JOURNAL} is damaged",
                        str(error),
                        hint=f"delete it and the weights in {self.path}, then start the follower again",
                    ) from None
            self._drop_next()
            (self.path / (JOURNAL + ".tmp")).unlink(missing_ok=True)

    def _drop_next(self) -> None:
        shutil.rmtree(self.path / NEXT, ignore_errors=True)

    def _refuse_links(self) -> None:
        """Raise `InputError` for linked weight files: writing in place would change files outside of the directory."""
        for name in self._held.headers if self._held else ():
            if (self.path / name).is_symlink():
                raise InputError(
                    f"{self.path / name} is a link",
                    f"what it leads to, {os.path.realpath(self.path / name)}, would be changed in place",
                    hint=f"copy the directory and its links' files: cp -rL {self.path} ELSEWHERE",
                )

    def _follow(self, journal: Journal, done: After) -> None:
        """Carry out a journal, whichever of its writes were done before."""
        if (self.path / SUMS).exists():  # of the checkpoint that this directory was copied from
            (self.path / SUMS).unlink()
            sync_folder(self.path)
        by_file: dict[str, list[Change]] = {}
        for change in journal.changes:
            by_file.setdefault(change.file, []).append(change)
        for file, changes in by_file.items():
            _write_changes(self.path / file, changes)
            done(f"file {file}")
        for name in journal.moves:
            if (self.path / NEXT / name).exists():
                os.replace(self.path / NEXT / name, self.path / name)
        for name in journal.removes:
            (self.path / name).unlink(missing_ok=True)
        sync_folder(self.path)
        done("files")
        write_synced(self.path / STATE, msgspec.json.encode(_State(FORMAT, journal.version, journal.followed)))
        done("version")
        (self.path / JOURNAL).unlink()
        self._drop_next()
        sync_folder(self.path)
        done("end")

    def _read_state(self) -> _State | None:
        try:
            state = msgspec.json.decode((self.path / STATE).read_bytes(), type=_State)
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise StoreError(
                f"{self.path / STATE} is damaged",
                str(error),
                hint="delete it, then start the follower again: it fetches everything",
            ) from None
        if state.format != FORMAT:
            raise WeightsError(
                f"{self.path} has format {state.format}",
                f"this version of etude supports format {FORMAT}",
                hint="update etude on this machine, or delete the folder: the follower fetches everything again",
            )
        return state


def _change(held: Checkpoint, name: str, places: Any, codes: Any, tensor: Tensor) -> Change:
    file, place = held.places[name]
    start = place.start
    if places.nbytes + codes.nbytes >= tensor.num_bytes:
        return Change(file, start, None, tensor.codes)
    return Change(file, start, places, codes)


def _write_changes(path: Path, changes: list[Change]) -> None:
    """Write codes into a mapped file and sync it. Raises `OSError` for a link, `ValueError` if it is too short."""
    with open(path, "r+b", opener=_open_no_link) as file, mmap.mmap(file.fileno(), 0) as memory:
        for change in changes:
            kind, count = change.codes.dtype, change.codes.size
            if change.places is None:
                flat: Any = np.frombuffer(memory, kind, count, change.start)
                flat[:] = change.codes
            else:
                last = int(change.places[-1]) if len(change.places) else -1
                flat = np.frombuffer(memory, kind, last + 1, change.start)
                flat[change.places] = change.codes
            del flat  # the file cannot be closed while a view of it exists
        memory.flush()
        os.fsync(file.fileno())


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
