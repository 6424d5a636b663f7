"""Serialise snapshots for other runtimes on this host: the difference to a booted image that both have.

Format: ``magic | SHA-256 of all after the seal | seal | u32 length, head as JSON | devices | page numbers | pages |
disk``. The head identifies the booted image. QEMU trusts a device state and reads it with the rights of the host user;
so only bytes that are sealed (HMAC) with this user's key are passed to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import struct
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from etude.environments.microvm import overlay
from etude.environments.microvm.memory import PAGE, Pages
from etude.environments.microvm.snapshots import Snapshot
from etude.errors import MachineError
from etude.records.image import Image

_MAGIC = b"etude microvm 1\n"
_DIGEST, _KEY_BYTES, _MAX_HEAD = 32, 32, 4 << 20
_START = len(_MAGIC) + 2 * _DIGEST
_LENGTH = struct.Struct("<I")


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of a packed snapshot.

    - `key`: digest of the key with which it is signed
    - `base`, `boot`: names of the booted image (`Base.name`) and of its boot (`Base.boot`)
    - `image`: the image of a store that was booted; None for the guest image
    - `devices`: bytes of device state
    - `pages`: number of memory pages
    - `disk`: size in bytes of the file with the disk writes
    - `extents`: (start, length) of each data range in that file
    """

    key: str
    base: str
    boot: str
    image: Image | None
    devices: int
    pages: int
    disk: int
    extents: list[tuple[int, int]]


def key_in(folder: Path) -> bytes:
    """Return this user's key for snapshots from a folder; create it if it does not exist.

    `folder`: the cache of booted images. Returns b"" if the key cannot be stored; then booted images cannot be shared
    either.
    """
    path = folder / "key"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = folder / f".key-{secrets.token_hex(4)}"
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(new, path)  # atomic, and the first one wins
        finally:
            new.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def pack(snapshot: Snapshot, *, base: str, boot: str, image: Image | None, key: bytes, max_bytes: int) -> bytes:
    """Return a snapshot as bytes. Raises `ValueError` if these are more than `max_bytes`.

    `base`, `boot`: `Base.name` and `Base.boot` of the booted image, of which the snapshot stores only the differences.
    `image`: the store's image that was booted; None for the guest image. `key`: the result of `key_in`.
    """
    extents = overlay.extents(snapshot.disk)
    size, devices, pages = os.fstat(snapshot.disk).st_size, snapshot.devices, snapshot.pages
    head = Head(_name(key), base, boot, image, len(devices), len(pages.numbers), size, extents)
    encoded = msgspec.json.encode(head)
    num_bytes = _START + _LENGTH.size + len(encoded) + _content_bytes(head)
    if num_bytes > max_bytes or len(encoded) > _MAX_HEAD:
        raise ValueError(f"the machine's memory and disk differ in {num_bytes} bytes, at most {max_bytes}")
    body = b"".join(
        (
            *(_LENGTH.pack(len(encoded)), encoded, devices),
            pages.numbers.astype("<i8").tobytes(),
            pages.content.tobytes(),
            *(overlay.read(snapshot.disk, at, length) for at, length in extents),
        )
    )
    digest = hashlib.sha256(body).digest()
    return _MAGIC + digest + _seal(key, digest) + body


def head_of(packed: bytes, key: bytes) -> Head:
    """Check packed bytes and return their header. `key`: the result of `key_in`.

    Raises `ValueError` if the bytes are damaged or forged, `MachineError` if another user or host packed them.
    """
    body = memoryview(packed)[_START:]
    if not packed.startswith(_MAGIC) or len(body) < _LENGTH.size:
        raise ValueError("these bytes are not a snapshot of a virtual machine")
    digest, seal = packed[len(_MAGIC) :][:_DIGEST], packed[len(_MAGIC) + _DIGEST : _START]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("the snapshot is damaged")
    (length,) = _LENGTH.unpack_from(body)
    try:
        head = msgspec.json.decode(body[_LENGTH.size :][: min(length, _MAX_HEAD)], type=Head)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the header of the snapshot is invalid: {error}") from None
    stops = [0, *(stop for at, size in head.extents for stop in (at, at + size)), head.disk]
    ordered = min(head.devices, head.pages) >= 0 and all(low <= high for low, high in pairwise(stops))
    if not ordered or len(body) != _LENGTH.size + length + _content_bytes(head):
        raise ValueError("the snapshot does not match its header")
    if head.key != _name(key):
        facts = "it contains only differences to a base machine that exists there"
        raise MachineError(
            "the snapshot was made on another host or by another user", facts, hint="use it where it was made"
        )
    if not hmac.compare_digest(seal, _seal(key, digest)):
        raise ValueError("the seal of the snapshot is invalid")
    return head


def unpack(packed: bytes, head: Head, *, image: str) -> Snapshot:
    """Return the snapshot in packed bytes whose header is `head`. `image`: the name of its booted image.

    Raises `MachineError` if the disk is full.
    """
    body = memoryview(packed)[_START:]
    at = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    devices = bytes(body[at : at + head.devices])
    at += head.devices
    numbers = np.frombuffer(body, "<i8", head.pages, at).astype(np.int64)
    at += numbers.nbytes
    content = np.frombuffer(body, np.uint8, head.pages * PAGE, at).reshape(-1, PAGE)
    at += content.nbytes
    disk = overlay.anonymous()
    try:
        os.ftruncate(disk, head.disk)
        for start, length in head.extents:
            overlay.write(disk, start, body[at : at + length])
            at += length
    except OSError as error:
        os.close(disk)
        raise MachineError("a snapshot cannot be unpacked", str(error), hint=overlay.SPACE_HINT) from None
    return Snapshot(image, devices, Pages(numbers, content), disk)


def _content_bytes(head: Head) -> int:
    return head.devices + head.pages * (8 + PAGE) + sum(length for _, length in head.extents)


def _name(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:16]


def _seal(key: bytes, digest: bytes) -> bytes:
    return hmac.digest(key, digest, "sha256")
