"""Document sources: files of a folder, JSON lines, Parquet. `etude.corpus.git` has git repositories.

Memory is bounded by `MAX_BYTES`, however large a file, a line or a value is: a larger document is skipped unread."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec

from etude import progress
from etude.corpus.documents import MAX_BYTES, Document, Dropped, decoded
from etude.corpus.licences import is_licence_file, licence_of, nearest_licence
from etude.errors import InputError

PIECE_BYTES = 32 << 20
"""Size of a piece of a source: what one process reads at a time, and what is done again after a kill."""
_WITH_OFFSET = re.compile(r"(.+?):(\d+)(?=\s|\Z)")
_LINE_BYTES = 2 * MAX_BYTES  # JSON escapes some characters


class Divided(ABC):
    """Base class of the built-in sources. It implements `documents` with `pieces` and `read`."""

    @abstractmethod
    def pieces(self) -> Sequence[Any]:
        """Return the pieces in order. A piece is plain JSON data that describes where its documents are, and changes if
        they change."""

    @abstractmethod
    def read(self, piece: Any) -> Iterator[Document | Dropped]:
        """Yield the documents of a piece, in order."""

    def documents(self) -> Iterable[Document | Dropped]:
        """Yield the documents of all pieces, in order."""
        for piece in self.pieces():
            yield from self.read(piece)


def in_pieces(items: Iterable[tuple[list[Any], int]], piece_bytes: int | None = None) -> list[list[Any]]:
    """Group items into lists of about `piece_bytes` bytes each (None: `PIECE_BYTES`). `items`: pairs (item, its number
    of bytes).

    >>> in_pieces([(["a"], 500), (["b"], 500), (["c"], 1)], 1000)
    [[['a'], ['b']], [['c']]]
    """
    limit = PIECE_BYTES if piece_bytes is None else piece_bytes
    pieces, total = list[list[Any]](), limit
    for item, size in items:
        if total >= limit:
            pieces.append([])
            total = 0
        pieces[-1].append(item)
        total += min(size, MAX_BYTES) + 256
    return pieces


def is_wanted(path: str, files: Sequence[str], exclude: Sequence[str]) -> bool:
    """Return whether a path matches one of the patterns `files` and none of `exclude` (fnmatch; * also matches /)."""
    return any(fnmatch.fnmatchcase(path, one) for one in files) and not any(
        fnmatch.fnmatchcase(path, one) for one in exclude
    )


def no_match(where: object, files: Sequence[str], exclude: Sequence[str]) -> NoReturn:
    """Raise `InputError`: `where`, a folder or repository, has no file that is wanted."""
    facts = f"exclude leaves out {', '.join(exclude)}" if exclude else ""
    hint = "check the path, and the patterns in `files`, which are relative to it"
    raise InputError(f"no file in {where} matches {', '.join(files) or 'an empty list'}", facts, hint=hint)


@dataclass(frozen=True)
class Folder(Divided):
    """The text files of a folder and its subfolders, in the order of their paths. Links and ".git" are left out.

    `files` and `exclude` are patterns of paths relative to the folder; `*` also matches "/". The licence of a file is
    that of the nearest LICENSE file above it. Raises `InputError` if there is no folder, or if no file matches."""

    path: Path
    files: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.path.is_dir():
            raise InputError(
                f"there is no folder {self.path}", hint="give the path of an existing folder of text files"
            )

    def pieces(self) -> list[list[Any]]:
        """Divide the files into pieces that can be read in parallel.

        A piece is a list of [path, number of bytes, mtime in ns, licence]."""
        licences: dict[str, str] = {}
        pieces = in_pieces(
            ([name, size, mtime, nearest_licence(name, licences)], size)
            for name, size, mtime in self._walk("", licences)
            if is_wanted(name, self.files, self.exclude)
        )
        return pieces or no_match(self.path, self.files, self.exclude)

    def _walk(self, folder: str, licences: dict[str, str]) -> Iterator[tuple[str, int, int]]:
        waiting = [folder]
        while waiting:  # folders are not a recursion: they may be deep
            folder = waiting.pop()
            progress.begin(f"listing {self.path / folder}")
            try:
                entries = sorted(os.scandir(self.path / folder), key=lambda entry: entry.name)
            except OSError:
                continue
            below = f"{folder}/" if folder else ""
            regular = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
            for entry in regular:
                if is_licence_file(entry.name):
                    licences[folder] = licence_of(_head(Path(entry.path)))
            for entry in regular:
                stat = entry.stat(follow_symlinks=False)
                yield f"{below}{entry.name}", stat.st_size, stat.st_mtime_ns
            inner = [e.name for e in entries if e.is_dir(follow_symlinks=False) and e.name != ".git"]
            waiting += [f"{below}{name}" for name in reversed(inner)]

    def read(self, piece: Any) -> Iterator[Document | Dropped]:
        """Yield the documents of a piece that `pieces` returned."""
        for name, size, _, licence in piece:
            known = os.fsencode(name).decode("utf-8", "replace")
            if size > MAX_BYTES:
                yield Dropped(known, "too-large")
                continue
            progress.begin(f"reading {self.path / name}")
            try:
                with (self.path / name).open("rb") as file:
                    data = file.read(MAX_BYTES + 1)
            except OSError:
                yield Dropped(known, "unreadable")
                continue
            yield decoded(known, data, path=known, licence=licence)


def _head(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(1 << 16).decode("utf-8", "replace")
    except OSError:
        return ""


def matching(files: Sequence[str], noun: str) -> list[str]:
    """Return the files that match one of these patterns, in order.

    Raises `InputError` if no file matches; `noun` is the kind of file in the error."""
    found = sorted({path for pattern in files for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)})
    if not found:
        raise InputError(
            f"no {noun} file matches {', '.join(files) or 'an empty list'}",
            hint="correct the patterns in the setting `files`",
        )
    return found


class Lines(Divided):
    """Base class of sources that read one document from each line of JSON in files."""

    def ranges(self, files: Sequence[str]) -> list[list[Any]]:
        """Divide the files that match the glob patterns `files` into pieces of at most `PIECE_BYTES`.

        Returns [file, first byte, last byte + 1, mtime in ns] of each. Raises `InputError` if no file matches."""
        found = list[list[Any]]()
        for name in matching(files, "JSON lines"):
            stat = os.stat(name)
            found += [
                [name, start, min(start + PIECE_BYTES, stat.st_size), stat.st_mtime_ns]
                for start in range(0, stat.st_size, PIECE_BYTES)
            ]
        return found

    def read(self, piece: Any) -> Iterator[Document | Dropped]:
        """Yield the documents of a piece that `pieces` returned."""
        name, start, stop, *_ = piece
        progress.begin(f"reading {name}")
        with open(name, "rb") as file:
            for offset, line in lines(file, start, stop):
                yield self.parsed(f"{os.path.basename(name)}:{offset}", line)
                progress.begin(f"reading {name} after byte {offset}")

    @abstractmethod
    def parsed(self, name: str, line: bytes | None) -> Document | Dropped:
        """Return the document in one line, or a `Dropped` with the reason why there is none.

        `name` becomes the document's id if the line has none. `line`: None if it was too long."""


