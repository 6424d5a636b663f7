"""Machines with a root filesystem of their own: an image as the lower layer, the machine's changes above.

An image's launcher has a frame as its root: the image (read-only), devices and its own /proc. A machine's root is an
overlay of the image and a sized tmpfs, mounted in the machine's mount namespace, which then no longer contains the
frame. Inside the machine, each file belongs to the user that the image gives it. The machine's users are a range of
host ids, and the image is mounted through that range (an ID-mapped mount; below an overlay since Linux 5.19). Without
privilege there is one user, who owns everything. If the kernel supports neither mount, the image is copied.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
from collections.abc import Callable
from typing import NamedTuple

from .agents import write_maps
from .root import DEVICES, LINKS, READ_ONLY, bind_device
from .syscalls import (
    CLONE_NEWNS,
    CLONE_NEWUSER,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    clone_tree,
    map_ids,
    mount,
    move_tree,
    pivot_into,
    protect,
    unshare,
)

NUM_IDS = 65_536  # ids of one machine, with privilege
AGENT = NUM_IDS - 3  # the agent's id in the machine; otherwise unused
IDMAPPED, PLAIN, COPIED = "idmapped", "overlay", "copied"
MOUNTED = ("proc", "dev", "tmp")  # mount points in a machine's root; they hide the image's content
_IMAGE, _MACHINE = "/image", "/machine"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_REFUSED = (errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENODEV, errno.EOPNOTSUPP, errno.EACCES, errno.EOVERFLOW)


class Size(NamedTuple):
    """Limits on what a machine may add to its image, and the image's own size. The host sends these numbers as JSON.

    `upper_*` limit the changes to the image's files, `tmp_*` the content of /tmp.
    """

    upper_bytes: int
    upper_inodes: int
    tmp_bytes: int
    tmp_inodes: int
    image_bytes: int
    image_files: int


class Opened(NamedTuple):
    """Descriptors of a machine's folders; the receiver closes them.

    `work`: the working directory. `upper`: the overlay's upper folder with the machine's changes; the whole root if the
    image was copied. `root`: the root.
    """

    work: int
    upper: int
    root: int


def enter_frame(image: str) -> None:
    """Create the frame of an image in a new mount namespace, and make it this process's root.

    The frame has the image, device files and /proc. `image`: the folder of the image on the host.
    """
    unshare(CLONE_NEWNS)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    new = next(
        d for d in ("/mnt", "/media", "/srv", "/sys") if os.path.isdir(d) and not f"{image}/".startswith(f"{d}/")
    )
    mount("tmpfs", new, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for name in (_IMAGE, _MACHINE, "/proc", "/dev"):
        os.mkdir(new + name, 0o755)
    mount(image, new + _IMAGE, "", MS_BIND)
    protect(new + _IMAGE, READ_ONLY, recursive=False)
    for name in DEVICES:
        bind_device(f"/dev/{name}", f"{new}/dev/{name}")
    for link, target in LINKS.items():
        if link.startswith("/dev/"):
            os.symlink(target, new + link)
    mount("proc", f"{new}/proc", "proc", MS_NOSUID | MS_NODEV)
    pivot_into(new)
    protect("/", READ_ONLY, recursive=False)


class Roots:
    """Creates the roots of an image's machines, from the frame that `enter_frame` made.

    `base`: the first host id of machines; None without privilege. `size`: limits. `uid`, `gid`: the user of commands,
    inside the machine. The methods get the number of a machine's slot, which has a range of host ids.
    """

    def __init__(self, base: int | None, size: Size, workdir: str, uid: int, gid: int) -> None:
        self._base, self._size, self._workdir, self._uid, self._gid = base, size, workdir, uid, gid
        self._namespaces: dict[int, int] = {}  # by slot: open user namespaces, for their maps
        modes = (PLAIN, COPIED) if base is None else (IDMAPPED, COPIED)
        self.mode = next((mode for mode in modes if self._works(mode)), COPIED)

    def first(self, slot: int) -> int:
        """Return the host id, as the launcher sees it, of root in this slot's machine."""
        return 0 if self._base is None else self._base + slot * NUM_IDS

    def maps(self, slot: int) -> str:
        """Return the text of the map of user and group ids of this slot's user namespace."""
        return f"{self._uid} 0 1\n" if self._base is None else f"0 {self.first(slot)} {NUM_IDS}\n"

    def owner(self, slot: int) -> int:
        """Return the host id, as the launcher sees it, of the user of commands in this slot's machine."""
        return 0 if self._base is None else self.first(slot) + self._uid

    def prepare(self, slot: int, users_of: Callable[[int], int]) -> int:
        """Return a descriptor of the user namespace of a slot's machines; `users_of` makes it on the first call.

        Call this before entering a machine's namespaces.
        """
        if slot not in self._namespaces:
            self._namespaces[slot] = users_of(slot)
        return self._namespaces[slot]

    def make(self, slot: int) -> Opened:
        """Enter a machine's root, from inside a new mount namespace that was copied from the launcher's.

        Nothing else stays reachable. Returns descriptors of the machine's folders.
        """
        first, size = self.first(slot), self._size
        copied = self.mode == COPIED
        num_bytes, inodes = size.upper_bytes, size.upper_inodes
        if copied:
            num_bytes, inodes = num_bytes + size.image_bytes + (size.image_files << 12), inodes + size.image_files
        flags = MS_NOSUID | MS_NODEV
        mount("tmpfs", _MACHINE, "tmpfs", flags, f"size={num_bytes},nr_inodes={inodes + 8},mode=700")
        proc, devices = clone_tree("/proc"), clone_tree("/dev")
        try:
            root, upper = f"{_MACHINE}/root", f"{_MACHINE}/upper"
            os.mkdir(root, 0o755)
            if copied:
                os.chown(root, first, first)
                copy(_IMAGE, root, first)
                opened_upper = os.open(root, _FOLDER)  # opened before the bind mount, so without later mounts
                mount(root, root, "", MS_BIND)
            else:
                self._mount_overlay(slot, root, upper, first)
                opened_upper = os.open(upper, _FOLDER)
            pivot_into(root)
            for tree, target in ((proc, "/proc"), (devices, "/dev")):
                _make_place(target, first)
                move_tree(tree, target)
        finally:
            os.close(proc)
            os.close(devices)
        _make_place("/tmp", first)
        own = f"uid={first},gid={first}"
        mount("tmpfs", "/tmp", "tmpfs", flags, f"size={size.tmp_bytes},nr_inodes={size.tmp_inodes},mode=1777,{own}")
        return Opened(self._work(slot), opened_upper, os.open("/", _FOLDER))

    def _work(self, slot: int) -> int:
        """The working directory; if the image has none, it is created for the commands' user."""
        there = os.path.isdir(self._workdir)
        _make_folders(self._workdir, self.first(slot))
        fd = os.open(self._workdir, _FOLDER)
        if not there:
            group = 0 if self._base is None else self.first(slot) + self._gid
            os.fchown(fd, self.owner(slot), group)
        return fd

    def _mount_overlay(self, slot: int, root: str, upper: str, first: int) -> None:
        work, lower = f"{_MACHINE}/work", _IMAGE
        found = os.stat(_IMAGE)
        for folder in (upper, work):
            os.mkdir(folder)
            os.chmod(folder, stat.S_IMODE(found.st_mode))
            os.chown(folder, first, first)
        options = (
            ",redirect_dir=nofollow,metacopy=off,index=off"  # so that the upper folder contains complete changed files
        )
        if self.mode == IDMAPPED:
            lower = f"{_MACHINE}/lower"
            os.mkdir(lower)
            tree = clone_tree(_IMAGE)
            try:
                map_ids(tree, self._namespaces[slot])
                move_tree(tree, lower)
            finally:
                os.close(tree)
        else:
            options = ",userxattr"  # rootless, overlay marks are stored as user attributes
        layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
        mount("overlay", root, "overlay", MS_NOSUID | MS_NODEV, layers + options)

    def users_of(self, slot: int) -> int:
        """Return a descriptor of a new user namespace for a slot, made by a short-lived fork of this process."""
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):
                unshare(CLONE_NEWUSER)
                os.write(write_end, b"x")
                signal.pause()
            os._exit(1)
        os.close(write_end)
        try:
            with open(read_end, "rb", buffering=0) as pipe:
                if not pipe.read(1):
                    raise OSError(errno.EPERM, "unshare: a user namespace cannot be made")
            write_maps(pid, self.maps(slot))
            return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _works(self, mode: str) -> bool:
        """Whether machines can be made in this mode, tried in a process that then ends."""
        self.mode = mode
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self.prepare(0, self.users_of)
                unshare(CLONE_NEWNS)
                self.make(0)
                code = 0
            except OSError as error:
                code = 2 if error.errno in _REFUSED else 1
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _make_place(path: str, owner: int) -> None:
    """A folder to mount something on; anything else at this path is removed."""
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
        os.unlink(path)
    _make_folders(path, owner)


