"""Tar archives of unknown origin, read as a stream: ustar, GNU long names, pax.

Python's tarfile takes what a header says at its word: a long name or a pax header of gigabytes is read into memory,
chains of them recurse. Here every header has a bound, and anything that is no plain entry is refused by name.
Format: POSIX.1-2001 `pax`, and `tar.5` of libarchive for what GNU tar adds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from etude.environments.images.limits import BadSource

BLOCK = 512
_CHUNK_BYTES = 1 << 18
_HEADER_BYTES = 1 << 20  # of one long name, or of one entry's pax records
_KINDS = {b"0": "f", b"\0": "f", b"7": "f", b"1": "h", b"2": "l", b"5": "d", b"3": "c", b"4": "b", b"6": "p"}
_HINT = "get the archive again, or write it with `tar --format=pax`"


class Member(NamedTuple):
    """One entry: "f" file, "d" folder, "l" link, "h" another name of a file; "c", "b", "p" device or pipe."""

    path: str
    kind: str
    mode: int
    uid: int
    gid: int
    size: int  # of the content that follows
    target: str
    device: tuple[int, int]


Read = Callable[[int], bytes]
"""At most so many of the next bytes; none at the end."""


def members(read: Read) -> Iterator[tuple[Member, Iterator[bytes]]]:
    """The entries of an archive, each with its content, which is good until the next step. What follows its end is
    read as well, so that whatever packs it has been checked. Raises `BadSource`."""
    extra: dict[str, str] = {}
    everywhere: dict[str, str] = {}
    num_headers = 0
    while any(block := _exactly(read, BLOCK)):
        member = _header(block)
        kind = block[156:157]
        if kind in b"xgLK":
            num_headers += kind != b"g"
            if num_headers > 16 or len(everywhere) > 64:
                raise BadSource("an archive's entry has too many headers", hint=_HINT)
            text = _text(read, member.size)
            if kind == b"g":
                everywhere |= _records(text)
            elif kind == b"x":
                extra |= _records(text)
            else:
                extra["path" if kind == b"L" else "linkpath"] = os.fsdecode(text.split(b"\0")[0])
            continue
        if kind not in _KINDS:
            raise BadSource(f"an archive's entry is of kind {kind!r}", "sparse, or no known one", hint=_HINT)
        member = _with(member, everywhere | extra, old=kind != b"7")
        extra, num_headers = {}, 0
        content = _content(read, member.size)
        yield member, content
        for _ in content:  # what the caller has left
            pass
    if num_headers:
        raise BadSource("an archive ends in the middle", hint=_HINT)
    while read(_CHUNK_BYTES):
        pass


def _header(block: bytes) -> Member:
    total = sum(block) - sum(block[148:156]) + 8 * 32
    if _number(block[148:156]) != total:
        raise BadSource("an archive is damaged", "a header's checksum does not agree", hint=_HINT)
    name, prefix = _string(block[:100]), _string(block[345:500]) if block[257:262] == b"ustar" else ""
    kind = _KINDS.get(block[156:157], "")
    if block[257:265] == b"ustar  \0":
        prefix = ""  # GNU's old form keeps times there
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


def _with(member: Member, records: dict[str, str], *, old: bool) -> Member:
    """The entry, after what its other headers say; `old`: its kind may be a folder's or a file's."""
    if any(key.startswith("GNU.sparse") for key in records):
        raise BadSource("an archive has sparse entries", member.path[:80], hint=_HINT)
    numbers = {}
    for name in ("size", "uid", "gid"):
        text = records.get(name)
        if text is not None:
            if not text.isascii() or not text.isdigit() or len(text) > 19:
                raise BadSource("an archive's entry is damaged", f"{name} {text[:20]!r}", hint=_HINT)
            numbers[name] = int(text)
    member = member._replace(
        path=records.get("path", member.path),
        target=records.get("linkpath", member.target),
        **numbers,  # type: ignore[arg-type]
    )
    if member.kind == "f" and member.path.endswith("/") and old:
        member = member._replace(kind="d")  # a folder before there was a kind for it
    if member.kind != "f":
        member = member._replace(size=0)
    if not (0 <= member.uid < 2**32 - 1 and 0 <= member.gid < 2**32 - 1):
        raise BadSource("an archive's entry belongs to nobody", f"{member.uid}:{member.gid}", hint=_HINT)
    return member


def _content(read: Read, size: int) -> Iterator[bytes]:
    left = size
    while left > 0:
        chunk = read(min(left, _CHUNK_BYTES))
        if not chunk:
            raise BadSource("an archive ends in the middle", f"{left} bytes of a file are missing", hint=_HINT)
        left -= len(chunk)
        yield chunk
    _exactly(read, -size % BLOCK)


def _text(read: Read, size: int) -> bytes:
    if size > _HEADER_BYTES:
        raise BadSource("an archive's header is too large", f"{size} bytes", hint=_HINT)
    return _exactly(read, size + -size % BLOCK)[:size]


def _records(text: bytes) -> dict[str, str]:
    """pax records: ``length SP key = value LF``, each."""
    found, at = {}, 0
    while at < len(text):
        space = text.find(b" ", at, at + 8)
        length = int(text[at:space]) if space > at and text[at:space].isdigit() else 0
        record = text[space + 1 : at + length]
        key, equals, value = record.partition(b"=")
        if length <= space + 1 - at or at + length > len(text) or not equals or value[-1:] != b"\n":
            raise BadSource("an archive's pax header is damaged", hint=_HINT)
        found[os.fsdecode(key)] = os.fsdecode(value[:-1])
        at += length
    return found


def _exactly(read: Read, size: int) -> bytes:
    parts, left = [], size
    while left > 0 and (part := read(left)):
        parts.append(part)
        left -= len(part)
    if left:
        raise BadSource("an archive ends in the middle", f"{left} bytes are missing", hint=_HINT)
    return b"".join(parts)


def _string(field: bytes) -> str:
    return os.fsdecode(field.split(b"\0")[0])


def _number(field: bytes) -> int:
    """Octal text, or, with the first bit set, big-endian binary."""
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
    raise BadSource("an archive's header is damaged", f"the number {field!r}", hint=_HINT)