@dataclass(frozen=True)
class Jsonl(Lines):
    """Files with one JSON object in each line.

    `files` are patterns. `text`, `id`, `path` and `licence` are the names of the fields; a line without an id is named
    by its file and offset. Raises `InputError` if no file matches."""

    files: tuple[str, ...]
    text: str = "text"
    id: str = "id"
    path: str = "path"
    licence: str = "licence"

    def pieces(self) -> list[list[Any]]:
        """Divide the files into pieces that can be read in parallel.

        A piece is [file, first byte, last byte + 1, mtime in ns]: the lines that begin in this range of bytes."""
        return self.ranges(self.files)

    def parsed(self, name: str, line: bytes | None) -> Document | Dropped:
        if line is None:
            return Dropped(name, "too-large")
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return Dropped(name, "empty" if not line.strip() else "not-json")
        return _of_row(row, name, self.text, self.id, self.path, self.licence)


def _of_row(row: Any, name: str, text: str, id: str, path: str, licence: str) -> Document | Dropped:
    if not isinstance(row, dict):
        return Dropped(name, "no-text")
    value, named = row.get(text), row.get(id)
    name = str(named) if isinstance(named, str | int) and str(named) else name
    if not isinstance(value, str):
        return Dropped(name.encode("utf-8", "replace").decode(), "no-text")
    where, licence = (str(row.get(key) or "") if isinstance(row.get(key), str) else "" for key in (path, licence))
    try:
        for one in (name, where, licence):
            one.encode()
        return decoded(name, value.encode(), path=where, licence=licence)
    except UnicodeEncodeError:  # half of a surrogate pair
        return Dropped(name.encode("utf-8", "replace").decode(), "not-utf-8")


