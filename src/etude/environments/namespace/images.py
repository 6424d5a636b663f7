"""Machines of images: whom they run as, what a snapshot of one is, and how one tells what it has changed.

A snapshot is the image's name, the files that were prepared, and a layer: what commands have changed since, wherever
in the root. It is content-addressed like any other, and small, since the image stays where it is.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import msgspec

from etude.environments.config import MachineLimits
from etude.environments.images.decompression import decompressed
from etude.environments.images.layers import apply_layer, write_layer
from etude.environments.images.limits import BadSource, ImageLimits
from etude.environments.images.openat import open_in
from etude.environments.images.records import ImageRecord
from etude.environments.images.store import ImageStore
from etude.environments.images.tree import Tree
from etude.environments.namespace.guest import files, wire
from etude.environments.namespace.guest.overlay import AGENT, COPIED, MOUNTED, NUM_IDS
from etude.environments.namespace.guest.syscalls import acting_on_files_as
from etude.environments.namespace.launcher import LauncherProcess, Made
from etude.environments.namespace.machine import NamespaceMachine
from etude.errors import EtudeError, MachineError
from etude.records.image import Image

_KIND = 2  # of a frame; a tree's is 1
_PASSWD_BYTES = 1 << 20
_NUMBER = re.compile("[0-9]{1,9}")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class State(NamedTuple):
    """A snapshot of an image's machine: `tree` a TREE frame for the working directory, `layer` on top, or empty."""

    image: Image
    tree: bytes
    layer: bytes

    def pack(self) -> bytes:
        """One frame of all of it."""
        return wire.pack(_KIND, msgspec.json.encode(self.image), self.tree, self.layer)


def state_in(frame: bytes) -> State | None:
    """The state in a frame, or None for what could be the frame of a plain tree. `ValueError` for other bytes."""
    if frame[:1] == bytes([wire.TREE]):
        return None
    kind, fields = wire.unpack(frame)
    if kind != _KIND or len(fields) != 3:
        raise ValueError("these bytes are no snapshot")
    try:
        return State(msgspec.json.decode(fields[0], type=Image), fields[1], fields[2])
    except msgspec.MsgspecError as error:
        raise ValueError(f"these bytes are no snapshot: {error}") from None


def launcher_facts(store: ImageStore, image: Image, limits: MachineLimits) -> dict[str, Any]:
    """What a launcher must know of an image. `MachineError` where the store has it not, or not its user."""
    try:
        record: ImageRecord = store.get(image.digest)
    except EtudeError as error:
        raise MachineError(f"no machine of image {image.digest[:16]}", error.what, hint=error.hint) from None
    if not image.workdir.startswith("/") or "\0" in image.workdir or ".." in image.workdir.split("/"):
        raise MachineError(
            "no machine of that image", f"its directory is {image.workdir!r}", hint="name an absolute one"
        )
    for variable, value in image.env.items():
        if not variable or "=" in variable or "\0" in variable + value:
            facts = f"it sets {variable[:40]!r}"
            raise MachineError(f"no machine of image {image.digest[:16]}", facts, hint="mend its environment")
    uid, gid, name, home, users = _person(store, image)
    env = {"PATH": _PATH, "HOME": home, "USER": name, "LANG": "C.UTF-8", **image.env, "PWD": image.workdir}
    words = f"{image.workdir}{image.user}{env['PATH']}"
    inodes = limits.inodes
    return {
        "path": str(store.root(image.digest)),
        "workdir": os.path.normpath(image.workdir),
        "uid": uid,
        "gid": gid,
        "user": image.user or str(uid),
        "users": users,
        "with_agent": ":" not in image.user and not re.search(r"\s", words),  # it knows no groups, and splits words
        "env": env,
        "size": [limits.work_bytes, inodes, limits.tmp_bytes, inodes, record.num_bytes, record.num_files],
    }


def _person(store: ImageStore, image: Image) -> tuple[int, int, str, str, list[str]]:
    """(uid, gid, name, home) of the image's user: root, numbers, or a name of its /etc/passwd; and all names there."""
    user, _, group = image.user.partition(":")
    lines = [line.split(":") for line in _text_in(store, image.digest, "etc/passwd").splitlines()]
    known = [f for f in lines if len(f) == 7 and f[0] and _NUMBER.fullmatch(f[2]) and _NUMBER.fullmatch(f[3])]
    user = user or "0"
    found = next((f for f in known if user in (f[0], f[2])), None)
    if found is None and not _NUMBER.fullmatch(user):
        facts = f"its /etc/passwd has no {user[:60]!r}"
        raise MachineError(f"no machine of image {image.digest[:16]}", facts, hint="mend the image's user")
    name = found[0] if found else ("root" if user == "0" else user)
    home = found[5] if found else ("/root" if user == "0" else "/")
    uid, gid = (int(found[2]), int(found[3])) if found else (int(user), int(user))
    gid = int(group) if _NUMBER.fullmatch(group) else gid
    if max(uid, gid) >= NUM_IDS or uid == AGENT:
        facts = f"its user is {uid}:{gid}"
        raise MachineError(f"no machine of image {image.digest[:16]}", facts, hint=f"give it one below {AGENT}")
    return uid, gid, name, home, [f[0] for f in known if int(f[2]) < NUM_IDS and int(f[2]) != AGENT]