def _make_folders(path: str, owner: int) -> None:
    """Create a folder of the machine's root and its parents. Links on the way stay inside the root."""
    for at in ("/".join(path.split("/")[:depth]) for depth in range(2, path.count("/") + 2)):
        if not os.path.isdir(at):
            os.mkdir(at, 0o755)
            os.chown(at, owner, owner)


def copy(source: str, target: str, first: int) -> None:
    """Copy a folder tree into an empty folder, with all owner ids shifted by `first`. Links are copied, not
    followed."""
    with os.scandir(source) as entries:
        for entry in entries:
            to = f"{target}/{entry.name}"
            found = entry.stat(follow_symlinks=False)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), to)
            elif entry.is_dir(follow_symlinks=False):
                os.mkdir(to, 0o700)
                copy(entry.path, to, first)
            else:
                _copy_file(entry.path, to)
            own = (found.st_uid + first, found.st_gid + first)
            if first:  # rootless, this user owns all files already
                os.chown(to, *own, follow_symlinks=False)
            if not entry.is_symlink():
                os.chmod(to, stat.S_IMODE(found.st_mode))


def _copy_file(source: str, target: str) -> None:
    with open(source, "rb", buffering=0) as old, open(target, "xb", buffering=0) as new:
        while os.sendfile(new.fileno(), old.fileno(), None, 1 << 24):
            pass
