"""Snapshots as bytes, for another runtime of this host: what differs from a base that both have.

``magic | SHA-256 of all after the seal | seal | u32 length, head as JSON | devices | page numbers | pages | disk``.
The base itself stays where it is kept, so the head names it, down to the very boot. QEMU reads a device state with the
host's rights and trusts it, so only bytes with the seal of this user's key are ever shown to it.
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
    """What the bytes are of. `base` and `boot` name the base: what it is, and the very boot of it."""

    key: str  # which key has sealed it
    base: str
    boot: str
    image: Image | None
    devices: int
    pages: int
    disk: int  # the overlay's size
    extents: list[tuple[int, int]]  # start and length of what is in it


def key_in(folder: Path) -> bytes:
    """The key of this user's snapshots, kept beside the bases; made where there is none yet. "" where none can be
    kept: no base is shared either, then."""
    path = folder / "key"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = folder / f".key-{secrets.token_hex(4)}"
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(new, path)  # whole, and the first one stays
        finally:
            new.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def pack(snapshot: Snapshot, *, base: str, boot: str, image: Image | None, key: bytes, max_bytes: int) -> bytes:
    """A snapshot's bytes. `ValueError` past `max_bytes`."""
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
    """What bytes are of that this key's owner packed. `ValueError` for others, `MachineError` for another owner's."""
    body = memoryview(packed)[_START:]
    if not packed.startswith(_MAGIC) or len(body) < _LENGTH.size:
        raise ValueError("these bytes are no snapshot of a virtual machine")
    digest, seal = packed[len(_MAGIC) :][:_DIGEST], packed[len(_MAGIC) + _DIGEST : _START]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("these bytes of a snapshot are damaged")
    (length,) = _LENGTH.unpack_from(body)
    try:
        head = msgspec.json.decode(body[_LENGTH.size :][: min(length, _MAX_HEAD)], type=Head)
    except msgspec.MsgspecError as error:
        raise ValueError(f"these bytes of a snapshot have no head: {error}") from None
    stops = [0, *(stop for at, size in head.extents for stop in (at, at + size)), head.disk]
    ordered = min(head.devices, head.pages) >= 0 and all(low <= high for low, high in pairwise(stops))
    if not ordered or len(body) != _LENGTH.size + length + _content_bytes(head):
        raise ValueError("these bytes of a snapshot are not what their head says")
    if head.key != _name(key):
        facts = "another user or host has packed it, and has its base"
        raise MachineError("a snapshot of another host", facts, hint="go on with it where it was made")
    if not hmac.compare_digest(seal, _seal(key, digest)):
        raise ValueError("the seal of these bytes is not ours")
    return head


def unpack(packed: bytes, head: Head, *, image: str) -> Snapshot:
    """The snapshot in bytes with this head, `image` being the booted image of it. `MachineError` where there is no room
    for it."""
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
        raise MachineError("a snapshot cannot be unpacked", str(error), hint=overlay.ROOM) from None
    return Snapshot(image, devices, Pages(numbers, content), disk)


def _content_bytes(head: Head) -> int:
    return head.devices + head.pages * (8 + PAGE) + sum(length for _, length in head.extents)


def _name(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:16]


def _seal(key: bytes, digest: bytes) -> bytes:
    return hmac.digest(key, digest, "sha256")
