"""Read and write the text files of tasks, with size limits.

Symbolic links are refused, because a task may come from an untrusted place and a link could lead to any file of this
host. Errors are `TaskError`.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from etude.errors import NoSource, TaskError
from etude.records.exports import is_plain

MAX_FILES = 5_000
MAX_FILE_BYTES = 1 << 20


def read_tree(root: Path, owner: Path | str, *, may_be_empty: bool = False) -> dict[str, str]:
    """Read all files below `root`; return their texts by relative POSIX path.

    `owner` is the folder that errors name. Raises `TaskError` for links, for large files, for text that is not UTF-8,
    and for a folder without files unless `may_be_empty`."""
    if not root.is_dir() or root.is_symlink():
        raise TaskError(f"{owner} has no {root.name}/", hint=f"put at least one file into {root}")
    texts: dict[str, str] = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            raise _linked(path)
        if path.is_dir():
            continue
        if len(texts) >= MAX_FILES:
            raise TaskError(f"{root} has more than {MAX_FILES} files", hint="give the task a smaller tree")
        texts[path.relative_to(root).as_posix()] = read_text(path)
    if not texts and not may_be_empty:
        raise TaskError(f"{root} is empty", hint="put at least one file into it")
    return texts


def read_text(path: Path) -> str:
    """Read a UTF-8 file without changing line ends. Raises `TaskError`, also for a link or a folder."""
    try:
        with open(path, "rb", opener=open_no_link) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise TaskError(f"{path} is not a file", hint="a task's files are UTF-8 text")
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise TaskError(f"{path} is larger than {MAX_FILE_BYTES} bytes", hint="give the task smaller files")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            raise _linked(path) from None
        raise TaskError(f"cannot read {path}", str(error), hint="a task's files are UTF-8 text") from None


def read_lines(path: Path, what: str, *, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield (location, line) for each line of a file that is not blank. The file may be gzipped.

    A location is "PATH, line 3", for errors. `what` names the content in hints. Raises `NoSource` if the file does not
    exist, and `TaskError` if it is unreadable or has more than `max_bytes` uncompressed."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            data: bytes = file.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        kind = NoSource if isinstance(error, FileNotFoundError) else TaskError
        raise kind(f"cannot read {path}", str(error), hint=f"give {what} as .jsonl or .jsonl.gz") from None
    if len(data) > max_bytes:
        raise TaskError(f"{path} unpacks to more than {max_bytes >> 20} MiB", hint="split it into several files")
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", line


def write_tree(root: Path, files: Mapping[str, str]) -> None:
    """Write files (path -> text) below `root`, which is created if it does not exist.

    Raises `ValueError` for a path that is not plain and relative, and `TaskError` for a link on the way."""
    root.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        if not is_plain(path):
            raise ValueError(f"{path!r} is not a plain relative path")
        try:
            _write(root, path, text.encode("utf-8", "surrogatepass"))
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise TaskError(f"cannot write {root / path}", str(error), hint="write into a new folder") from None


def refuse_link(path: Path) -> None:
    """Raise `TaskError` if the path is a symbolic link."""
    if path.is_symlink():
        raise _linked(path)


def open_no_link(path: str, flags: int) -> int:
    """Open a file as `os.open` does, but refuse links and do not block on a named pipe. An `opener` for `open`."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _linked(path: Path) -> TaskError:
    return TaskError(f"{path} is a link", hint="copy the file into the task")


def _write(root: Path, path: str, data: bytes) -> None:
    """Write a file below a folder without following links. Raises `OSError`."""
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
