"""What writing files durably takes: synced bytes, renames into place, and a disk's refusals in three parts."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etude.errors import StoreError

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
def refused(what: str) -> Iterator[None]:
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
