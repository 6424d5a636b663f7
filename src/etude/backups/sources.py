"""What a backup may contain besides a run: a store of weights, a privacy folder, any folder, a database, a file."""

from __future__ import annotations

import enum
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from etude.backups.writer import BUSY_S, BackupWriter, OriginalChanged
from etude.errors import InputError

POINTERS = ("pointers", "branches")
"""Top folders of a store whose keys change. All other keys are written once."""
_SQLITE = b"SQLite format 3\0"
_BESIDE = ("-wal", "-shm", "-journal")
_KEYS = "keys"


class Kind(enum.StrEnum):
    """What a source of a backup is, as `kind_of` recognises it by its files."""

    RUN = "run"
    PRIVACY = "privacy"
    STORE = "store"
    FOLDER = "folder"
    DATABASE = "database"
    FILE = "file"


def kind_of(path: Path) -> Kind:
    """Recognise a source. Raises `InputError` if it does not exist."""
    if path.is_dir():
        if (path / "run.json").is_file():
            return Kind.RUN
        if (path / "consent.sqlite").is_file():
            return Kind.PRIVACY
        if (path / "manifests").is_dir() and (path / "objects").is_dir():
            return Kind.STORE
        return Kind.FOLDER
    if not path.is_file():
        hint = "give a run, a folder or a file; a bucket keeps its own versions, see docs/guides/operations.md"
        raise InputError(f"there is nothing at {path}", hint=hint)
    return Kind.DATABASE if is_database(path) else Kind.FILE


def is_database(path: Path) -> bool:
    """Return whether a file is an SQLite database."""
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except FileNotFoundError:
        return False


def files_below(folder: Path, *, hidden: bool = False) -> Iterator[str]:
    """Yield the paths of all regular files below a folder, relative to it, in sorted order. Links are followed.

    The files that SQLite keeps beside a database are left out. Unless `hidden`, so are temporary files, whose names
    begin with a dot or end with ".tmp"."""
    seen = set[tuple[int, int]]()
    for where, folders, names in os.walk(folder, followlinks=True):
        status = os.stat(where)
        if (status.st_dev, status.st_ino) in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if hidden or not name.startswith("."))
        for name in sorted(names):
            path = Path(where, name)
            beside = any(name.endswith(end) and is_database(path.with_name(name.removesuffix(end))) for end in _BESIDE)
            temporary = not hidden and (name.startswith(".") or name.endswith(".tmp"))
            if not temporary and not beside and path.is_file():
                yield path.relative_to(folder).as_posix()


def copy_any(writer: BackupWriter, original: Path, path: str) -> None:
    """Copy a file: a database as it is at one moment, of any other file the bytes that it has at the start of the copy.

    Raises `OriginalChanged`."""
    if is_database(original):
        writer.copy_database(original, path)
    else:
        writer.copy(original, path)


def copy_folder(writer: BackupWriter, folder: Path, name: str, *, with_keys: bool) -> list[str]:
    """Copy all files of a folder, without folders of keys of captured records and signals unless `with_keys`. Files
    that are deleted meanwhile are left out. Returns what must be known of it when it is restored."""
    paths = list(files_below(folder, hidden=True))
    keys = {str(Path(path).parent) for path in paths if not with_keys and _is_secret(path)}
    for path in paths:
        if any(str(parent) in keys for parent in Path(path).parents):
            continue
        try:
            copy_any(writer, folder / path, f"{name}/{path}")
        except OriginalChanged:
            writer.drop(f"{name}/{path}")
    return [
        f"{name}: without the keys in {folder.absolute() / one}; put them in their place after a restore"
        for one in sorted(keys)
    ]


def _is_secret(path: str) -> bool:
    """Return whether a path is that of the secret of a folder of keys."""
    *_, folder, file = ("", *Path(path).parts)
    return file == "secret" and (folder == _KEYS or folder.endswith(f".{_KEYS}"))


def copy_privacy(writer: BackupWriter, folder: Path, name: str, *, with_keys: bool) -> list[str]:
    """Copy a privacy folder, without its keys unless `with_keys`. Returns what must be known of it when it is restored.

    Consent is copied after the records, so that no record has a level that was withdrawn before it was copied."""
    for path in sorted(files_below(folder), key=lambda path: path == "consent.sqlite"):
        if with_keys or path.partition("/")[0] != _KEYS:
            copy_any(writer, folder / path, f"{name}/{path}")
    if with_keys:
        return [f"{name}: subjects that were erased later must be erased again, since the backup has their keys"]
    return [
        f"{name}: without its keys; put {folder.absolute() / _KEYS} in its place after a restore, and set again the"
        " levels of consent that were changed since the backup"
    ]


def keys_of_signals(path: Path) -> Path | None:
    """Return the folder with the secret of a file of signals (`etude.signals`), which is beside the file, or beside
    what the file links to; None for any other file."""
    folders = [one.with_name(f"{one.name}.keys") for one in (path, path.resolve())]
    return next((folder for folder in folders if (folder / "secret").is_file()), None)


def read_pointers(folder: Path) -> dict[str, bytes]:
    """Read all pointers of a store of weights in a directory, by key. Raises `OriginalChanged`."""
    tops = [folder / top for top in POINTERS if (folder / top).is_dir()]
    return {f"{top.name}/{key}": _read(top / key) for top in tops for key in files_below(top)}


def copy_store(writer: BackupWriter, folder: Path, name: str, pointers: dict[str, bytes] | None = None) -> list[str]:
    """Copy a store of weights in a directory. Returns a sentence for each object whose SHA-256 is not that in its name.

    `pointers`: what `read_pointers` returned; None: they are read now. The objects are copied after the pointers were
    read, so all that the pointers name is in the copy. Raises `OriginalChanged` when a garbage collection deleted an
    object during the copy."""
    pointers = read_pointers(folder) if pointers is None else pointers
    damaged = []
    for key in files_below(folder):  # listed after the pointers were read
        if _is_pointer(key):
            continue
        copied = writer.copy(folder / key, f"{name}/{key}", fixed=True)
        told = key.rpartition("/")[2].partition("-")[0]
        if key.startswith("objects/") and len(told) == 64 and told != copied.sha256:
            damaged.append(f"{name}/{key}: its SHA-256 is {copied.sha256[:12]}, not that of its name")
    for path in writer.below(name):
        if _is_pointer(key := path.removeprefix(f"{name}/")) and key not in pointers:
            writer.drop(path)
    for key, data in pointers.items():
        writer.write(f"{name}/{key}", data)
    return damaged


def release_states(path: Path) -> tuple[tuple[object, ...], ...]:
    """Return the states in a file of releases, to find out whether a release has changed; () for another database."""
    try:
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)
        try:
            return tuple(database.execute("SELECT number, facts FROM releases ORDER BY number").fetchall())
        finally:
            database.close()
    except sqlite3.Error:
        return ()


def _is_pointer(key: str) -> bool:
    return key.partition("/")[0] in POINTERS


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise OriginalChanged(f"{path} was deleted") from None
