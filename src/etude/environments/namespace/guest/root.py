"""The filesystem that all machines without an image start from: read-only, with what Python needs and nothing else.

The launcher builds it once, as the *frame*, and then has no other root either. A machine's own root consists of a few
overlays of the frame without upper layer: nothing is copied, and still no inode is shared with another machine, which
could lock or watch it. If the kernel supports no such overlay, or something is mounted below an overlaid folder,
machines share bind mounts of the same folders. A machine adds its work folder, /tmp and /proc. /usr/local is left out
unless the interpreter is there: what an operator installed by hand is not part of a machine.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from .syscalls import (
    CLONE_NEWNS,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    clone_tree,
    mount,
    move_tree,
    pivot_into,
    protect,
    unmount,
    unshare,
)

WORK = "/workspace"  # the working directory of every machine
PYTHON_BIN = "/opt/python/bin"  # holds the names `python` and `python3`
_USR = ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "share")  # visible folders of /usr
_BESIDE_USR = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")  # links into /usr where the two were merged
_ALTERNATIVES = "/etc/alternatives"
OWN, SHARED = "own", "shared"  # whether machines have inodes of their own
_FRAME = "/.frame"  # in the launcher's root only: the layers of machines' roots
DEVICES = ("null", "zero", "full", "random", "urandom")
_ETC = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:{WORK}:/bin/sh\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/shm": "/tmp",
    "/var/tmp": "/tmp",
}
READ_ONLY = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV


class Overlay(NamedTuple):
    """One overlay mount in a machine's root: its mount point `place`, and its layers, the upper one first."""

    place: str
    layers: tuple[str, ...]


class Frame(NamedTuple):
    """The parts from which the root filesystem of each machine is built. `enter` creates it.

    `overlays`: mounts of each machine's root; empty if machines share the launcher's root. `has_nodes`: whether
    machines have device files of their own.
    """

    overlays: tuple[Overlay, ...]
    has_nodes: bool

    @property
    def mode(self) -> str:
        """OWN if machines have inodes of their own, SHARED if they share those of the launcher's root."""
        return OWN if self.overlays else SHARED

    def make(self) -> None:
        """Enter a new root for a machine, from inside a mount namespace that was copied from the launcher's."""
        root, held = f"{_FRAME}/root", ["/proc"] if self.has_nodes else ["/proc", "/dev"]
        for place, layers in self.overlays:
            flags = MS_RDONLY | MS_NOSUID | (MS_NODEV if place != "/" or not self.has_nodes else 0)
            mount("overlay", root + place, "overlay", flags, f"lowerdir={':'.join(layers)}")
        trees = [(clone_tree(place), place) for place in held]
        try:
            pivot_into(root)
            for tree, place in trees:
                move_tree(tree, place)
        finally:
            for tree, _ in trees:
                os.close(tree)


def enter(python: str, prefix: str) -> Frame:
    """Build the root that machines start from, called the frame, in a new mount namespace, and make it this process's
    root.

    `python`: path of the interpreter. `prefix`: the folder where it is installed.
    """
    unshare(CLONE_NEWNS)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    new = next(d for d in ("/mnt", "/media", "/srv", "/sys") if os.path.isdir(d) and not f"{prefix}/".startswith(d))
    mount("tmpfs", new, "tmpfs", MS_NOSUID, "size=1m,mode=755")
    sources = ["/usr", *(top for top in _BESIDE_USR if os.path.isdir(top) and not os.path.islink(top))]
    sources += [] if _covered(prefix, sources) else [prefix]
    no_submounts = not any(mounted.startswith(f"{source}/") for mounted in _mounted() for source in sources)
    for top in filter(os.path.islink, _BESIDE_USR):
        os.symlink(os.readlink(top), new + top)
    overlays = _layers(new, sources, prefix)
    has_nodes = _make_devices(new)
    _write_etc(new)
    for link, target in {**LINKS, f"{PYTHON_BIN}/python": python, f"{PYTHON_BIN}/python3": python}.items():
        os.makedirs(os.path.dirname(new + link), exist_ok=True)
        os.symlink(target, new + link)
    for folder in ("/proc", "/tmp", "/root", WORK):
        os.makedirs(new + folder, exist_ok=True)
    mount("proc", f"{new}/proc", "proc", MS_NOSUID | MS_NODEV)
    pivot_into(new)
    frame = Frame(overlays, has_nodes)
    if not (no_submounts and _works(frame, python)):
        frame = Frame((), has_nodes)
        _bind(sources)
    protect("/", READ_ONLY & ~(MOUNT_ATTR_NODEV if has_nodes else 0), recursive=False)
    return frame


