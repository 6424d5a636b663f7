"""Checksums of the files of a run, stored beside or inside each file so that damage is detected when it is read.

There are four forms, by kind of file:

- A directory that is written once (a checkpoint, a corpus, a tokeniser) has a `SHA256SUMS` file, as `sha256sum -c`
  reads it.
- A Parquet file has a block of 40 bytes with its SHA-256 between data and footer, where Parquet readers do not look.
- A JSON object has its SHA-256 as its last member; a list of objects has one in each object; an HTML page has one in a
  comment.
- A line of an event log has a CRC-32 as its last member.

A file without a checksum is from an earlier version of etude, or from another program: it is read without a check."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from etude.errors import EtudeError

SUMS = "SHA256SUMS"
SHA256 = "sha256"
PARQUET_KEY = "etude.sealed"
"""Key in the metadata of a Parquet schema: marks that the file has a block with its digest."""

_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)")
_AT_ONCE = 4  # number of threads: hashing one file keeps a core busy, at 1 to 2 GB/s
_MAGIC = b"ETUDESUM"
_BLOCK = len(_MAGIC) + 32
_END = b"PAR1"
_CRC = re.compile(rb', "crc": "([0-9a-f]{8})"\}$')
_COMMENT = re.compile(rb"\n<!-- sha256 ([0-9a-f]{64}) -->\n$")
_HINT = "restore the file from a backup; if it was changed on purpose, delete"


class ChecksumMismatch(EtudeError):
    """The bytes of a file are not the bytes that were written."""


# Directories


def file_digest(path: Path) -> str:
    """Compute the SHA-256 of a file as 64 hex characters. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_in(folder: Path) -> list[str]:
    """List all files in a folder and its subfolders except its SHA256SUMS: sorted paths relative to the folder."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != SUMS)


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Compute the SHA-256 of files of a folder: name → 64 hex characters. Raises `OSError`.

    `names` are paths relative to the folder."""
    names = list(names)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(names, pool.map(lambda name: file_digest(folder / name), names), strict=True))


def write_sums(folder: Path, found: Mapping[str, str] | None = None) -> None:
    """Write the SHA256SUMS file of a folder. Raises `OSError`.

    `found` maps names to digests; None computes the digests of all files in the folder."""
    found = digests(folder, files_in(folder)) if found is None else found
    text = "".join(f"{found[name]}  {name}\n" for name in sorted(found))
    scratch = folder / f".{SUMS}.{os.getpid()}.tmp"
    scratch.write_text(text)
    scratch.replace(folder / SUMS)


def read_sums(folder: Path) -> dict[str, str] | None:
    """Read the SHA256SUMS file of a folder as name → digest. Returns None if there is no such file.

    Raises `ChecksumMismatch` if the file is damaged or cannot be read."""
    path = folder / SUMS
    try:
        lines = path.read_bytes().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ChecksumMismatch(
            f"{path} cannot be read", str(error.strerror), hint="check the disk and its mount"
        ) from None
    found = [_LINE.fullmatch(line) for line in lines]
    if not all(found):
        raise ChecksumMismatch(f"{path} is damaged", "a line is not a checksum and a name", hint=f"{_HINT} {path}")
    return {match[2]: match[1] for match in found if match}


def verify_files(
    folder: Path, names: Iterable[str] | None = None, *, kind: type[EtudeError] = ChecksumMismatch
) -> bool:
    """Compare files of a folder with its SHA256SUMS file. Returns True, or False if there is no such file.

    `names` are the files to check; None checks all that are listed. Raises an error of class `kind` if a file differs,
    is not listed, or is missing."""
    try:
        sums = read_sums(folder)
    except ChecksumMismatch as error:
        raise kind(error.what, error.facts, hint=error.hint) from None
    if sums is None:
        return False
    wanted = sorted(sums) if names is None else list(names)
    for name in wanted:
        if name not in sums:
            facts = f"{folder / SUMS} does not list it"
            raise kind(f"{folder / name} has no checksum", facts, hint=f"{_HINT} {folder / SUMS}")
    try:
        found = digests(folder, wanted)
    except OSError as error:
        raise kind(f"a file of {folder} cannot be read", str(error), hint="restore the file from a backup") from None
    for name in wanted:
        if found[name] != sums[name]:
            raise kind(
                f"{folder / name} is damaged",
                f"its SHA-256 is {found[name][:12]}, expected {sums[name][:12]}",
                hint=f"{_HINT} {folder / SUMS}",
            )
    return True


# Parquet


def seal_parquet(file: BinaryIO) -> None:
    """Insert the SHA-256 of a complete Parquet file into it, between data and footer.

    The file must be open for reading and writing, and its schema's metadata must have the key `PARQUET_KEY`. The file
    stays valid, since readers find data by offsets from the start and the footer from the end."""
    found = _footer(file)
    assert found is not None, "it was just written"
    start, size = found
    file.seek(start)
    footer = file.read()
    digest = _digest_of(file, [(0, start), (start, size)])
    file.seek(start)
    file.write(_MAGIC + digest + footer)
    file.flush()