def _text_in(store: ImageStore, digest: str, path: str) -> str:
    with store.open_root(digest) as root:
        try:
            with open(open_in(root, path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                return file.read(_PASSWD_BYTES).decode(errors="replace")
        except OSError:
            return ""


def _is_folder(root: int, path: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path, dir_fd=root, follow_symlinks=False).st_mode)
    except OSError:
        return False


class ImageMachine(NamespaceMachine):
    """A machine whose root is an image's; its snapshots hold what changed anywhere in it. Tells it, too:
    `ChangeExporter`."""

    def __init__(self, made: Made, launcher: LauncherProcess, state: State, *, first: int, **common: Any) -> None:
        facts = launcher.image or {}
        super().__init__(made, launcher, owner=first + facts["uid"] if first else None, **common)
        self._image, self._first, self._mode = state.image, first, launcher.facts["root"]
        several = first and launcher.facts["agent"]
        self._users = tuple(facts["users"]) if several else (facts["user"],)
        own = ("HOME", "PWD", "USER")
        self._environment = {k: v for k, v in facts["env"].items() if k not in own or k in state.image.env}

    def _is_forked(self, argv: Sequence[str], user: str) -> bool:
        return False  # its Python is its own

    async def restore(self, state: State) -> None:
        """Bring a new machine into a state. `OSError` or `ValueError` for one that does not fit."""
        if state.layer:
            await self._on_root(lambda: self._apply(state.layer))
        elif state.tree:
            await self.load(wire.unpack(state.tree).fields)

    async def load(self, tree: list[bytes]) -> None:
        """See `NamespaceMachine.load`. Where the working directory is not its user's, its root lays the files."""
        try:
            await super().load(tree)
        except PermissionError:
            if not self._first:
                raise
            await self._on_root(lambda: self._lay(tree))

    def _lay(self, tree: list[bytes]) -> None:
        """As root, then given to its user, new folders too. Nothing has run in it: what is there stays."""
        work, owner, laid = self._made.work, self._owner or 0, [os.fsdecode(path) for path in tree[::3]]
        paths = {*laid, *(str(folder) for path in laid for folder in PurePosixPath(path).parents)}
        given = [path for path in paths if not _is_folder(work, path)]  # looked for before any is made
        with acting_on_files_as(self._first):
            files.load(work, tree)
        for path in given:
            os.chown(path, owner, owner, dir_fd=work, follow_symlinks=False)

    def _apply(self, layer: bytes) -> None:
        limits = ImageLimits(total_bytes=max(self._max_tree_bytes, 1) * 2)
        with Tree(self._made.root, limits, first=self._first) as tree:
            try:
                apply_layer(decompressed(io.BytesIO(layer), limits), tree, skip=MOUNTED)
            except BadSource as error:
                raise ValueError(str(error)) from None

    def _saved(self) -> bytes:
        layer = bytearray()

        def write(data: bytes) -> None:
            layer.extend(data)
            if len(layer) > 2 * self._max_tree_bytes + (1 << 20):
                raise ValueError(f"the changes are larger than {self._max_tree_bytes} bytes")

        self._write_layer(write)
        return State(self._image, b"", bytes(layer)).pack()

    def _write_layer(self, write: Callable[[bytes], object]) -> None:
        write_layer(self._made.upper, write, ids=self._inside, whole=self._mode == COPIED, skip=MOUNTED)

    def _inside(self, owner: int) -> int:
        """A user of the host's as the machine sees it; what it cannot see is root's."""
        return owner - self._first if self._first and 0 <= owner - self._first < NUM_IDS else 0

    async def changes(self, out: BinaryIO, *, max_bytes: int) -> None:
        """See `images.layers.ChangeExporter`."""
        written = 0

        def write(data: bytes) -> None:
            nonlocal written
            written += len(data)
            if written > max_bytes:
                raise ValueError(f"the changes are larger than {max_bytes} bytes")
            out.write(data)

        async with self._standing():
            await self._on_root(lambda: self._write_layer(write))
