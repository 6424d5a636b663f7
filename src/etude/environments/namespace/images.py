"""Namespace machines whose root is an image: their user, their snapshots, and their changes to the image.

A snapshot consists of the image's name, the prepared files, and a layer with everything that commands have changed
anywhere in the root. Its id is the digest of that, and it is small, since the image is not copied.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Callable
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
from etude.environments.namespace.launcher import LauncherProcess, MachineHandle
from etude.environments.namespace.machine import NamespaceMachine
from etude.errors import EtudeError, MachineError
from etude.records.image import Image

_KIND = 2  # kind of a state's frame; a tree's is 1
_PASSWD_BYTES = 1 << 20
_NUMBER = re.compile("[0-9]{1,9}")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ImageState(NamedTuple):
    """A snapshot of an image's machine.

    `tree`: a TREE frame for the working directory, or b"". `layer`: the changes in the root filesystem, as a tar layer,
    or b"".
    """

    image: Image
    tree: bytes
    layer: bytes

    def pack(self) -> bytes:
        """Return the snapshot as one frame of bytes."""
        return wire.pack(_KIND, msgspec.json.encode(self.image), self.tree, self.layer)


def unpack_state(frame: bytes) -> ImageState | None:
    """Decode the bytes that `ImageState.pack` returned. Returns None for the frame of a file tree.

    Raises `ValueError` for anything else.
    """
    if frame[:1] == bytes([wire.TREE]):
        return None
    kind, fields = wire.unpack(frame)
    if kind != _KIND or len(fields) != 3:
        raise ValueError("not a packed snapshot")
    try:
        return ImageState(msgspec.json.decode(fields[0], type=Image), fields[1], fields[2])
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a packed snapshot: {error}") from None


def image_settings(store: ImageStore, image: Image, limits: MachineLimits) -> dict[str, Any]:
    """Return the launcher's settings for machines of an image, as plain data.

    Raises `MachineError` if the store lacks the image, or the image's user, directory or environment is invalid.
    """
    try:
        record: ImageRecord = store.get(image.digest)
    except EtudeError as error:
        raise MachineError(
            f"no machine can be made from image {image.digest[:16]}", error.what, hint=error.hint
        ) from None
    if not image.workdir.startswith("/") or "\0" in image.workdir or ".." in image.workdir.split("/"):
        raise MachineError(
            "no machine can be made from the image",
            f"its working directory is {image.workdir!r}",
            hint="use an absolute path",
        )
    for variable, value in image.env.items():
        if not variable or "=" in variable or "\0" in variable + value:
            facts = f"it sets {variable[:40]!r}"
            raise MachineError(
                f"no machine can be made from image {image.digest[:16]}",
                facts,
                hint="remove this environment variable from the image",
            )
    uid, gid, name, home, users = _find_user(store, image)
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
        "with_agent": ":" not in image.user
        and not re.search(r"\s", words),  # the agent supports neither groups nor spaces
        "env": env,
        "size": [limits.work_bytes, inodes, limits.tmp_bytes, inodes, record.num_bytes, record.num_files],
    }


def _find_user(store: ImageStore, image: Image) -> tuple[int, int, str, str, list[str]]:
    """(uid, gid, name, home, all known names) of the image's user: root, a number, or a name in its /etc/passwd."""
    user, _, group = image.user.partition(":")
    lines = [line.split(":") for line in _text_in(store, image.digest, "etc/passwd").splitlines()]
    known = [f for f in lines if len(f) == 7 and f[0] and _NUMBER.fullmatch(f[2]) and _NUMBER.fullmatch(f[3])]
    user = user or "0"
    found = next((f for f in known if user in (f[0], f[2])), None)
    if found is None and not _NUMBER.fullmatch(user):
        facts = f"its /etc/passwd has no {user[:60]!r}"
        raise MachineError(
            f"no machine can be made from image {image.digest[:16]}",
            facts,
            hint="add this user to the image, or choose another one",
        )
    name = found[0] if found else ("root" if user == "0" else user)
    home = found[5] if found else ("/root" if user == "0" else "/")
    uid, gid = (int(found[2]), int(found[3])) if found else (int(user), int(user))
    gid = int(group) if _NUMBER.fullmatch(group) else gid
    if max(uid, gid) >= NUM_IDS or uid == AGENT:
        facts = f"its user is {uid}:{gid}"
        raise MachineError(
            f"no machine can be made from image {image.digest[:16]}", facts, hint=f"use ids below {AGENT}"
        )
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
    """A `NamespaceMachine` whose root is an image.

    Its snapshots contain all changes to the root; it can also export them (`ChangeExporter`). `state`: the snapshot
    that it starts from. `first`: the host id of its root user; 0 without privilege. The other arguments are those of
    `NamespaceMachine`.
    """

    def __init__(
        self, handle: MachineHandle, launcher: LauncherProcess, state: ImageState, *, first: int, **common: Any
    ) -> None:
        settings = launcher.image or {}
        super().__init__(handle, launcher, owner=first + settings["uid"] if first else None, **common)
        self._image, self._first_id, self._root_mode = state.image, first, launcher.info["root"]
        several = first and launcher.info["agent"]
        self._users = tuple(settings["users"]) if several else (settings["user"],)
        own = ("HOME", "PWD", "USER")
        self._environment = {k: v for k, v in settings["env"].items() if k not in own or k in state.image.env}

    async def restore(self, state: ImageState) -> None:
        """Bring a new machine into the state of a snapshot. Raises `OSError` or `ValueError` if the state does not
        fit."""
        if state.layer:
            await self._in_thread(lambda: self._apply(state.layer))
        elif state.tree:
            await self.load(wire.unpack(state.tree).fields)

    async def load(self, tree: list[bytes]) -> None:
        """Write a file tree into a new machine's working directory, as `NamespaceMachine.load` does.

        If the working directory does not belong to the machine's user, root writes the files.
        """
        try:
            await super().load(tree)
        except PermissionError:
            if not self._first_id:
                raise
            await self._in_thread(lambda: self._write_as_root(tree))

    def _write_as_root(self, tree: list[bytes]) -> None:
        """Write files as root, then give them and new folders to the user. For a new machine, in which nothing has
        run."""
        work, owner, laid = self._handle.work, self._owner or 0, [os.fsdecode(path) for path in tree[::3]]
        paths = {*laid, *(str(folder) for path in laid for folder in PurePosixPath(path).parents)}
        given = [path for path in paths if not _is_folder(work, path)]  # checked before any is created
        with acting_on_files_as(self._first_id):
            files.load(work, tree)
        for path in given:
            os.chown(path, owner, owner, dir_fd=work, follow_symlinks=False)

    def _apply(self, layer: bytes) -> None:
        limits = ImageLimits(total_bytes=max(self._max_tree_bytes, 1) * 2)
        with Tree(self._handle.root, limits, first=self._first_id) as tree:
            try:
                apply_layer(decompressed(io.BytesIO(layer), limits), tree, skip=MOUNTED)
            except BadSource as error:
                raise ValueError(str(error)) from None

    def _pack_state(self) -> bytes:
        layer = bytearray()

        def write(data: bytes) -> None:
            layer.extend(data)
            if len(layer) > 2 * self._max_tree_bytes + (1 << 20):
                raise ValueError(f"the changes are larger than {self._max_tree_bytes} bytes")

        self._write_layer(write)
        return ImageState(self._image, b"", bytes(layer)).pack()

    def _write_layer(self, write: Callable[[bytes], object]) -> None:
        write_layer(self._handle.upper, write, ids=self._guest_id, whole=self._root_mode == COPIED, skip=MOUNTED)

    def _guest_id(self, owner: int) -> int:
        """A host user's number inside the machine; 0 (root) for a user that is outside of its range."""
        return owner - self._first_id if self._first_id and 0 <= owner - self._first_id < NUM_IDS else 0

    async def changes(self, out: BinaryIO, *, max_bytes: int) -> None:
        written = 0

        def write(data: bytes) -> None:
            nonlocal written
            written += len(data)
            if written > max_bytes:
                raise ValueError(f"the changes are larger than {max_bytes} bytes")
            out.write(data)

        async with self._paused():
            await self._in_thread(lambda: self._write_layer(write))
