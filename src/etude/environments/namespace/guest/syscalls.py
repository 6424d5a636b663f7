"""System calls that Python 3.11 does not wrap. Each function raises `OSError` with the call's name."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x0002_0000, 0x0400_0000, 0x0800_0000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP = 0x1000_0000, 0x2000_0000, 0x4000_0000, 0x0200_0000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_SECUREBITS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 28, 36, 38
CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN = 6, 7, 21

MADV_DONTFORK, MADV_DOFORK = 10, 11

RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 2, 4, 8

_SECUREBITS = 0b1110_1011  # noroot, no ambient raise, no setuid-fixup and keep-caps off; all of it locked
_CAPABILITIES_OF_SELF = struct.pack("=II", 0x2008_0522, 0)
_NO_CAPABILITIES = bytes(24)  # effective, permitted, inheritable; low then high words
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_libc.unshare.argtypes, _libc.setns.argtypes = [ctypes.c_int], [ctypes.c_int, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_RT_SIGACTION = {"x86_64": 13, "aarch64": 134}
_OPENAT2, _MOUNT_SETATTR, _OPEN_TREE, _MOVE_MOUNT = 437, 442, 428, 429  # the same number on every architecture
_OPEN_TREE_CLONE, _MOVE_FROM_FD, _MOUNT_ATTR_IDMAP, _AT_EMPTY_PATH = 1, 4, 0x0010_0000, 0x1000


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Leave the namespaces in `flags` (CLONE_NEW* constants) for new ones."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Join the namespace behind the descriptor `fd`, or the namespaces `kind` of the process behind a pidfd."""
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system of type `kind` at `target` with the system call mount(2)."""
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode() or None)
    _check(result, f"mount {kind or 'bind'} on {target}")


def protect(target: str, attributes: int, *, recursive: bool) -> None:
    """Add attributes (read-only, nosuid, nodev) to a mount and, if `recursive`, to all mounts below it."""
    packed = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR), _AT_FDCWD, target.encode(), flags, packed, ctypes.c_size_t(ctypes.sizeof(packed))
    )
    _check(result, f"mount_setattr {target}")


def clone_tree(path: str) -> int:
    """Copy the mount at `path` and those below it, without a mount point. Returns a descriptor of the copy."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
    return _check(_libc.syscall(ctypes.c_long(_OPEN_TREE), _AT_FDCWD, path.encode(), flags), f"open_tree {path}")


def move_tree(tree: int, target: str) -> None:
    """Mount the copy that `clone_tree` returned at `target`."""
    result = _libc.syscall(ctypes.c_long(_MOVE_MOUNT), tree, b"", _AT_FDCWD, target.encode(), _MOVE_FROM_FD)
    _check(result, f"move_mount to {target}")


def map_ids(tree: int, namespace: int) -> None:
    """Map the owners of files below a detached mount through a user namespace. Both are descriptors."""
    packed = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_IDMAP, 0, 0, namespace)
    size = ctypes.c_size_t(ctypes.sizeof(packed))
    result = _libc.syscall(ctypes.c_long(_MOUNT_SETATTR), tree, b"", _AT_EMPTY_PATH, packed, size)
    _check(result, "mount_setattr of an ID map")


def pivot_into(new_root: str) -> None:
    """Make `new_root`, a mount point, the root and unmount the old root."""
    os.chdir(new_root)
    _check(_libc.syscall(ctypes.c_long(_PIVOT_ROOT[os.uname().machine]), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def unmount(path: str) -> None:
    """Call umount2(2) for a mount and all mounts below it."""
    _check(_libc.umount2(path.encode(), MNT_DETACH), f"umount {path}")


def open_beneath(directory: int, path: str, flags: int, mode: int = 0) -> int:
    """Open `path` below the descriptor `directory` with openat2(2), never through a link or out of it.

    `flags` and `mode` are those of open(2). Returns a file descriptor.
    """
    how = (ctypes.c_uint64 * 3)(
        flags | os.O_CLOEXEC, mode, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS
    )
    size = ctypes.c_size_t(ctypes.sizeof(how))
    fd = _libc.syscall(ctypes.c_long(_OPENAT2), directory, os.fsencode(path), how, size)
    return _check(fd, "openat2")


def forget_signal(number: int) -> None:
    """Reset a signal to its default action, even one that the C library reserves."""
    action = bytes(32)  # struct sigaction: no handler, no flags, an empty mask
    call = ctypes.c_long(_RT_SIGACTION[os.uname().machine])
    _check(_libc.syscall(call, number, action, None, ctypes.c_size_t(8)), "rt_sigaction")


def prctl(option: int, value: int = 0) -> None:
    """Call prctl(2) with one argument."""
    _check(_libc.prctl(option, value, 0, 0, 0), "prctl")


def set_seccomp(program: ctypes.Structure) -> None:
    """Install a system-call filter for this process; no_new_privs must be set."""
    _check(_libc.prctl(PR_SET_SECCOMP, 2, ctypes.addressof(program), 0, 0), "prctl(seccomp)")


def set_hostname(name: str) -> None:
    """Call sethostname(2)."""
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


@contextlib.contextmanager
def acting_on_files_as(user: int | None) -> Iterator[None]:
    """Let file accesses of this thread use `user` as uid and gid during a `with` block. None changes nothing."""
    if user is None:
        yield
        return
    before = _libc.setfsgid(user), _libc.setfsuid(user)
    try:
        yield
    finally:
        _libc.setfsuid(before[1])
        _libc.setfsgid(before[0])


def advise(start: int, size: int, advice: int) -> None:
    """Give the kernel advice about a memory range with the system call madvise(2)."""
    _check(_libc.madvise(start, size, advice), "madvise")


def drop_capabilities() -> None:
    """Drop all capabilities; programs that are executed later cannot gain any.

    The bounding set stays: with no_new_privs, nosuid on every mount and a powerless uid 0 it has no effect.
    """
    prctl(PR_SET_SECUREBITS, _SECUREBITS)
    _check(_libc.capset(_CAPABILITIES_OF_SELF, _NO_CAPABILITIES), "capset")
