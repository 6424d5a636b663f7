"""Trees of text files: read from a folder, written to one, with bounds. Links are refused: a tree holds what it holds.

Knows nothing of tasks; errors are `TaskError`, since a task is what a tree is read for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from etude.errors import TaskError
from etude.records.exports import is_plain

MAX_FILES = 5_000
MAX_FILE_BYTES = 1 << 20


def read_tree(root: Path, owner: Path | str, *, may_be_empty: bool = False) -> dict[str, str]:
    """All files under a root: relative posix path -> text. Raises `TaskError`, in which `owner` has the folder."""
    if not root.is_dir() or root.is_symlink():
        raise TaskError(f"{owner} has no {root.name}/", hint=f"put at least one file into {root}")
    texts: dict[str, str] = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            raise _linked(path)
        if path.is_dir():
            continue
        if len(texts) >= MAX_FILES:
            raise TaskError(f"{root} holds more than {MAX_FILES} files", hint="give the task a smaller tree")
        texts[path.relative_to(root).as_posix()] = read_text(path)
    if not texts and not may_be_empty:
        raise TaskError(f"{root} is empty", hint="put at least one file into it")
    return texts


def read_text(path: Path) -> str:
    """A file's text; line ends stay what they are. Raises `TaskError`, also for a link and what is no file."""
    try:
        with open(path, "rb", opener=open_no_link) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise TaskError(f"{path} is no file", hint="a task's files are UTF-8 text")
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise TaskError(f"{path} is larger than {MAX_FILE_BYTES} bytes", hint="give the task smaller files")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            raise _linked(path) from None
        raise TaskError(f"cannot read {path}", str(error), hint="a task's files are UTF-8 text") from None


def write_tree(root: Path, files: Mapping[str, str]) -> None:
    """Write files below a root, which is made. `ValueError` for a path that is not `is_plain`, `TaskError` where the
    root is a link or has one on the way: it could lead anywhere."""
    root.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        if not is_plain(path):
            raise ValueError(f"{path!r} is no plain path inside a tree")
        try:
            _write(root, path, text.encode("utf-8", "surrogatepass"))
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise TaskError(f"cannot write {root / path}", str(error), hint="write into a new folder") from None


def refuse_link(path: Path) -> None:
    """Raise `TaskError` for a link: a task comes from elsewhere, and a link could lead to any file of this host."""
    if path.is_symlink():
        raise _linked(path)


def open_no_link(path: str, flags: int) -> int:
    """An `opener` for `open` that follows no link and waits for no other end of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _linked(path: Path) -> TaskError:
    return TaskError(f"{path} is a link", hint="copy the file into the task")


def _write(root: Path, path: str, data: bytes) -> None:
    """Write a file below a folder without following a link. `OSError` as the kernel says."""
    *folders, name = path.split("/")
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for folder in folders:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, dir_fd=at)
            below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o666, dir_fd=at), "wb") as file:
            file.write(data)
    finally:
        os.close(at)