def verify_parquet(file: BinaryIO, name: object, *, kind: type[EtudeError] = ChecksumMismatch) -> bool:
    """Compare a complete Parquet file with the SHA-256 that `seal_parquet` put into it, then seek to its start.

    Returns True, or False for a file without a digest and for one that is not Parquet. Raises an error of class `kind`
    if they differ. `name` is the file's name in that error."""
    hint = "restore it from a backup"
    try:
        found = _footer(file)
        if found is None:
            return False
        start, size = found
        file.seek(max(0, start - _BLOCK))
        block = file.read(min(start, _BLOCK))
        footer = file.read()
        if not block.startswith(_MAGIC):
            if PARQUET_KEY.encode() in footer:
                raise ValueError("its digest is missing")
            return False
        digest = _digest_of(file, [(0, start - _BLOCK), (start, size)])
    except ValueError as error:
        raise kind(f"{name} is damaged", str(error), hint=hint) from None
    finally:
        file.seek(0)
    if digest != block[len(_MAGIC) :]:
        raise kind(
            f"{name} is damaged",
            f"its SHA-256 is {digest.hex()[:12]}, expected {block[len(_MAGIC) :].hex()[:12]}",
            hint=hint,
        )
    return True


def _footer(file: BinaryIO) -> tuple[int, int] | None:
    """Start and end of the footer of a Parquet file; None if it is not a Parquet file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    end = file.read(8)
    if size < 12 or end[4:] != _END:
        return None
    start = size - 8 - int(struct.unpack("<I", end[:4])[0])
    return (start, size) if start >= 4 else None


def _digest_of(file: BinaryIO, ranges: Sequence[tuple[int, int]]) -> bytes:
    digest = hashlib.sha256()
    for start, stop in ranges:
        file.seek(start)
        while start < stop:
            data = file.read(min(1 << 20, stop - start))
            if not data:
                raise ValueError("it is shorter than it was")
            digest.update(data)
            start += len(data)
    return digest.digest()


# JSON


def sealed(value: Mapping[str, Any], *, after: str = "") -> dict[str, Any]:
    """Return a copy of a JSON object with its SHA-256 as the last member, "sha256".

    `after` is the digest of the previous object of a list; it is hashed too, so that objects cannot be removed or
    swapped.

    >>> list(sealed({"a": 1}))
    ['a', 'sha256']
    """
    plain = {name: one for name, one in value.items() if name != SHA256}
    return {**plain, SHA256: _canonical(plain, after)}


def sealed_list(values: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a list of JSON objects with a SHA-256 in each, which covers this object and all before it."""
    found: list[dict[str, Any]] = []
    for value in values:
        found.append(sealed(value, after=found[-1][SHA256] if found else ""))
    return found


def verify_json(value: Any, name: object, *, must: bool = False, kind: type[EtudeError] = ChecksumMismatch) -> bool:
    """Compare a parsed JSON file (an object or a list of objects) with the digests in it.

    Returns True, or False if it has no digest. With `must`, a missing digest is an error. Raises an error of class
    `kind` if something differs. `name` is the file's name in that error."""
    objects = value if isinstance(value, list) else [value]
    hint = "restore it from a backup"
    has = [isinstance(one, dict) and SHA256 in one for one in objects]
    if not any(has) and not (must and objects):
        return False
    after = ""
    for one, proven in zip(objects, has, strict=True):
        if not proven:
            raise kind(f"{name} is damaged", "a part of it has no digest", hint=hint)
        found = _canonical({key: item for key, item in one.items() if key != SHA256}, after)
        if found != one[SHA256]:
            facts = f"its SHA-256 is {found[:12]}, expected {str(one[SHA256])[:12]}"
            raise kind(f"{name} is damaged", facts, hint=hint)
        after = found
    return True


def _canonical(value: Mapping[str, Any], after: str) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256((after + text).encode()).hexdigest()


def sealed_page(html: str) -> bytes:
    """Encode an HTML page as UTF-8, with its SHA-256 in a comment at the end."""
    data = html.encode()
    return data + b"\n<!-- sha256 %b -->\n" % hashlib.sha256(data).hexdigest().encode()


def verify_page(data: bytes) -> bool | None:
    """Return whether an encoded HTML page matches the digest in it; None if it has none."""
    found = _COMMENT.search(data)
    return None if found is None else hashlib.sha256(data[: found.start()]).hexdigest().encode() == found[1]


# Lines


def sealed_line(line: bytes) -> bytes:
    """Return a line with a JSON object (without its newline) with its CRC-32 as the last member, "crc".

    >>> verify_line(sealed_line(b'{"t": 1}')), verify_line(b'{"t": 1}')
    (True, None)
    """
    return b'%b, "crc": "%08x"}' % (line[:-1], zlib.crc32(line))


def verify_line(line: bytes) -> bool | None:
    """Return whether a line matches the CRC-32 in it; None if it has none."""
    found = _CRC.search(line)
    return None if found is None else zlib.crc32(line[: found.start()] + b"}") == int(found[1], 16)
