"""What writing files durably takes: synced bytes, renames into place, and a disk's refusals in three parts."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from etude.errors import InputError, StoreError

_HINTS = {
    errno.ENOSPC: "the disk is full: free space and try again",
    errno.EDQUOT: "the disk quota is used up: free space and try again",
    errno.EFBIG: "the process's file size limit (ulimit -f) is too small",
    errno.EACCES: "give the user that runs this write access there",
    errno.ENOENT: "make its directory first",
    errno.ENOTDIR: "a part of the path is a file: name a directory",
    errno.EISDIR: "it is a directory: name a file",
    errno.EROFS: "the filesystem is mounted read-only",
    errno.ELOOP: "a link is there, and what it leads to is not written: put the file itself there (`cp -L`)",
}


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Turn the operating system's no into a `StoreError` that begins with `what`."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "look at the disk and its mount")
        raise StoreError(what, str(error.strerror or error), hint=f"{hint}; nothing half-written counts") from error


def write_synced(path: Path, data: bytes) -> None:
    """Replace a file's content, durably, whole or not at all. Raises `OSError`."""
    beside = path.with_name(path.name + ".tmp")
    try:
        beside.unlink(missing_ok=True)  # if it is a link, what it leads to is not ours
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names that were added, renamed or removed durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def check_output(out: Path, inputs: Sequence[Path]) -> None:
    """Raises `InputError` for an output that is an input or lies in one, or whose directory is not there."""
    if not out.parent.is_dir():
        raise InputError(f"no directory {out.parent}", f"{out} would be in it", hint="make it first, or name another")
    for given in inputs:
        if out.resolve() == given.resolve():
            raise InputError(f"{out} is an input", "which stays as it is", hint="name a file elsewhere")
        if given.is_dir() and out.resolve().is_relative_to(given.resolve()):
            raise InputError(f"{out} lies in {given}", "an input stays as it is", hint=f"name {out.name} elsewhere")


def check_file(out: Path, inputs: Sequence[Path], magic: bytes, kind: str) -> None:
    """The same for a file that may replace an earlier one of its `kind`: one that begins with `magic`, or is empty.

    Raises `InputError` for anything else that is there already.
    """
    if out.is_dir():
        raise InputError(f"{out} is a directory", f"a {kind} is one file", hint="name a file that is not there yet")
    check_output(out, inputs)
    if not out.exists():
        return
    if not out.is_file():
        raise InputError(f"{out} is no regular file", f"a {kind} is one", hint="name a file that is not there yet")
    try:
        with out.open("rb") as file:
            found = file.read(len(magic))
    except OSError as error:
        raise InputError(f"{out} cannot be read", str(error.strerror), hint="name another file") from None
    if found not in (b"", magic):
        raise InputError(
            f"{out} exists, and is no {kind}", "only such a file is replaced", hint="name a file that is not there yet"
        )
