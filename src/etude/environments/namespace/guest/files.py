"""Files of a machine's work folder: read, write, and load or save the whole tree. Links are never followed.

`root` is a descriptor of the work folder. A tree is a flat list of fields, three for each entry in order of path:
``path, "d" | "l" | "x" | "f", content`` (folder, symbolic link with its target as content, executable file, file). The
same content gives the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from .syscalls import open_beneath

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_MAX_DEPTH = 100  # of nested folders: a walk keeps all of them open


class PathError(ValueError):
    """Raised for a path that leaves the work folder, goes through a link, is no regular file, or is too large."""


def _open(root: int, path: str, flags: int, mode: int = 0) -> int:
    try:
        return open_beneath(root, path, flags, mode)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.ELOOP):
            raise PathError(f"{path} leaves the work folder or goes through a link") from None
        if error.errno == errno.ENXIO:
            raise PathError(f"{path} is not a regular file") from None
        raise


def _regular(fd: int, path: str) -> os.stat_result:
    found = os.fstat(fd)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, path)
    if not stat.S_ISREG(found.st_mode):
        raise PathError(f"{path} is not a regular file")
    return found


def read(root: int, path: str, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raises `PathError` if it has more than `max_bytes`, `OSError` from the
    kernel."""
    fd = _open(root, path, _READ)
    with open(fd, "rb", buffering=0) as file:
        _regular(fd, path)
        data = file.read(max_bytes + 1) or b""
        while len(data) <= max_bytes and (more := file.read(max_bytes + 1 - len(data))):
            data += more
    if len(data) > max_bytes:
        raise PathError(f"{path} is larger than {max_bytes} bytes")
    return data


def write(root: int, path: str, data: bytes, mode: int = 0o644) -> None:
    """Create or replace the regular file `path` below the folder with the descriptor `root`, and its parent folders.

    `mode` are its permission bits. Raises `PathError`, `OSError`."""
    _make_folders(root, path.rpartition("/")[0])
    fd = _open(root, path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, mode)
    with open(fd, "wb", buffering=0) as file:
        _regular(fd, path)
        os.ftruncate(fd, 0)
        view = memoryview(data)
        try:
            while view:
                view = view[file.write(view) :]
        except OSError:
            os.ftruncate(fd, 0)  # do not leave half a file
            raise


def _make_folders(root: int, path: str) -> None:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    for depth in range(1, len(parts) + 1):
        parent = _open(root, "/".join(parts[: depth - 1]) or ".", _FOLDER)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(parts[depth - 1], 0o755, dir_fd=parent)
        finally:
            os.close(parent)


def load(root: int, fields: list[bytes]) -> None:
    """Write a file tree into an empty work folder. `fields`: path, kind and content of each entry, as `save` returns
    them.

    Links are created last, so nothing is written through one. Raises `PathError`, `OSError`.
    """
    entries = [(os.fsdecode(fields[i]), fields[i + 1], fields[i + 2]) for i in range(0, len(fields), 3)]
    for path, kind, content in entries:
        if kind == b"d":
            _make_folders(root, path)
        elif kind != b"l":
            write(root, path, content, 0o755 if kind == b"x" else 0o644)
    for path, kind, content in entries:
        if kind == b"l":
            folder, _, name = path.rpartition("/")
            _make_folders(root, folder)
            parent = _open(root, folder or ".", _FOLDER)
            try:
                os.symlink(content, name, dir_fd=parent)
            finally:
                os.close(parent)


def save(root: int, max_bytes: int) -> list[bytes]:
    """Return all entries of the work folder as a flat list of triples: path, kind ("d", "l", "x" or "f"), content.

    Entries are in order of path. Sockets, pipes and devices are left out. Raises `PathError` if the files have more
    than `max_bytes`, or folders are nested too deeply.
    """
    try:
        return _saved(root, max_bytes)
    except RecursionError:
        raise PathError("folders are nested too deep") from None


def _saved(root: int, max_bytes: int) -> list[bytes]:
    entries: dict[str, tuple[bytes, bytes]] = {}
    total = 0
    for folder, folders, names, fd in os.fwalk(".", dir_fd=root, follow_symlinks=False, onerror=_unreadable):
        at = folder[2:] + "/" if folder != "." else ""
        if folder.count("/") > _MAX_DEPTH:
            raise PathError(f"folders are nested more than {_MAX_DEPTH} deep")
        if folder != ".":
            entries[folder[2:]] = (b"d", b"")
        for name in [*folders, *names]:
            found = os.lstat(name, dir_fd=fd)
            path = at + name
            if stat.S_ISLNK(found.st_mode):
                entries[path] = (b"l", os.fsencode(os.readlink(name, dir_fd=fd)))
            elif stat.S_ISREG(found.st_mode):
                content = read(fd, name, max_bytes - total)
                total += len(content)
                entries[path] = (b"x" if found.st_mode & 0o100 else b"f", content)
    return [part for path in sorted(entries) for part in (os.fsencode(path), *entries[path])]


def _unreadable(error: OSError) -> None:
    raise error
