"""Read untrusted tar archives as a stream: ustar, GNU long names, pax.

Python's tarfile trusts the headers: it reads a long name or a pax header of gigabytes into memory, and recurses on
chains of them. Here every header has a size limit, and entries of unknown kinds are refused with an error. Format:
POSIX.1-2001 `pax`, and `tar.5` of libarchive for what GNU tar adds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from etude.environments.images.limits import BadSource

BLOCK = 512
_CHUNK_BYTES = 1 << 18
_HEADER_BYTES = 1 << 20  # of one long name, or of the pax records of one entry
_KINDS = {b"0": "f", b"\0": "f", b"7": "f", b"1": "h", b"2": "l", b"5": "d", b"3": "c", b"4": "b", b"6": "p"}
_HINT = "get the archive again, or write it with `tar --format=pax`"


class Member(NamedTuple):
    """The header of one entry of an archive: path, kind, size, permissions and owner.

    `kind` is "f" for a file, "d" folder, "l" symbolic link, "h" hard link, "c" or "b" device, "p" pipe. `size` is the
    number of content bytes that follow. `target` is where a link leads, `device` the device's major and minor number.
    """

    path: str
    kind: str
    mode: int
    uid: int
    gid: int
    size: int  # of the content that follows
    target: str
    device: tuple[int, int]


Read = Callable[[int], bytes]
"""Reads at most the given number of bytes; returns b"" at the end."""


def members(read: Read) -> Iterator[tuple[Member, Iterator[bytes]]]:
    """Yield the entries of an archive, each with an iterator over its content.

    `read(n)` returns at most n bytes of the archive, and b"" at its end. An iterator is valid until the next entry. The
    bytes after the end of the archive are read, too, so that a decompressor checks its checksum. Raises `BadSource` if
    the archive is damaged or has unsupported entries."""
    extra: dict[str, str] = {}
    everywhere: dict[str, str] = {}
    num_headers = 0
    while any(block := _exactly(read, BLOCK)):
        member = _header(block)
        kind = block[156:157]
        if kind in b"xgLK":
            num_headers += kind != b"g"
            if num_headers > 16 or len(everywhere) > 64:
                raise BadSource("an entry of the archive has too many headers", hint=_HINT)
            text = _text(read, member.size)
            if kind == b"g":
                everywhere |= _records(text)
            elif kind == b"x":
                extra |= _records(text)
            else:
                extra["path" if kind == b"L" else "linkpath"] = os.fsdecode(text.split(b"\0")[0])
            continue
        if kind not in _KINDS:
            raise BadSource(
                f"an entry of the archive has the kind {kind!r}",
                "it is a sparse file or of an unknown kind",
                hint=_HINT,
            )
        member = _apply_records(member, everywhere | extra, old=kind != b"7")
        extra, num_headers = {}, 0
        content = _content(read, member.size)
        yield member, content
        for _ in content:  # skip what the caller did not read
            pass
    if num_headers:
        raise BadSource("the archive is truncated", hint=_HINT)
    while read(_CHUNK_BYTES):
        pass


def _header(block: bytes) -> Member:
    total = sum(block) - sum(block[148:156]) + 8 * 32
    if _number(block[148:156]) != total:
        raise BadSource("the archive is damaged", "the checksum of a header is wrong", hint=_HINT)
    name, prefix = _string(block[:100]), _string(block[345:500]) if block[257:262] == b"ustar" else ""
    kind = _KINDS.get(block[156:157], "")
    if block[257:265] == b"ustar  \0":
        prefix = ""  # the old GNU format has times there
    size = _number(block[124:136])
    return Member(
        path=f"{prefix}/{name}" if prefix else name,
        kind=kind,
        mode=_number(block[100:108]) & 0o7777,
        uid=_number(block[108:116]),
        gid=_number(block[116:124]),
        size=0 if kind in ("h", "l", "d", "c", "b", "p") and kind else size,
        target=_string(block[157:257]),
        device=(_number(block[329:337]), _number(block[337:345])) if kind in ("c", "b") else (0, 0),
    )


def _apply_records(member: Member, records: dict[str, str], *, old: bool) -> Member:
    """Apply pax records and long names to an entry. `old`: its kind does not distinguish files from folders."""
    if any(key.startswith("GNU.sparse") for key in records):
        raise BadSource("the archive has sparse entries", member.path[:80], hint=_HINT)
    numbers = {}
    for name in ("size", "uid", "gid"):
        text = records.get(name)
        if text is not None:
            if not text.isascii() or not text.isdigit() or len(text) > 19:
                raise BadSource("an entry of the archive is damaged", f"{name} {text[:20]!r}", hint=_HINT)
            numbers[name] = int(text)
    member = member._replace(
        path=records.get("path", member.path),
        target=records.get("linkpath", member.target),
        **numbers,  # type: ignore[arg-type]
    )
    if member.kind == "f" and member.path.endswith("/") and old:
        member = member._replace(kind="d")  # old formats have no kind for folders
    if member.kind != "f":
        member = member._replace(size=0)
    if not (0 <= member.uid < 2**32 - 1 and 0 <= member.gid < 2**32 - 1):
        raise BadSource("an entry of the archive has an invalid owner", f"{member.uid}:{member.gid}", hint=_HINT)
    return member


def _content(read: Read, size: int) -> Iterator[bytes]:
    left = size
    while left > 0:
        chunk = read(min(left, _CHUNK_BYTES))
        if not chunk:
            raise BadSource("the archive is truncated", f"{left} bytes of a file are missing", hint=_HINT)
        left -= len(chunk)
        yield chunk
    _exactly(read, -size % BLOCK)


def _text(read: Read, size: int) -> bytes:
    if size > _HEADER_BYTES:
        raise BadSource("a header of the archive is too large", f"{size} bytes", hint=_HINT)
    return _exactly(read, size + -size % BLOCK)[:size]


def _records(text: bytes) -> dict[str, str]:
    """Parse pax records, each ``length SP key = value LF``."""
    found, at = {}, 0
    while at < len(text):
        space = text.find(b" ", at, at + 8)
        length = int(text[at:space]) if space > at and text[at:space].isdigit() else 0
        record = text[space + 1 : at + length]
        key, equals, value = record.partition(b"=")
        if length <= space + 1 - at or at + length > len(text) or not equals or value[-1:] != b"\n":
            raise BadSource("a pax header of the archive is damaged", hint=_HINT)
        found[os.fsdecode(key)] = os.fsdecode(value[:-1])
        at += length
    return found


def _exactly(read: Read, size: int) -> bytes:
    parts, left = [], size
    while left > 0 and (part := read(left)):
        parts.append(part)
        left -= len(part)
    if left:
        raise BadSource("the archive is truncated", f"{left} bytes are missing", hint=_HINT)
    return b"".join(parts)


def _string(field: bytes) -> str:
    return os.fsdecode(field.split(b"\0")[0])


def _number(field: bytes) -> int:
    """Parse a number: octal text, or big-endian binary if the first bit is set."""
    if field[0] == 0x80:
        value = int.from_bytes(field[1:], "big")
        if value < 1 << 63:
            return value
    else:
        text = field.strip(b" \0")
        if not text:
            return 0
        if len(text) <= 12 and all(c in b"01234567" for c in text):
            return int(text, 8)
    raise BadSource("a header of the archive is damaged", f"the number {field!r}", hint=_HINT)
