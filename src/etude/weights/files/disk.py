"""Durable file writes, checks of output paths, and operating system errors as `StoreError`."""

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
    errno.EACCES: "give this user write access to it",
    errno.ENOENT: "create its directory first",
    errno.ENOTDIR: "a part of the path is a file: name a directory",
    errno.EISDIR: "it is a directory: name a file",
    errno.EROFS: "the filesystem is mounted read-only",
    errno.ELOOP: "it is a link, which is not followed: replace it by the file itself (`cp -L`)",
}


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Convert an `OSError` in the block to a `StoreError` with the message `what` and a hint."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "check the disk and its mount")
        raise StoreError(what, str(error.strerror or error), hint=f"{hint}; no partly written file is used") from error


def write_synced(path: Path, data: bytes) -> None:
    """Replace a file's content atomically and durably. Raises `OSError`."""
    beside = path.with_name(path.name + ".tmp")
    try:
        beside.unlink(missing_ok=True)  # if it is a link, its target must not be changed
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
    """Sync a directory to disk, so that added, renamed and removed names are durable. Raises `OSError`."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def check_output(out: Path, inputs: Sequence[Path]) -> None:
    """Check an output path before the work starts.

    Raises `InputError` if it is one of the inputs or inside one, or if its directory does not exist.
    """
    if not out.parent.is_dir():
        raise InputError(f"no directory {out.parent}", f"{out} would be in it", hint="create it first, or name another")
    for given in inputs:
        if out.resolve() == given.resolve():
            facts = "inputs are never changed"
            raise InputError(f"the output {out} is also an input", facts, hint="give another output path")
        if given.is_dir() and out.resolve().is_relative_to(given.resolve()):
            raise InputError(
                f"the output {out} is inside the input {given}",
                "inputs are never changed",
                hint=f"give an output path outside of {given}",
            )


def check_file(out: Path, inputs: Sequence[Path], magic: bytes, kind: str) -> None:
    """Check the path of an output file before the work starts.

    An existing file may be replaced if it is of the same kind: it begins with `magic`, or is empty. Raises `InputError`
    for any other existing file, and in the cases of `check_output`. `kind`: the kind of the file, for errors.
    """
    if out.is_dir():
        raise InputError(f"{out} is a directory", f"a {kind} is one file", hint="name a file that is not there yet")
    check_output(out, inputs)
    if not out.exists():
        return
    if not out.is_file():
        raise InputError(
            f"{out} is not a regular file", f"a {kind} must be a regular file", hint="name a file that is not there yet"
        )
    try:
        with out.open("rb") as file:
            found = file.read(len(magic))
    except OSError as error:
        raise InputError(f"{out} cannot be read", str(error.strerror), hint="name another file") from None
    if found not in (b"", magic):
        raise InputError(
            f"{out} exists, and is not a {kind}",
            "other files are not overwritten",
            hint="name a file that is not there yet",
        )