def _covered(prefix: str, sources: list[str]) -> bool:
    system = [f"/usr/{name}" for name in _USR] + sources[1:]
    return prefix == "/usr" or any(f"{prefix}/".startswith(f"{folder}/") for folder in system)


def _mounted() -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        return [line.split()[4] for line in lines]


def _layers(new: str, sources: list[str], prefix: str) -> tuple[Overlay, ...]:
    """Mount the sources in the frame. Returns the overlays to make of them. Extra layers: `places` with mount
    points, `hidden` and `top` with whiteouts, and `empty`."""
    frame = new + _FRAME
    os.mkdir(frame)
    mount("tmpfs", frame, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=700")  # layers must not overlap
    for folder in ("root", "places", "hidden", "top", "empty"):
        os.mkdir(f"{frame}/{folder}")
    os.mknod(f"{frame}/top{_FRAME}", stat.S_IFCHR)
    for name in {*os.listdir("/usr")} - {*_USR}:
        os.mknod(f"{frame}/hidden/{name}", stat.S_IFCHR)
    overlays = [Overlay("/", (f"{_FRAME}/top", "/"))]
    for i, source in enumerate(sources):
        os.makedirs(new + source, exist_ok=True)
        os.mkdir(f"{frame}/{i}")
        mount(source, f"{frame}/{i}", "", MS_BIND | MS_REC)
        protect(f"{frame}/{i}", READ_ONLY, recursive=True)
        above = ("places", "hidden") if source == "/usr" else ("empty",)  # an overlay needs two layers
        overlays.append(Overlay(source, (*(f"{_FRAME}/{name}" for name in above), f"{_FRAME}/{i}")))
    if prefix in sources and prefix.startswith("/usr/"):
        os.makedirs(f"{frame}/places/{prefix.removeprefix('/usr/')}")
    return tuple(overlays)


def _works(frame: Frame, python: str) -> bool:
    """Whether such a root can be made, tried in a process that then ends."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            unshare(CLONE_NEWNS)
            frame.make()
            code = 0 if os.access(python, os.X_OK) and os.access("/dev/null", os.R_OK | os.W_OK) else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _bind(sources: list[str]) -> None:
    """Bind the sources to their paths, without overlays."""
    for i, source in enumerate(sources):
        at = f"{_FRAME}/{i}"
        for part in [f"/{name}" for name in _USR] if source == "/usr" else [""]:
            if os.path.islink(at + part):
                os.symlink(os.readlink(at + part), source + part)
            elif os.path.isdir(at + part):
                os.makedirs(source + part, exist_ok=True)
                mount(at + part, source + part, "", MS_BIND | MS_REC)
    unmount(_FRAME)
    os.rmdir(_FRAME)


def _make_devices(new: str) -> bool:
    """Create device files. False if that is not allowed; then the host's devices are bound."""
    os.mkdir(f"{new}/dev")
    try:
        for name in DEVICES:
            path = f"{new}/dev/{name}"
            os.mknod(path, stat.S_IFCHR, os.stat(f"/dev/{name}").st_rdev)
            os.chmod(path, 0o666)
            os.close(os.open(path, os.O_RDONLY))
        return True
    except OSError:
        for name in os.listdir(f"{new}/dev"):
            os.unlink(f"{new}/dev/{name}")
        for name in DEVICES:
            bind_device(f"/dev/{name}", f"{new}/dev/{name}")
        return False


def bind_device(source: str, target: str) -> None:
    """Bind a device of the host to a new path."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, target, "", MS_BIND)


def _write_etc(new: str) -> None:
    os.makedirs(f"{new}/etc", exist_ok=True)
    for name, text in _ETC.items():
        with open(f"{new}/etc/{name}", "w", encoding="ascii") as file:
            file.write(text)
    os.mkdir(new + _ALTERNATIVES)
    if os.path.isdir(_ALTERNATIVES):
        for name in os.listdir(_ALTERNATIVES):
            if os.path.islink(f"{_ALTERNATIVES}/{name}"):
                os.symlink(os.readlink(f"{_ALTERNATIVES}/{name}"), f"{new}{_ALTERNATIVES}/{name}")
    if os.path.exists("/etc/ld.so.cache"):
        with open("/etc/ld.so.cache", "rb") as old, open(f"{new}/etc/ld.so.cache", "wb") as copy:
            copy.write(old.read())