def lines(file: BinaryIO, start: int, stop: int, limit: int = _LINE_BYTES) -> Iterator[tuple[int, bytes | None]]:
    """Yield (offset, line) of each line that begins in [start, stop); None for a line of more than `limit` bytes.

    If a file is divided into ranges, each line belongs to exactly one. At most `limit` bytes are in memory."""
    if start:
        file.seek(start - 1)
        _skip_line(file)
    while (at := file.tell()) < stop:
        line = file.readline(limit + 1)
        if not line:
            return
        if len(line) > limit and not line.endswith(b"\n"):
            _skip_line(file)
            yield at, None
        else:
            yield at, line


class LineNumbers:
    """Names lines of a corpus's sources by file and line number, instead of by their offset in bytes.

    `config`: the config in the corpus's manifest. An id is left as it is if its file is missing, if several files have
    this name, or if no line begins at the offset any more."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._files: dict[str, dict[str, list[str]]] = {}
        for source in config.get("sources", ()):
            kind = source.get("kind", {})
            named = self._files.setdefault(str(source.get("name")), {})
            patterns = kind.get("files", ()) if kind.get("kind") in ("chats", "jsonl") else ()
            for pattern in patterns:
                pattern = f"{pattern}/**/*.jsonl" if os.path.isdir(pattern) else pattern
                for path in glob.glob(pattern, recursive=True):
                    paths = named.setdefault(os.path.basename(path), [])
                    if path not in paths and os.path.isfile(path):
                        paths.append(path)

    def told(self, source: str, text: str) -> str:
        """Return `text`, which begins with an id, with "FILE, line N" in place of the id's file name and offset."""
        found = _WITH_OFFSET.match(text)
        if found is None:
            return text
        paths = self._files.get(source, {}).get(found[1], [])
        line = _line_at(paths[0], int(found[2])) if len(paths) == 1 else None
        return text if line is None else f"{paths[0]}, line {line:,}{text[found.end() :]}"


def _line_at(path: str, offset: int) -> int | None:
    """Return the number (from 1) of the line that begins at an offset in bytes; None if no line begins there."""
    line, last, left = 1, b"\n", offset
    try:
        with open(path, "rb") as file:
            while left and (part := file.read(min(left, 1 << 20))):
                line, last, left = line + part.count(b"\n"), part[-1:], left - len(part)
            return line if not left and last == b"\n" and file.read(1) else None
    except OSError:
        return None


def _skip_line(file: BinaryIO) -> None:
    while (part := file.readline(1 << 20)) and not part.endswith(b"\n"):
        pass


@dataclass(frozen=True)
class Parquet(Divided):
    """The rows of Parquet files. `text`, `id`, `path` and `licence` are the names of columns; only `text` must exist.

    A row without an id is named by its file, row group and row. Needs pyarrow. Raises `InputError` if no file matches
    or if a file has no column `text`."""

    files: tuple[str, ...]
    text: str = "text"
    id: str = "id"
    path: str = "path"
    licence: str = "licence"

    def pieces(self) -> list[list[Any]]:
        """Divide the files into pieces that can be read in parallel: [file, row group, mtime in ns]."""
        import pyarrow.parquet

        found = list[list[Any]]()
        for name in matching(self.files, "Parquet"):
            with pyarrow.parquet.ParquetFile(name) as file:
                if self.text not in file.schema_arrow.names:
                    facts = f"its columns are {', '.join(file.schema_arrow.names)}"
                    raise InputError(
                        f"{name} has no column {self.text!r}", facts, hint='name the column of texts: text = "COLUMN"'
                    )
                found += [[name, group, os.stat(name).st_mtime_ns] for group in range(file.num_row_groups)]
        return found

    def read(self, piece: Any) -> Iterator[Document | Dropped]:
        """Yield the documents of a row group, a few rows at a time."""
        import pyarrow.parquet

        name, group, _ = piece
        progress.begin(f"reading {name}")
        with pyarrow.parquet.ParquetFile(name) as file:
            fields = [self.text, self.id, self.path, self.licence]
            columns = [one for one in dict.fromkeys(fields) if one in file.schema_arrow.names]
            number = 0
            for batch in file.iter_batches(batch_size=16, row_groups=[group], columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    yield _of_row(row, f"{os.path.basename(name)}:{group}:{number}", *fields)
                    number += 1
