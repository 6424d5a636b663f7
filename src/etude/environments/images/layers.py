"""OCI layers: tar archives with the changes from one root filesystem to another.

The entry `.wh.NAME` (a whiteout) deletes NAME. The entry `.wh..wh..opq` hides everything that lower layers have in its
folder. Machines export their changes in the same format, for RUN steps of Dockerfiles and for snapshots. Format: OCI
image specification 1.1, layer.md.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Collection
from typing import BinaryIO, Literal, Protocol, runtime_checkable

from etude.environments.images.limits import BadSource
from etude.environments.images.listing import Owner, walk
from etude.environments.images.openat import open_in
from etude.environments.images.tar import BLOCK, Read, members
from etude.environments.images.tree import Tree, normalize_path

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_OWN = (".wh..wh.",)  # names reserved by aufs
_CHUNK_BYTES = 1 << 18
_OPAQUE_MARKS = ("trusted.overlay.opaque", "user.overlay.opaque")


@runtime_checkable
class ChangeExporter(Protocol):
    """A machine that can export the changes in its root filesystem; RUN steps of Dockerfiles need one.

    The method is not part of `etude.seams.Machine`, since a runtime can support images without it."""

    async def changes(self, out: BinaryIO, *, max_bytes: int) -> None:
        """Write the changes since the machine's image to `out`, as an uncompressed layer with whiteouts.

        Entries are sorted by path and have no times, so equal changes give equal bytes. Raises `ValueError` if the
        layer has more than `max_bytes`."""
        ...


def apply_layer(read: Read, tree: Tree, *, below: str = "", whiteouts: bool = True, skip: Collection[str] = ()) -> None:
    """Apply a tar archive with the changes of a layer to a tree.

    `read(n)` returns at most n bytes of the archive, and b"" at its end. `below` is the folder of the tree that the
    archive's paths are relative to. With `whiteouts`, deletions are applied and devices in /dev ignored; False is for a
    plain archive. `skip` are top-level folders that are not changed. Raises `BadSource` for devices, pipes, paths with
    ``..`` and damaged archives, and over the limits of the tree."""
    added: set[str] = set()
    for member, content in members(read):
        path = normalize_path(f"{below}/{normalize_path(member.path, tree.budget.limits)}", tree.budget.limits)
        if path.partition("/")[0] in skip:
            continue
        owner = Owner(member.mode, member.uid, member.gid)
        folder, name = posixpath.split(path)
        if whiteouts and name.startswith(_WHITEOUT):
            if name == _OPAQUE:
                tree.clear(folder, added)
            elif not name.startswith(_OWN):
                tree.remove(normalize_path(f"{folder}/{_uncovered(name)}", tree.budget.limits))
            continue
        if member.kind == "d":
            tree.folder(path, owner)
        elif member.kind == "f":
            tree.file(path, owner, content)
        elif member.kind == "l":
            tree.link(path, member.target, owner)
        elif member.kind == "h":
            tree.hard_link(path, f"{below}/{normalize_path(member.target, tree.budget.limits)}")
        elif whiteouts and posixpath.dirname(path) == "dev":
            continue  # runtimes mount their own /dev
        else:
            raise BadSource(f"{path} is a device or a pipe", hint="images cannot have any: remove it from the source")
        if whiteouts:
            while path and path not in added:
                added.add(path)
                path = posixpath.dirname(path)


def _uncovered(name: str) -> str:
    name = name.removeprefix(_WHITEOUT)
    if name in ("", ".", ".."):
        raise BadSource(f"the archive deletes {name!r}", hint="the source may be hostile: do not use it")
    return name


def write_layer(
    upper: int,
    write: Callable[[bytes], object],
    *,
    ids: Callable[[int], int] = lambda found: found,
    whole: bool = False,
    skip: Collection[str] = (),
) -> None:
    """Write the upper folder of an overlay filesystem as an uncompressed layer.

    `upper` is the descriptor of the folder, and `write` is called with each block of bytes. `ids` maps a user or group
    id outside of the machine to the one inside. With `whole`, the layer hides everything of the layers below. `skip`
    are paths to leave out. Entries are sorted and have no times, so equal changes give equal bytes. Sockets, pipes and
    devices are omitted."""
    if whole:
        _write_header(write, _OPAQUE, "0", os.fstat(upper), 0, "", ids)
    for path, found, folder, name in walk(upper, skip.__contains__):
        if path:
            _write_one(path, found, folder, name, write, ids)
        if stat.S_ISDIR(found.st_mode) and path and _is_opaque(upper, path):
            _write_header(write, f"{path}/{_OPAQUE}", "0", found, 0, "", ids)
    write(bytes(2 * BLOCK))


def _write_one(
    path: str,
    found: os.stat_result,
    folder: int,
    name: str,
    write: Callable[[bytes], object],
    ids: Callable[[int], int],
) -> None:
    if stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
        whiteout = posixpath.join(posixpath.dirname(path), f"{_WHITEOUT}{name}")
        _write_header(write, whiteout, "0", found, 0, "", lambda owner: 0)
    elif stat.S_ISDIR(found.st_mode):
        _write_header(write, f"{path}/", "5", found, 0, "", ids)
    elif stat.S_ISLNK(found.st_mode):
        _write_header(write, path, "2", found, 0, os.readlink(name, dir_fd=folder), ids)
    elif stat.S_ISREG(found.st_mode):
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with open(fd, "rb", buffering=0) as file:
            size = os.fstat(fd).st_size
            _write_header(write, path, "0", found, size, "", ids)
            left = size
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                write(chunk)
                left -= len(chunk)
            write(bytes(left + -size % BLOCK))  # zeros also for bytes that were truncated meanwhile


def _is_opaque(upper: int, path: str) -> bool:
    fd = open_in(upper, path, os.O_RDONLY | os.O_DIRECTORY, follow=False)
    try:
        for mark in _OPAQUE_MARKS:
            try:
                if os.getxattr(fd, mark) == b"y":
                    return True
            except OSError:
                continue
        return False
    finally:
        os.close(fd)


def _write_header(
    write: Callable[[bytes], object],
    path: str,
    kind: Literal["0", "2", "5"],
    found: os.stat_result,
    size: int,
    target: str,
    ids: Callable[[int], int],
) -> None:
    numbers = {"uid": ids(found.st_uid), "gid": ids(found.st_gid), "size": size}
    name, link = os.fsencode(path), os.fsencode(target)
    records = b"".join(
        _record(key, value)
        for key, value, fits in (
            (b"path", name, len(name) <= 100),
            (b"linkpath", link, len(link) <= 100),
            *((k.encode(), str(v).encode(), v < (8**11 if k == "size" else 8**7)) for k, v in numbers.items()),
        )
        if not fits
    )
    mode = stat.S_IMODE(found.st_mode)
    if records:
        write(_block(b"./pax", "x", 0o644, 0, 0, len(records), b""))
        write(records + bytes(-len(records) % BLOCK))
    uid, gid = (numbers[k] if numbers[k] < 8**7 else 0 for k in ("uid", "gid"))
    write(_block(name[:100], kind, mode, uid, gid, size if size < 8**11 else 0, link[:100]))


def _record(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    while len(str(length)) + len(key) + len(value) + 3 != length:
        length = len(str(length)) + len(key) + len(value) + 3
    return b"%d %s=%s\n" % (length, key, value)


def _block(name: bytes, kind: str, mode: int, uid: int, gid: int, size: int, link: bytes) -> bytes:
    head = b"%-100s%07o\0%07o\0%07o\0%011o\0%011o\0" % (b"", mode, uid, gid, size, 0)
    block = bytearray(head + b" " * 8 + kind.encode() + link.ljust(100, b"\0") + b"ustar\00000")
    block[:100] = name.ljust(100, b"\0")
    block += bytes(BLOCK - len(block))
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)
